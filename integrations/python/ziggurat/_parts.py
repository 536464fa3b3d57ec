# SPDX-License-Identifier: Apache-2.0
"""What of a parameter this process's engine has: all of it, a slice, or FSDP2's local shard."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._dtensor import is_dtensor, is_in_runs, local_box, local_of, local_part
from ziggurat._gradient import GradientHooks
from ziggurat._gradient_content import Slot, Taken
from ziggurat._ranks import Cut, Ranks


Layout = tuple[int, torch.Size, tuple[int, ...]]


def layout_of(values: torch.Tensor) -> Layout:
    """Where it lies in memory. ``p.data = x`` counts no write of `p`: this alone shows it."""
    return values.data_ptr(), values.shape, values.stride()


class _Copy:
    """The elements of a parameter that does not lie in their order, as it had them when it was last
    looked at."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        self._version = -1
        self._of = values  # stays as long, so that nothing else lies at its address
        self._layout = layout_of(values)

    def is_of(self, values: torch.Tensor) -> bool:
        """Whether the parameter still lies where it did."""
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
    """Its elements in a row, in the order of its indices: its memory, or where that has another
    order (channels_last) a copy. What is written there is the parameter's after flat_written()."""
    values = param.detach()
    if values.is_contiguous():
        _copies.pop(param, None)  # with the memory where it lay before
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


class Part:
    """All of it."""

    slot: Slot | None = None  #: as the hooks have it, once an engine has the part

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param

    def memory(self) -> torch.Tensor:
        """The part's elements as they are now; its version is the parameter's."""
        return self.param

    def take(self, hooks: GradientHooks) -> Taken | None:
        """The part's gradient in the step to come, lent until consumed()."""
        return hooks.take(self.param, self.slot)

    def consumed(self, hooks: GradientHooks) -> None:
        hooks.consumed(self.param, self.slot)

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        """The part of `values`, which are of the whole parameter."""
        return values

    def place(self) -> dict[str, Any]:
        """Where in the whole it is, as checkpoints say it."""
        return {"first": 0}

    def is_run(self) -> bool:
        """Whether every rank's part are elements that follow one another in the whole."""
        return True

    def first_element(self) -> int:
        """Which of the whole parameter's elements is the part's first, if it is a run of them."""
        return 0


class Slice(Part):
    """This rank's of a parameter that every rank has."""

    def __init__(self, param: torch.Tensor, ranks: Ranks) -> None:
        super().__init__(param)
        self._slice = Cut(param.numel(), ranks.size).of(ranks.rank)

    def memory(self) -> torch.Tensor:
        return flat(self.param)[self._slice]

    def take(self, hooks: GradientHooks) -> Taken | None:
        taken = super().take(hooks)
        if taken is None or taken.tensor is None or hooks.is_shared(self.param):
            return taken
        return Taken(self.of_whole(taken.tensor), taken.scale)  # assigned, the same on every rank

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().reshape(-1)[self._slice]

    def place(self) -> dict[str, Any]:
        return {"first": self._slice.start}

    def first_element(self) -> int:
        return int(self._slice.start)


class Shard(Part):
    """What this process has of a DTensor."""

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
    """In place of parts where a rank has none: it takes part in steps all the same."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1))

    def take(self, hooks: GradientHooks) -> Taken | None:
        return None
