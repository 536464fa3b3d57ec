# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are read for each use, and dropped after it: AveragedModel lists those of a whole
model before it adds the first to its average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ziggurat._library.native import Unimplemented
from ziggurat._pytorch import storages
from ziggurat._pytorch.torch_private import as_plain_tensors
from ziggurat._streaming.released import CONVERSIONS, changes_nothing, reads_nothing


class ReadAtUse(torch.Tensor):
    """A tensor on the CPU without memory of its own. A function that gets several lists, as
    PyTorch's for averages do, is called for one element of each at a time. What C++ code reads past Python
    is refused by PyTorch."""

    _read: Callable[[], torch.Tensor]

    @staticmethod
    def of(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> ReadAtUse:
        """Returns a tensor of the shape and type of `like`, whose values `read` returns."""
        its = storages.guarded(like).as_subclass(ReadAtUse)
        its._read = read
        return its

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_nothing(func):
            with as_plain_tensors():
                return func(*args, **kwargs)
        name: str = getattr(func, "__name__", "")
        if name == "detach" or (name in CONVERSIONS and changes_nothing(func, args[0], args, kwargs)):
            return args[0]
        if name.startswith("_foreach_"):
            return _one_by_one(func, args, kwargs)
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], ReadAtUse):
            raise Unimplemented(
                f"{name}: an average writes the parameters of an offloaded model that it is made of, where "
                "it may only read them: write the average's, or use gathered(..., write=True)"
            )
        return func(*_values_of(args), **_values_of(kwargs))


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    made = []
    for index in range(len(args[0])):
        some = [one[index : index + 1] if isinstance(one, (list, tuple)) else one for one in args]
        made.append(func(*_values_of(some), **_values_of(kwargs)))
    return None if any(one is None for one in made) else [one for some in made for one in some]


def _values_of(given: Any) -> Any:
    return tree_map(lambda one: one._read() if isinstance(one, ReadAtUse) else one, given)
