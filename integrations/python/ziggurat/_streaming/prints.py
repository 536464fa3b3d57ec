# SPDX-License-Identifier: Apache-2.0
"""Finds writes that PyTorch does not count, such as `p.data.mul_(2)` or NumPy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ziggurat._pytorch.torch_private import uncompiled, without_modes
from ziggurat._units.units import PRINT_WORDS

if TYPE_CHECKING:
    from ziggurat._streaming.pins import Held


class Prints:
    """What the values of parameters were. Making it, and written(), read them twice each."""

    @uncompiled
    def __init__(self, all_held: Iterable[Held]) -> None:
        # A mode of the script counts what a forward computes, as selective checkpointing does.
        with without_modes():
            self._then = [(held, held.param._version, _print_of(held.param)) for held in all_held]

    @uncompiled
    def written(self) -> list[Held]:
        """Returns the parameters whose values have changed since, with no write counted."""
        seen = [one for one in self._then if not one[0].is_away and one[0].param._version == one[1]]
        with without_modes():
            return [held for held, _, then in seen if not all(map(torch.equal, then, _print_of(held.param)))]


def _print_of(param: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the sums of rows and of columns of the parameter's bytes, which change with what changes
    a value or moves values, and cost less than a checksum; and the bytes that make no row."""
    values = param.detach().reshape(-1).view(torch.uint8)
    end = values.numel() - values.numel() % (8 * PRINT_WORDS)
    words = values[:end].view(torch.int64).view(-1, PRINT_WORDS)
    return words.sum(0), words.sum(1), values[end:].clone()
