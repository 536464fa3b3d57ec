# SPDX-License-Identifier: Apache-2.0
"""Finds how many records of a state on NVMe stay in host memory, as the engine does when it opens
(core/plan/host_plan.cc). A step writes those, and does not read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ziggurat._library.packing import TILE, staggered

_TILES_MAX = 32  # of a chunk
_ITEMS_WANTED = 12  # with which a sweep keeps a drive and the cores busy


class Stored(NamedTuple):
    """A record, or what is kept of parameters that are frozen, as the engine's table has it."""

    tiles: int
    record_bytes: int  #: of a tile; 0 if it is frozen, which no store has
    home_bytes: int  #: of a tile's parameters where they are kept
    members: int  #: parameters that share it
    is_held: bool  #: whether it holds the parameters bit for bit
    lent: bool = False  #: whether the parameters are in PyTorch's memory


class Homes(NamedTuple):
    """Whether parameters and sums of gradients are on NVMe. The state is."""

    params: bool
    grads: bool
    in_units: bool = False  #: whether parameters live in the memory for units, which is no part of this
    on_gpu: bool = False  #: whether that is a GPU's, from which parameters come to be updated
    staged_bytes: int = 0  #: in which units are put together for a GPU


class Budget(NamedTuple):
    """How the engine divides its host memory."""

    smallest_bytes: int  #: with which it works
    item_bytes: int  #: the most that a record takes while it is updated
    read_bytes: int  #: of the records that do not stay, so that each step reads them
    records: int  #: that the store has
    budget_bytes: int
    items: int  #: records that are updated at a time


def divided(stored: Sequence[Stored], homes: Homes, budget_bytes: int | None) -> Budget:
    """Divides `budget_bytes`, or what the engine takes by itself, among the records, which are in the
    order of the engine's table: frozen ones last."""
    if budget_bytes is None:
        budget_bytes = _Chunks(stored, homes, _TILES_MAX).comfortable_bytes
    for tiles in range(_TILES_MAX, 0, -1):
        chunks = _Chunks(stored, homes, tiles)
        if chunks.items_in(budget_bytes) >= _ITEMS_WANTED:
            break
    read_bytes, taken_bytes = chunks.kept(budget_bytes - chunks.smallest_bytes)
    return Budget(
        smallest_bytes=chunks.smallest_bytes,
        item_bytes=chunks.item_bytes,
        read_bytes=read_bytes,
        records=chunks.records,
        budget_bytes=budget_bytes,
        items=chunks.items_in(budget_bytes - taken_bytes),
    )


def enough_for_all(stored: Sequence[Stored], homes: Homes) -> int:
    """Returns a budget with which all records stay."""
    chunks = _Chunks(stored, homes, _TILES_MAX)
    return chunks.comfortable_bytes + chunks.all_bytes


class _Chunks:
    """Records cut into chunks of at most so many tiles, and the memory of the largest."""

    def __init__(self, stored: Sequence[Stored], homes: Homes, tiles_max: int) -> None:
        self._homes = homes
        self._chunks = [(one, tiles) for one in stored for tiles in _cut(one.tiles, tiles_max)]
        self._items = [self._item(one, tiles) for one, tiles in self._chunks]
        self.item_bytes = max(self._items)
        total = staggered(self.item_bytes) + homes.staged_bytes
        whole = [one.tiles * one.home_bytes for one in stored if not one.lent]
        if homes.params:
            total += staggered(max(whole, default=0))
        elif not homes.in_units:
            total += sum(map(staggered, whole))
        if homes.grads:
            total += staggered(4 * TILE * max(tiles for _, tiles in self._chunks))
        self.smallest_bytes = total
        self.comfortable_bytes = total + (_ITEMS_WANTED - 1) * staggered(self.item_bytes)

    def _item(self, one: Stored, tiles: int) -> int:
        """Returns what an update of the chunk takes: the record, the parameters if they come from
        NVMe or a GPU or are put together from several, and the gradient in fp32 if it comes or is so."""
        size_bytes = tiles * one.record_bytes
        if one.members > 1 if one.lent else self._comes:
            size_bytes += tiles * one.home_bytes
        if one.record_bytes and (one.members > 1 or self._homes.grads):
            size_bytes += 4 * TILE * tiles
        return size_bytes

    @property
    def _comes(self) -> bool:
        """Returns whether parameters that the engine keeps are not in host memory."""
        return self._homes.params or (self._homes.in_units and self._homes.on_gpu)

    def items_in(self, budget_bytes: int) -> int:
        if budget_bytes < self.smallest_bytes:
            return 0
        return 1 + (budget_bytes - self.smallest_bytes) // staggered(self.item_bytes)

    @property
    def all_bytes(self) -> int:
        """Returns what all records take."""
        pairs = zip(self._chunks, self._items, strict=True)
        return sum(staggered(item) for (one, _), item in pairs if one.record_bytes)

    @property
    def records(self) -> int:
        return sum(1 for one, _ in self._chunks if one.record_bytes)

    def kept(self, spare_bytes: int) -> tuple[int, int]:
        """Returns what a step reads of the records, and what those take that stay: as many of the first
        as leave room for 11 more items, or for one for each of the others."""
        left = sum(tiles * self._read(one) for one, tiles in self._chunks)
        found = (left, 0)
        taken = 0
        for number, (one, tiles) in enumerate(self._chunks, 1):
            if one.record_bytes:
                taken += staggered(self._items[number - 1])
            left -= tiles * self._read(one)
            others = min(_ITEMS_WANTED - 1, len(self._chunks) - number)
            if taken > spare_bytes:
                break
            if taken + others * staggered(self.item_bytes) <= spare_bytes:
                found = (left, taken)
        return found

    def _read(self, one: Stored) -> int:
        """Returns what is read of a tile's record, if it has one. Its own copy of parameters that are in
        memory is not, unless several share it."""
        if not one.record_bytes:
            return 0
        here = one.is_held and one.members == 1 and (one.lent or not self._comes)
        return one.record_bytes - (one.home_bytes if here else 0)


def _cut(tiles: int, tiles_max: int) -> Iterator[int]:
    """Yields the tiles of each chunk, which are nearly equal."""
    pieces = -(-tiles // tiles_max)
    for i in range(pieces):
        yield tiles * (i + 1) // pieces - tiles * i // pieces
