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
from torch.utils._pytree import tree_map

from ziggurat._native import Unimplemented


class Later(torch.Tensor):
    """A contiguous tensor without values. What is computed from it is computed later too, when one of
    the results is moved to the CPU."""

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
        if _moves_to_cpu(func, args, kwargs):
            return func(*tree_map(_values_of, args), **kwargs)
        name: str = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            raise Unimplemented(
                f"{name}: a parameter of an offloaded model is written while the model is saved, where "
                "it has no values yet: save what model.state_dict() returns, with state_dict=..."
            )
        with torch._C.DisableTorchFunctionSubclass():
            shapes = func(*args, **kwargs)
        call = _Call(func, args, kwargs)
        if isinstance(shapes, torch.Tensor):
            return Later.of(shapes, lambda: call.result().contiguous())
        if not isinstance(shapes, (tuple, list)) or not any(isinstance(one, torch.Tensor) for one in shapes):
            return shapes
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


def _moves_to_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.cpu:
        return True
    given = (*args[1:], *kwargs.values())
    return func is torch.Tensor.to and any(
        torch.device(one).type == "cpu" for one in given if isinstance(one, (str, torch.device))
    )


def _values_of(one: Any) -> Any:
    return one._values() if isinstance(one, Later) else one
