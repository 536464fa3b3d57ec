# SPDX-License-Identifier: Apache-2.0
"""How parameters are divided among ranks. Arithmetic only."""

from __future__ import annotations

from ziggurat._library.native import InvalidArgument

LINE = 64  # elements: a slice begins where a cache line can begin
#: Elements with one scale in 8 bits (kEightBitBlock of the engine): slices of whole blocks can be
#: divided among other ranks without changing a bit.
BLOCK = 256


class Cut:
    """Divides a parameter of `count` elements into a slice for each rank, in the ranks' order."""

    def __init__(self, count: int, ranks: int, line: int = LINE) -> None:
        self.count = count
        lines = -(-count // (ranks * line))
        #: elements of a slice; the last slices may have fewer, or none
        self.slice = lines * line

    def of(self, rank: int) -> slice:
        return slice(min(rank * self.slice, self.count), min((rank + 1) * self.slice, self.count))


def shards_of(size: int, shard_group: int | None) -> int:
    """Returns how many of `size` ranks divide the state among them. Errors: InvalidArgument."""
    if shard_group is None:
        return size
    if type(shard_group) is not int or shard_group < 2 or size % shard_group != 0:
        raise InvalidArgument(
            f"shard_group={shard_group!r} does not divide the {size} ranks into groups of 2 or more: give a divisor "
            f"of {size}, or leave it out, and all ranks divide the state among them"
        )
    return shard_group


def check_hpz(shards: int, hpz: int | None) -> None:
    """Errors: InvalidArgument unless `hpz` divides the `shards` ranks that have all slices."""
    if hpz is not None and (type(hpz) is not int or not 2 <= hpz < shards or shards % hpz != 0):
        raise InvalidArgument(
            f"hpz={hpz!r} does not divide the {shards} ranks that have all parameters together into several groups of "
            f"2 or more: give a smaller divisor of {shards}, or leave it out"
        )
