# SPDX-License-Identifier: Apache-2.0
"""The tensor without storage that stands in ``param.grad``, and what operations do to it.

Multiplications are recorded, additions go to the sum, and norms are scaled. Any other operation
that reads it gets its values, computed each time. Any other operation that writes it makes the
values first and then writes them. Nothing is lost silently: an operation whose result cannot be
kept raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from ziggurat._gradients.engine_content import at_engine
from ziggurat._gradients.gradient_content import Content, Taken, count_write
from ziggurat._gradients.shared_content import SharedContent
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._pytorch.torch_private import in_backward, no_torch_function

_aten = torch.ops.aten


class LentGradient(torch.Tensor):
    """A gradient that one of our optimizers will consume. ``GradientHooks`` makes them."""

    _content: Content
    _path: tuple[tuple[Any, ...], ...]  # the views that lead from the gradient to this part of it

    @staticmethod
    def __new__(
        cls, content: Content, path: tuple[tuple[Any, ...], ...] = (), like: Any = None
    ) -> LentGradient:
        if like is None:  # contiguous
            self = torch.Tensor._make_wrapper_subclass(
                cls, content.shape, dtype=content.dtype, device=content.device
            )
        else:
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=like.dtype,
                device=content.device,
            )
        self._content = content
        self._path = path
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def is_view(self) -> bool:
        """Returns whether this is a part, or another shape, of a parameter's gradient."""
        return bool(self._path)

    @property
    def is_zero(self) -> bool:
        """Returns whether all values are known to be zero without reading any of them."""
        return self._content.is_zero

    @property
    def part(self) -> torch.Tensor | None:
        """Returns the tensor that the scale multiplies, for a whole gradient that is not divided
        among ranks."""
        shared = isinstance(self._content, SharedContent)
        return None if self._path or shared else self._content.part

    @property
    def arrivals(self) -> int:
        """Returns how often backward has added to the gradient since the last step."""
        return self._content.arrivals

    def parts(self) -> Taken | None:
        """Returns what a step would consume, or None after a step that has consumed it."""
        return Taken(self.materialize(), 1.0) if self._path else self._content.take()

    def materialize(self) -> torch.Tensor:
        """Returns the values in a new plain tensor."""
        with torch.no_grad():
            return _along(self._path, self._content.value()).clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self._content.consumed:
            return f"LentGradient(consumed by a step, shape={tuple(self.shape)})"
        return f"LentGradient({self.materialize()!r})"

    def __format__(self, spec: str) -> str:
        return format(self.materialize(), spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.materialize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only copy, because what is written to a copy would be lost."""
        array = self.materialize().numpy(force=force)
        array.flags.writeable = False
        return array

    # Raises where PyTorch would give a null address, which would crash native code, and NumPy
    # through DLPack.
    def _no_address(self, *_: Any, **__: Any) -> NoReturn:
        raise Unimplemented(
            f"the gradient of parameter '{self._content.slot.name}' has no storage until the step: "
            "use p.grad.clone(), and assign the result to p.grad if it is changed"
        )

    data_ptr = untyped_storage = __dlpack__ = _no_address

    # Results of operations are plain tensors.
    __torch_function__ = no_torch_function()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        result = NotImplemented if known is None else known(func, args, kwargs)
        if result is NotImplemented and func.is_view and isinstance(args[0], LentGradient):
            result = _view(func, args, kwargs)
        return _on_values(func, args, kwargs) if result is NotImplemented else result


def _along(path: tuple[tuple[Any, ...], ...], value: torch.Tensor) -> torch.Tensor:
    for func, args, kwargs, output in path:
        result = func(value, *args, **kwargs)
        value = result if output is None else result[output]
    return value


def _whole(grad: Any) -> bool:
    return isinstance(grad, LentGradient) and not grad._path


def _plain(value: Any) -> Any:
    return _along(value._path, value._content.value()) if isinstance(value, LentGradient) else value


def _bare(grad: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that holds the values as they are, or None if there is no such tensor."""
    return _bare_part(grad, grad.part if isinstance(grad, LentGradient) else None)


def _bare_part(grad: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor | None:
    """Does what _bare() does; `part` is the gradient's."""
    if not isinstance(grad, LentGradient):
        return grad
    is_bare = part is not None and grad._content.scale is None and part.dtype == grad.dtype
    return part if is_bare else None


def _shared(grad: torch.Tensor) -> SharedContent | None:
    """Returns the content if the gradient is divided among ranks, else None."""
    content = grad._content if isinstance(grad, LentGradient) and not grad._path else None
    return content if isinstance(content, SharedContent) else None


def _norms_of_all(contents: list[SharedContent], order: float) -> torch.Tensor | None:
    """Finds the norms in one call of all ranks, or returns None if the values must be read."""
    return contents[0].exchange.norms(contents, order) if order in (2, math.inf) else None


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a view without values; each use of it takes the view of the gradient again."""
    grad = args[0]
    meta = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta")
    shaped = func(meta, *args[1:], **kwargs)
    if isinstance(shaped, torch.Tensor):
        return LentGradient(grad._content, (*grad._path, (func, args[1:], kwargs, None)), shaped)
    return [
        LentGradient(grad._content, (*grad._path, (func, args[1:], kwargs, i)), like)
        for i, like in enumerate(shaped)
    ]


@functools.cache
def _written(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Returns which arguments `func` writes: their places, and their names."""
    places, names = set(), set()
    # Schemas of other namespaces do not always tell: c10d::allreduce_ does not mark what it writes.
    told = func.namespace in ("aten", "prim", "prims", "_c10d_functional")
    for place, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or not (told or func._schema.is_mutable):
            places.add(place)
            names.add(argument.name)
    return frozenset(places), frozenset(names)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operation on plain tensors. Gradients that it writes then hold the result."""
    places, names = _written(func)
    lent: list[tuple[LentGradient, torch.Tensor]] = []

    def to_write(grad: Any) -> Any:
        if not isinstance(grad, LentGradient):
            return grad
        if torch.Tag.inplace_view in func.tags:
            raise Unimplemented(
                f"{func} cannot change the gradient of parameter '{grad._content.slot.name}', "
                "which has no storage: work on p.grad.clone() and assign the result to p.grad"
            )
        # The operation gets an alias, because an `out=` of another shape resizes the tensor that it
        # is given.
        lent.append((grad, _along(grad._path, grad._content.settle()).detach()))
        return lent[-1][1]

    def back(value: Any) -> Any:
        return next((grad for grad, plain in lent if plain is value), value)

    # Settles the arguments that are written first: an argument that is also read is then the same
    # memory.
    first = [tree_map(to_write, a) if i in places else a for i, a in enumerate(args)]
    named = {k: tree_map(to_write, a) if k in names else a for k, a in kwargs.items()}
    result = func(*tree_map(_plain, first), **tree_map(_plain, named))
    for grad, plain in lent:
        count_write(grad._content.settle())  # the part that was written
        if plain.shape != grad.shape or plain.dtype != grad.dtype:
            raise InvalidArgument(
                f"{func} has changed the shape or the type of the gradient of parameter "
                f"'{grad._content.slot.name}': give it a tensor of shape {tuple(grad.shape)} and "
                f"type {grad.dtype}"
            )
    return tree_map(back, result)


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, factor = args[0], _plain(args[1])
    if not _whole(grad) or (isinstance(factor, torch.Tensor) and factor.dim() > 0):
        return NotImplemented
    if isinstance(factor, complex) or (isinstance(factor, torch.Tensor) and factor.is_complex()):
        return NotImplemented  # PyTorch refuses complex factors
    grad._content.multiply(factor, inverse=func is _aten.div_.Tensor)
    return grad


def _scale_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, factors = args
    scale = torch.Tensor.div_ if func.overloadpacket is _aten._foreach_div_ else torch.Tensor.mul_
    if not isinstance(factors, (list, tuple)):
        factors = [factors] * len(grads)
    for grad, factor in zip(grads, factors, strict=True):
        scale(grad, factor)


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, other = args
    if not _whole(grad):
        return NotImplemented
    grad._content.add(_plain(other), kwargs.get("alpha", 1))
    return grad


def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles the addition that backward makes with create_graph, which is not in place."""
    grad, other = args
    if _whole(grad) and grad._content.consumed and in_backward():
        return other.clone()
    return NotImplemented


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _whole(args[0]):
        return NotImplemented
    args[0]._content.zero()
    return args[0]


def _zero_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for grad in args[0]:
        grad.zero_()


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LentGradient:
    return LentGradient(args[0]._content, args[0]._path, args[0])


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Uses |part * scale| = |part| |scale|, so that no values need be made."""
    grad, order = args[0], args[1] if len(args) > 1 else 2
    part = grad.part if isinstance(grad, LentGradient) else None  # once, because it may be read
    bare = _bare_part(grad, part)
    if bare is not None:
        return func(bare, *args[1:], **kwargs)
    shared = _shared(grad)
    if shared is not None and len(args) < 3 and "dim" not in kwargs and not kwargs.get("keepdim"):
        norms = _norms_of_all([shared], order)
        if norms is not None:
            return norms[0].to(grad.device, kwargs.get("dtype") or grad.dtype)
    if part is None or order <= 0:
        return NotImplemented
    # Computes in the wide type, because the norm may fit into 16 bits only after scaling.
    content, dtype = grad._content, kwargs.get("dtype") or grad.dtype
    norm = func(part, *args[1:], **(kwargs | {"dtype": content.wide}))
    return (norm if content.scale is None else norm * content.scale.abs()).to(dtype)


def _norm_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads, order = args[0], args[1] if len(args) > 1 else 2
    # What the engine has is read gradient by gradient, because memory may not have room for all.
    bare = [None if at_engine(grad) is not None else _bare(grad) for grad in grads]
    if all(part is not None for part in bare):
        return func(bare, *args[1:], **kwargs)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    shared = [content for grad in grads if (content := _shared(grad)) is not None]
    norms = _norms_of_all(shared, order) if len(shared) == len(grads) else None
    if norms is not None:
        return [
            norm.to(grad.device, dtype or grad.dtype)
            for norm, grad in zip(norms, grads, strict=True)
        ]
    return [torch.linalg.vector_norm(grad, order, dtype=dtype) for grad in grads]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Does GradScaler's check for values that are not finite; records the scale without multiplying."""
    grads, found_inf, inverse_scale = args
    others = [grad for grad in grads if not _whole(grad)]
    if others:
        _on_values(func, (others, found_inf, inverse_scale), kwargs)
    shared = [content for grad in grads if (content := _shared(grad)) is not None]
    if shared:
        largest = shared[0].exchange.norms(shared, math.inf).amax()
        found_inf.copy_(torch.maximum(found_inf, (~largest.isfinite()).to(found_inf)))
        for content in shared:
            content.multiply(inverse_scale, inverse=False)
    for grad in grads:
        if _whole(grad) and _shared(grad) is None:
            if grad.numel() and not grad.is_zero:
                # The maximum takes one pass and, unlike isfinite(), no memory; it keeps a NaN.
                largest = torch.linalg.vector_norm(grad, math.inf)
                found_inf.copy_(torch.maximum(found_inf, (~largest.isfinite()).to(found_inf)))
            grad._content.multiply(inverse_scale, inverse=False)


_KNOWN: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.mul_.Tensor: _scale,
    _aten.div_.Tensor: _scale,
    _aten.add_.Tensor: _add,
    _aten.add.Tensor: _added,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero_each,
    _aten.detach.default: _detach,
    _aten.detach_.default: _itself,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norm_each,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
} | {
    getattr(packet, overload): _scale_each
    for packet in (_aten._foreach_mul_, _aten._foreach_div_)
    for overload in ("Scalar", "Tensor", "ScalarList", "List")
    if overload in packet.overloads()
}
