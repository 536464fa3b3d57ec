# SPDX-License-Identifier: Apache-2.0
"""Divides parameters into records as the engine does (core/sharding/packing.h): small ones of one type
share a record, and each record has whole tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable

TILE = 16 * 1024  # elements; a record holds whole tiles
_SHARED = 64 * 1024  # elements; the most that parameters under a tile share in a record
_LINE_BYTES = 4096


class Record:
    """Parameters that lie in the engine's memory one after the other, in a record or a unit."""

    def __init__(self, place: int, count: int) -> None:
        self.places = [place]  #: of each, among the parameters
        self.end = count  #: where the last one ends

    @property
    def place(self) -> int:
        return self.places[0]

    @property
    def members(self) -> int:
        return len(self.places)

    @property
    def tiles(self) -> int:
        return math.ceil(self.end / TILE)


def in_records(counts: Iterable[int], own_blocks: bool) -> list[Record]:
    """Puts parameters of `counts` elements into records. With `own_blocks` each has blocks of 8-bit
    codes of its own."""
    records: list[Record] = []
    shared = None
    for place, count in enumerate(counts):
        end = count if shared is None else _begin(shared.end, count, own_blocks) + count
        if count < TILE and shared is not None and end <= _SHARED:
            shared.end = end
            shared.places.append(place)
            continue
        records.append(Record(place, count))
        if count < TILE:
            shared = records[-1]
    return records


def _begin(end: int, count: int, own_blocks: bool) -> int:
    """Returns where a parameter begins behind those that end at `end`."""
    if not own_blocks:
        return end
    begin = math.ceil(end / 16) * 16
    return begin if begin % 256 + count <= 256 else math.ceil(begin / 256) * 256


def staggered(size_bytes: int) -> int:
    """Returns what a piece takes of the engine's memory, which puts large pieces at addresses that
    differ in their low bits, and all at multiples of a page."""
    whole = math.ceil(size_bytes / _LINE_BYTES) * _LINE_BYTES
    return whole + (_LINE_BYTES if size_bytes >= 256 << 10 else 0)
