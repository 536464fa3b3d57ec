# SPDX-License-Identifier: Apache-2.0
"""Which parameters somebody else has written or moved since an engine had them."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

_Laid = tuple[torch.Size, tuple[int, ...]]


def _laid(param: torch.Tensor) -> _Laid:
    """Returns shape and strides. ``p.data = x`` counts as no write of `p` and may keep its address,
    but changes these."""
    return param.shape, param.stride()


class LastSeen:
    """How the engine left parameters, by index, or how it has read them since. Of those that the engine keeps only
    the version tells something: they have no place."""

    def __init__(self, held: Sequence[torch.Tensor], kept: Container[int]) -> None:
        self._kept = kept  # the indices of those that the engine keeps
        self._versions = [param._version for param in held]
        self._addresses = [None if i in kept else param.data_ptr() for i, param in enumerate(held)]
        # Equal shapes share one object, because the garbage collector walks each object.
        known: dict[_Laid, _Laid] = {}
        self._laid = [known.setdefault(laid, laid) for laid in map(_laid, held)]
        self._memory = [param.detach() for param in held]  # keeps the memory alive while it is lent

    def saw_version(self, index: int, param: torch.Tensor) -> None:
        self._versions[index] = param._version

    def saw_place(self, index: int, param: torch.Tensor) -> None:
        self._addresses[index], self._laid[index] = param.data_ptr(), _laid(param)
        self._memory[index] = param.detach()

    def was_moved(self, index: int, param: torch.Tensor) -> bool:
        """Returns whether the parameter's address, shape or strides have changed."""
        if index in self._kept:
            return False
        if param.data_ptr() != self._addresses[index]:
            return True
        shape, strides = self._laid[index]
        return param.shape != shape or param.stride() != strides

    def what_was_done(self, index: int, param: torch.Tensor) -> str | None:
        """Returns "written" or "moved", or None if nothing was done to it."""
        if param._version != self._versions[index]:
            return "written"
        return "moved" if self.was_moved(index, param) else None

    def is_written(self, index: int, param: torch.Tensor) -> bool:
        """Returns whether the next step makes the parameter's master from it, since somebody has written or moved
        it. Of what the engine keeps, kept_was_written() tells that."""
        return index not in self._kept and self.what_was_done(index, param) is not None
