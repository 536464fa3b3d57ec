# SPDX-License-Identifier: Apache-2.0
"""Saves no 16-bit copies of parameters that autocast has made for matrix products.

Autocast keeps them for backward: a copy of the whole model, however little of it is there. A unit's
parameters are there again when its backward runs, so they are cast again then, to the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container
from typing import Any, NamedTuple

import torch

from ziggurat._activations.saved import saving
from ziggurat._memory.memory import count_freed


class _Cast(NamedTuple):
    """A parameter in another type, or a view of that."""

    param: torch.Tensor
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        if self.param._version != self.version:
            raise RuntimeError(
                "a parameter that backward needs was modified by an inplace operation since forward "
                f"(version {self.param._version} instead of {self.version}): run backward before "
                "optimizer.step(), or the forward again"
            )
        whole = self.param.detach().to(self.dtype)
        count_freed(whole.nbytes)  # soon, when backward has no use for it any more
        return whole.as_strided(self.shape, self.strides, self.offset)


def casting_again(params: Container[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Lets what the block's graph saves of casts of `params` be made again in backward."""

    def keep(tensor: torch.Tensor) -> _Cast | None:
        cast = _cast_of(tensor, params)
        if cast is not None:
            count_freed(tensor.nbytes)  # soon, when autocast has no use for it any more
        return cast

    return saving(keep)


def _cast_of(tensor: torch.Tensor, params: Container[torch.Tensor]) -> _Cast | None:
    """Returns how to make the tensor again, if it is a cast of one of `params`."""
    base: Any = tensor._base if tensor._is_view() else tensor
    if base.grad_fn is None or base.grad_fn.name() != "ToCopyBackward0":
        return None
    param = getattr(base.grad_fn.next_functions[0][0], "variable", None)
    if param is None or param not in params or not base.is_contiguous():
        return None
    if base._version != 0:  # a script's own cast, which it has written since
        return None
    return _Cast(
        param,
        param._version,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
    )
