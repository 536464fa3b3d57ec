# SPDX-License-Identifier: Apache-2.0
"""Keeps gradients until an optimizer's step without copying them.

``GradientHooks`` puts a ``LentGradient`` into ``param.grad`` as soon as backward has accumulated
the gradient. A LentGradient has no storage. It holds the tensor that backward made (from the
second backward on, an fp32 sum), and the product of all factors that the gradient was multiplied
by. So clipping and loss scaling write no gradient. PyTorch may round several times (sums in 16
bits, two factors); these values are rounded once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._gradients.gradient_content import Content, Slot, Taken
from ziggurat._gradients.lent_gradient import LentGradient
from ziggurat._gradients.shared_content import SharedContent
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._pytorch.dtensor import is_dtensor, like, local_of
from ziggurat._pytorch.torch_private import elements_overlap

__all__ = ["GradientHooks", "LentGradient", "Taken"]


class GradientHooks:
    """Puts LentGradients into parameters' ``grad``, and gives each step the gradients that it
    consumes.

    ``on_arrival(index)`` is called in backward each time that a parameter's gradient has arrived;
    with reentrant checkpointing that may be several times in one backward.
    """

    def __init__(self, on_arrival: Callable[[int], None] | None = None) -> None:
        self.on_arrival = on_arrival
        #: Makes the content of a LentGradient from the gradient that backward made for the slot's
        #: parameter.
        self.content: Callable[[Slot, torch.Tensor], Content] = Content
        self.lending = True  #: if False, backward's gradients stay as they are
        self._slots: Any = WeakTensorKeyDictionary()  # Tensor -> Slot
        self._count = 0

    def attach(
        self, named_params: Iterable[tuple[str | Callable[[int], str], torch.Tensor]]
    ) -> list[Slot]:
        """Attaches the hooks; may be called again. New parameters get the next indices. Unfrozen
        parameters get their hook, and so do parameters of torch.nn.Lazy* modules once they have a
        shape. A name may be a function that returns the name for an index, once it is known."""
        slots = []
        for name, param in named_params:
            slot = self._slots.get(param)
            if slot is None:
                slot = self._slots[param] = Slot(name, self._count)
                self._count += 1
            if slot.handle is None and param.requires_grad and not is_lazy(param):
                hook = functools.partial(_arrived, weakref.ref(self), slot)
                slot.handle = param.register_post_accumulate_grad_hook(hook)
            slots.append(slot)
        return slots

    def is_shared(self, param: torch.Tensor) -> bool:
        """Returns whether the parameter's gradient is divided among ranks."""
        grad = param.grad
        return isinstance(grad, LentGradient) and isinstance(grad._content, SharedContent)

    def slot(self, param: torch.Tensor) -> Slot | None:
        found: Slot | None = self._slots.get(param)
        return found

    def detach(self) -> None:
        """Removes the hooks. Gradients that are already lent stay readable, and backward still adds
        to them."""
        for slot in self._slots.values():
            if slot.handle is not None:
                slot.handle.remove()
                slot.handle = None

    def move_scales(
        self,
        params: Iterable[torch.Tensor],
        moved: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        """Replaces the scales of lent gradients by `moved(scales)`, so that take() reads the new
        scales."""
        grads = [_here(param.grad) for param in params]
        contents = [grad._content for grad in grads if isinstance(grad, LentGradient)]
        scaled = [(content, content.scale) for content in contents if content.scale is not None]
        scales = moved([scale for _, scale in scaled])
        for (content, _), scale in zip(scaled, scales, strict=True):
            content.scale = scale

    def take(self, param: torch.Tensor, slot: Slot | None = None) -> Taken | None:
        """Returns what a step consumes, or None without a gradient. The gradient is lent until
        ``consumed``. Passing the parameter's `slot` saves a look-up."""
        slot, grad = slot or self._slot(param), _here(param.grad)
        if grad is None:
            return None
        if not isinstance(grad, LentGradient):
            grad = dense(grad, slot)
            if grad.requires_grad:
                # The gradient is copied, because zero_grad() may zero its memory while the step
                # reads it.
                return Taken(grad.detach().clone(memory_format=torch.contiguous_format), 1.0)
            grad = _lend(param, self.content(slot, _in_order(grad)))
        elif grad.is_view:
            grad = _lend(param, self.content(slot, grad.materialize()))
        return grad.parts()

    def consumed(
        self, param: torch.Tensor, slot: Slot | None = None, *, keep: bool = True
    ) -> None:
        """Tells that the step has read what it took. With `keep` backward adds to the gradient.

        Without `keep` the gradient's memory is let go: reading the gradient then raises, and the
        next backward starts from the beginning. A gradient that has come since is not touched.
        """
        grad = _here(param.grad)
        if isinstance(grad, LentGradient):
            if grad._content.taken:
                grad._content.consumed_by_step(keep)
        elif grad is not None and grad.requires_grad and not keep:
            grad = _lend(param, Content(slot or self._slot(param), grad.detach()))
            grad._content.consumed_by_step(keep)

    def _slot(self, param: torch.Tensor) -> Slot:
        slot: Slot | None = self._slots.get(param)
        if slot is None:
            raise InvalidArgument(
                f"a parameter of shape {tuple(param.shape)} was not attached to the gradient hooks"
            )
        return slot


def in_place(grad: torch.Tensor | None) -> Content | None:
    """Returns the content if a step can read the gradient as it is: nothing scales it, and no rank
    holds a mere slice."""
    if type(grad) is not LentGradient or grad._path:
        return None
    content = grad._content
    if type(content) is not Content or content.scale is not None or content.consumed:
        return None
    return content if content.part is not None and content.part.is_contiguous() else None


def _here(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Returns this process's part of the gradient."""
    if grad is None or type(grad) is LentGradient:
        return grad
    return local_of(grad) if is_dtensor(grad) else grad


def _in_order(grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient in the order of its indices, as the engine reads it, so that sums over
    it have the same bits whatever its layout. An expanded gradient is put in order when a step
    takes it."""
    if grad.is_contiguous() or elements_overlap(grad):
        return grad
    return grad.contiguous()


def _lend(param: torch.Tensor, content: Content) -> LentGradient:
    lent = LentGradient(content)
    param.grad = like(param, lent) if is_dtensor(param) else lent
    return lent


def dense(grad: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Returns a plain dense gradient; a sparse one without values becomes zeros. Errors:
    Unimplemented for other kinds of gradient."""
    if grad.layout is torch.sparse_coo and grad._nnz() == 0:
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    if grad.layout is not torch.strided:
        raise Unimplemented(
            f"parameter '{slot.name}' has a sparse gradient: make its layer with sparse=False"
        )
    if type(grad) not in (torch.Tensor, torch.nn.Parameter):
        raise Unimplemented(
            f"parameter '{slot.name}' has a gradient of type {type(grad).__name__}, "
            "which is not supported: only plain tensors are"
        )
    return grad


def _arrived(owner: weakref.ref[GradientHooks], slot: Slot, param: torch.Tensor) -> None:
    hooks, grad = owner(), _here(param.grad)
    if hooks is None or grad is None:
        return
    if not isinstance(grad, LentGradient) and hooks.lending:
        grad = dense(grad, slot)
        # A gradient that has a graph of its own, as with create_graph, stays as it is.
        if not grad.requires_grad:
            grad = _lend(param, hooks.content(slot, _in_order(grad)))
    if isinstance(grad, LentGradient):
        grad._content.arrivals += 1
    if hooks.on_arrival is not None:
        hooks.on_arrival(slot.index)
