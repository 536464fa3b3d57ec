# SPDX-License-Identifier: Apache-2.0
"""The part of a parameter that this process's engine has: all of it, a slice, or FSDP2's local
shard."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._gradients.gradient import GradientHooks
from ziggurat._gradients.gradient_content import Slot, Taken
from ziggurat._pytorch.dtensor import is_dtensor, is_in_runs, local_box, local_of, local_part
from ziggurat._ranks.ranks import Ranks

Layout = tuple[int, torch.Size, tuple[int, ...]]


def layout_of(values: torch.Tensor) -> Layout:
    """Returns address, shape and strides. ``p.data = x`` counts as no write of `p`; only these show
    it."""
    return values.data_ptr(), values.shape, values.stride()


class _Copy:
    """A contiguous copy of a parameter whose memory has another order than its indices, as of the
    last read()."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        self._version = -1
        self._of = values  # kept alive, so that nothing else gets its address
        self._layout = layout_of(values)

    def is_of(self, values: torch.Tensor) -> bool:
        """Returns whether the parameter is still at the same place in memory."""
        return self._layout == layout_of(values)

    def read(self, version: int) -> None:
        if self._version != version:
            self.values.copy_(self._of)
            self._version = version

    def write(self, param: torch.Tensor) -> None:
        with torch.no_grad():
            param.detach().copy_(self.values)
        self._version = param._version


_copies: Any = WeakTensorKeyDictionary()  # Tensor -> _Copy


def flat(param: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's elements in the order of its indices: its memory, or a copy if its
    memory has another order (channels_last). flat_written() writes changes of a copy back."""
    values = param.detach()
    if values.is_contiguous():
        _copies.pop(param, None)  # frees the memory where the parameter was before
        return values.view(-1)
    copy: _Copy | None = _copies.get(param)
    if copy is None or not copy.is_of(values):
        copy = _copies[param] = _Copy(values)
    copy.read(param._version)
    return copy.values.view(-1)


def flat_written(param: torch.Tensor) -> None:
    copy: _Copy | None = None if param.is_contiguous() else _copies.get(param)
    if copy is not None:
        copy.write(param)


def checksum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """Returns a CRC-32 of the tensor's values, which goes on from another."""
    values = tensor.detach().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(values.numpy().data, before)


class Part:
    """A whole parameter; the base of the other parts."""

    slot: Slot | None = None  #: the hooks' slot, once an engine has the part

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param

    def memory(self) -> torch.Tensor:
        """Returns the part's present elements; their version is the parameter's."""
        return self.param

    def take(self, hooks: GradientHooks) -> Taken | None:
        """Returns the part's gradient for the next step, lent until consumed()."""
        return hooks.take(self.param, self.slot)

    def consumed(self, hooks: GradientHooks) -> None:
        hooks.consumed(self.param, self.slot)

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the part of `values`, which are the whole parameter's."""
        return values

    def place(self) -> dict[str, Any]:
        """Returns where the part is in the whole, as checkpoints describe it."""
        return {"first": 0}

    def is_run(self) -> bool:
        """Returns whether each rank's elements follow one another in the whole."""
        return True

    def first_element(self) -> int:
        """Returns the index in the whole of the part's first element, if the part's elements follow
        one another."""
        return 0


class Slice(Part):
    """This rank's slice of a parameter of which every rank has all values."""

    def __init__(self, param: torch.Tensor, ranks: Ranks) -> None:
        super().__init__(param)
        self._slice = ranks.own(param.numel())

    def memory(self) -> torch.Tensor:
        return flat(self.param)[self._slice]

    @property
    def end(self) -> int:
        return int(self._slice.stop)

    def take(self, hooks: GradientHooks) -> Taken | None:
        taken = super().take(hooks)
        if taken is None or taken.tensor is None or hooks.is_shared(self.param):
            return taken
        # assigned, so the same on every rank
        return Taken(self.of_whole(taken.tensor), taken.scale)

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().reshape(-1)[self._slice]

    def place(self) -> dict[str, Any]:
        return {"first": self._slice.start}

    def first_element(self) -> int:
        return int(self._slice.start)


class Shard(Part):
    """This process's shard of a DTensor."""

    def memory(self) -> torch.Tensor:
        return local_of(self.param.detach())

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        return local_of(values) if is_dtensor(values) else local_part(values, self.param)

    def place(self) -> dict[str, Any]:
        offsets, box = local_box(self.param)
        return {"offsets": offsets, "box": box}

    def is_run(self) -> bool:
        return is_in_runs(self.param)

    def first_element(self) -> int:
        offsets, _ = local_box(self.param)
        first = 0
        for offset, size in zip(offsets, self.param.shape, strict=True):
            first = first * size + offset
        return first


class Nothing(Part):
    """Stands in where a rank has no parts, so that it can still take part in steps."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, device="cpu"))

    def take(self, hooks: GradientHooks) -> Taken | None:
        return None
