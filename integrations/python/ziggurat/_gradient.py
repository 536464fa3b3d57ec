# SPDX-License-Identifier: Apache-2.0
"""Gradients that wait for an optimizer's step without being copied.

``GradientHooks`` puts a ``LentGradient`` into ``param.grad`` as soon as backward has accumulated
it. It has no storage: it holds the tensor that backward made, or from the second backward on an
fp32 sum, and the product of all that the gradient was multiplied by. So clipping and loss scaling
write no gradient. Where PyTorch rounds several times (sums in 16 bits, two factors), the values
are rounded once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._dtensor import is_dtensor, like, local_of
from ziggurat._gradient_content import Content, Slot, Taken
from ziggurat._lent_gradient import LentGradient
from ziggurat._native import InvalidArgument, Unimplemented
from ziggurat._shared_content import SharedContent

__all__ = ["GradientHooks", "LentGradient", "Taken"]


class GradientHooks:
    """Puts LentGradients into parameters' ``grad``, and gives a step what it consumes.

    ``on_arrival(index)`` is called in backward each time that a parameter's gradient has arrived;
    with reentrant checkpointing that may be several times in one backward.
    """

    def __init__(self, on_arrival: Callable[[int], None] | None = None) -> None:
        self.on_arrival = on_arrival
        #: What a gradient of the slot's parameter is held as, from that which backward made.
        self.content: Callable[[Slot, torch.Tensor], Content] = Content
        self.lending = True  #: False: backward's gradients stay what they are
        self._slots: Any = WeakTensorKeyDictionary()  # Tensor -> Slot
        self._count = 0

    def attach(
        self, named_params: Iterable[tuple[str | Callable[[int], str], torch.Tensor]]
    ) -> list[Slot]:
        """Again is harmless: new parameters get the next indices, unfrozen ones their hook, and so do
        those of torch.nn.Lazy* modules that have a shape by now. A name
        may be what gives it by the index, once it is known."""
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
        """Whether its gradient is divided among ranks."""
        grad = param.grad
        return isinstance(grad, LentGradient) and isinstance(grad._content, SharedContent)

    def slot(self, param: torch.Tensor) -> Slot | None:
        found: Slot | None = self._slots.get(param)
        return found

    def detach(self) -> None:
        """Gradients that are lent stay as they are: readable, and added to by backward."""
        for slot in self._slots.values():
            if slot.handle is not None:
                slot.handle.remove()
                slot.handle = None

    def move_scales(
        self,
        params: Iterable[torch.Tensor],
        moved: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        """Replaces the scales of lent gradients by what `moved` makes of them; take() reads the new
        ones."""
        grads = [_here(param.grad) for param in params]
        contents = [grad._content for grad in grads if isinstance(grad, LentGradient)]
        scaled = [(content, content.scale) for content in contents if content.scale is not None]
        scales = moved([scale for _, scale in scaled])
        for (content, _), scale in zip(scaled, scales, strict=True):
            content.scale = scale

    def take(self, param: torch.Tensor, slot: Slot | None = None) -> Taken | None:
        """What a step consumes; None without a gradient. It is lent until ``consumed``. Who has the
        parameter's `slot` saves that it is looked for."""
        slot, grad = slot or self._slot(param), _here(param.grad)
        if grad is None:
            return None
        if not isinstance(grad, LentGradient):
            grad = dense(grad, slot)
            if grad.requires_grad:
                # zero_grad() may zero its memory while the step reads it: a copy.
                return Taken(grad.detach().clone(memory_format=torch.contiguous_format), 1.0)
            grad = _lend(param, self.content(slot, _in_order(grad)))
        elif grad.is_view:
            grad = _lend(param, self.content(slot, grad.materialize()))
        return grad.parts()

    def consumed(
        self, param: torch.Tensor, slot: Slot | None = None, *, keep: bool = True
    ) -> None:
        """The step has read what it took. `keep`: backward adds to the gradient, as PyTorch does.

        Without `keep` its memory is let go: to read it raises, and backward starts anew. Nothing
        happens to a gradient that has come since.
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
            raise InvalidArgument(f"a parameter of shape {tuple(param.shape)} was not attached")
        return slot


def in_place(grad: torch.Tensor | None) -> Content | None:
    """Where a step can read the gradient as it is: nothing multiplies it, and no rank has a slice."""
    if type(grad) is not LentGradient or grad._path:
        return None
    content = grad._content
    if type(content) is not Content or content.scale is not None or content.consumed:
        return None
    return content if content.part is not None and content.part.is_contiguous() else None


def _here(grad: torch.Tensor | None) -> torch.Tensor | None:
    """What this process has of it."""
    if grad is None or type(grad) is LentGradient:
        return grad
    return local_of(grad) if is_dtensor(grad) else grad


def _in_order(grad: torch.Tensor) -> torch.Tensor:
    """In the order of its indices, as the engine reads it: sums over it then have the same bits,
    however it lies. What is expanded is so when a step takes it."""
    if grad.is_contiguous() or torch._debug_has_internal_overlap(grad) == 1:
        return grad
    return grad.contiguous()


def _lend(param: torch.Tensor, content: Content) -> LentGradient:
    lent = LentGradient(content)
    param.grad = like(param, lent) if is_dtensor(param) else lent
    return lent


def dense(grad: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Errors: where it is of another kind; one without a single value is zeros."""
    if grad.layout is torch.sparse_coo and grad._nnz() == 0:
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    if grad.layout is not torch.strided:
        raise Unimplemented(
            f"parameter '{slot.name}' has a sparse gradient: make its layer with sparse=False"
        )
    if type(grad) not in (torch.Tensor, torch.nn.Parameter):
        raise Unimplemented(
            f"parameter '{slot.name}' has a gradient of type {type(grad).__name__}, "
            "which is not known: only plain tensors are"
        )
    return grad


def _arrived(owner: weakref.ref[GradientHooks], slot: Slot, param: torch.Tensor) -> None:
    hooks, grad = owner(), _here(param.grad)
    if hooks is None or grad is None:
        return
    if not isinstance(grad, LentGradient) and hooks.lending:
        grad = dense(grad, slot)
        # With create_graph the gradient has a graph of its own: it stays what it is.
        if not grad.requires_grad:
            grad = _lend(param, hooks.content(slot, _in_order(grad)))
    if isinstance(grad, LentGradient):
        grad._content.arrivals += 1
    if hooks.on_arrival is not None:
        hooks.on_arrival(slot.index)
