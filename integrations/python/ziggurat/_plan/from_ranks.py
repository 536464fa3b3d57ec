# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a rank receives from the others in a step of an offloaded model. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ziggurat._library.native import quantized_bytes
from ziggurat._ranks.codes import Grid, padded
from ziggurat._ranks.cuts import BLOCK, LINE, Cut

_WEIGHT_BITS = 8


class Sized(NamedTuple):
    """A parameter's number of elements, and the bytes of one."""

    count: int
    itemsize: int
    trained: bool


@dataclass(frozen=True)
class Wire:
    """How ranks send each other parameters and gradients."""

    weights: bool | str = False  #: whether parameters travel in 8 bits; "frozen": those that are not trained
    gradient_bits: int | None = None
    grid: Grid | None = None  #: the ranks by nodes, if gradients are quantized

    def quantizes(self, param: Sized) -> bool:
        return self.weights is True or (self.weights == "frozen" and not param.trained)


class Brought(NamedTuple):
    """What parameters take where they are whole, and what the other ranks give of them."""

    whole: int
    given: int


def brought_from(params: Iterable[Sized], ranks: int, wire: Wire) -> Brought:
    """Returns what comes to the rank that has least itself, which is the last, if all `params` are brought once."""
    whole = given = 0
    for param in params:
        whole += param.count * param.itemsize
        cut = Cut(param.count, ranks)
        for rank in range(ranks - 1):
            its = cut.of(rank)
            count = its.stop - its.start
            given += quantized_bytes(_WEIGHT_BITS, count) if wire.quantizes(param) else count * param.itemsize
    return Brought(whole, given)


def gradient_bytes(trained: Iterable[Sized], ranks: int, wire: Wire, line: int = LINE) -> int:
    """Returns what a rank receives of one backward's gradients, of which it sums its parts."""
    row = 0  # of each rank
    for param in trained:
        part = Cut(param.count, ranks, line).slice
        if wire.gradient_bits is None:
            row += (part + 1) * param.itemsize
        else:  # of whole blocks, and a byte that says that there is a gradient
            row += padded(part) // BLOCK * quantized_bytes(wire.gradient_bits, BLOCK) + 1
    if wire.grid is None or not wire.grid.has_two_levels:
        return (ranks - 1) * row
    return ((wire.grid.within - 1) * wire.grid.nodes + wire.grid.nodes - 1) * row
