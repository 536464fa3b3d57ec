# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are made when they are moved to the CPU.

transformers and safetensors take such tensors, on the meta device, where a model is saved: they look
at names and shapes of all, convert and rename them, and move those of a file to the CPU when they
write it. So no more is in memory than one file has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ziggurat._library.native import Unimplemented
from ziggurat._pytorch import storages
from ziggurat._pytorch.torch_private import as_plain_tensors


# What makes new tensors and still waits, since converting a model for its files does it.
_WAIT = {
    *(torch.cat, torch.stack, torch.Tensor.contiguous, torch.Tensor.reshape, torch.reshape, torch.Tensor.to),
    *(torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16),
}
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_WRITE = {"__setitem__", "__set__", *(f"__i{one}__" for one in _OPERATORS)}


class Later(torch.Tensor):
    """A contiguous tensor without values. Views of it, and what converts a model for its files, wait
    too, until one of the results is moved to the CPU. All else has its values at once."""

    _values: Callable[[], torch.Tensor]

    @staticmethod
    def of(like: torch.Tensor, values: Callable[[], torch.Tensor]) -> Later:
        """Returns a tensor of the shape and type of `like` that has what `values` returns."""
        made = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Later)
        made._values = values
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _require_unwritten(func, args, kwargs)
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if _moves_to_cpu(func, args, kwargs) or not all(isinstance(one, Later) for one in operands):
            return _Call(func, args, kwargs).result()
        call = _Call(func, args, kwargs)
        with as_plain_tensors():
            try:
                shapes = func(*args, **kwargs)
            except Exception:  # it needs values, or raises with them too
                shapes = None
            made = [one for one in tree_leaves(shapes) if isinstance(one, torch.Tensor)]
            known = {storages.identity(one) for one in operands}
            waits = func in _WAIT or all(storages.identity(one) in known for one in made)
        if shapes is None or not waits:
            return call.result()
        if not made:
            return shapes
        if isinstance(shapes, torch.Tensor):
            return Later.of(shapes, lambda: call.result().contiguous())
        return type(shapes)(
            [Later.of(one, lambda i=i: call.result()[i].contiguous()) for i, one in enumerate(shapes)]
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values().__reduce_ex__(protocol)  # torch.save() writes it as an ordinary tensor


class _Call:
    """A call that is made once, when its result is needed, and then has its operands no more."""

    def __init__(self, *call: Any) -> None:
        self._call: tuple[Any, ...] | None = call
        self._result: Any = None

    def result(self) -> Any:
        if self._call is not None:
            func, *given = self._call
            args, kwargs = tree_map(_values_of, given)
            self._result = func(*args, **kwargs)
            self._call = None
        return self._result


def _require_unwritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name: str = getattr(func, "__name__", "")
    writes = name in _WRITE or (name.endswith("_") and not name.endswith("__"))
    written = tree_leaves(((*args, *kwargs.values())[:1] if writes else (), kwargs.get("out")))
    if any(isinstance(one, Later) for one in written):
        raise Unimplemented(
            f"{name}: a parameter of an offloaded model is written while the model is saved, where "
            "it has no values yet: write a clone() of it, or save what model.state_dict() returns, with "
            "state_dict=..."
        )


def _moves_to_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.cpu:
        return True
    given = (*args[1:], *kwargs.values())
    return func is torch.Tensor.to and any(
        torch.device(one).type == "cpu" for one in given if isinstance(one, (str, torch.device))
    )


def _values_of(one: Any) -> Any:
    return one._values() if isinstance(one, Later) else one
