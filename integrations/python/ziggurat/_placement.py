# SPDX-License-Identifier: Apache-2.0
"""Decides where an optimizer's state is kept: what ``placement`` names, or what "auto" chooses."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ziggurat._memory import free_bytes, size_text
from ziggurat._native import InvalidArgument

# "auto" takes host memory for a state that needs up to this share of the free memory. The rest is
# left for what comes later: gradients, activations, batches, and a state_dict() of the whole state,
# which is in memory beside the state while it is saved.
_SHARE = 0.5

# Bytes that each format takes for a parameter's master and for each moment. An engine would tell,
# but none is open yet. 8bit has a 4-byte scale for 256 elements, or room for one per 16 in records
# that parameters share.
_BYTES = {
    "fp32": (4.0, 4.0),
    "bf16-moments": (4.0, 2.0),
    "8bit": (4.0, 1.0 + 4 / 256),
    "split": (4.0, 4.0),
    "bf16": (2.0, 2.0),
}
_BYTES_SHARED = _BYTES | {"8bit": (4.0, 1.0 + 4 / 16)}
# The largest share of the free memory that a state on a drive keeps: pages in memory are written
# each step, but not read.
_KEPT_SHARE = 1 / 8
_WORK_BYTES = 128 << 20  # memory that bytes pass through between the drive and the update
TILE = 16 * 1024  # elements; a record holds whole tiles
SHARED = 64 * 1024  # elements; the most that parameters under a tile share in a record
_BLOCK = 64 * 1024  # bytes; a record takes whole blocks


def parsed(placement: str) -> tuple[str, str | None]:
    """Returns the tier ("auto" if it is not chosen yet), and the directory if one was named."""
    if placement in ("host", "auto"):
        return placement, None
    tier, _, path = placement.partition(":")
    if tier in ("nvme", "auto") and path:
        return tier, path
    raise InvalidArgument(
        f'placement="{placement}": give "host", "nvme:/path" with a directory, "auto", or '
        '"auto:/path"'
    )


def state_bytes(counts: Iterable[int], state_format: str, moments: int) -> int:
    """Returns the bytes of host memory that the state of parameters with `counts` elements
    takes."""
    total = 0
    for record in in_records(counts, own_blocks=state_format == "8bit"):
        table = _BYTES_SHARED if len(record.counts) > 1 else _BYTES
        # The engine refuses an unknown format later, in its own words.
        master, moment = table.get(state_format, table["fp32"])
        total += math.ceil(record.tiles * TILE * (master + moments * moment) / _BLOCK) * _BLOCK
    return total


class Record:
    """Parameters that lie in the engine's memory one after the other, in a record or a unit."""

    def __init__(self, count: int) -> None:
        self.counts = [count]
        self.end = count  #: where the last one ends

    @property
    def tiles(self) -> int:
        return math.ceil(self.end / TILE)


def in_records(counts: Iterable[int], own_blocks: bool) -> list[Record]:
    """Puts parameters of `counts` elements into records as the engine does (packing.h). With
    `own_blocks` each has blocks of 8-bit codes of its own."""
    records: list[Record] = []
    shared = None
    for count in counts:
        end = count if shared is None else _begin(shared.end, count, own_blocks) + count
        if count < TILE and shared is not None and end <= SHARED:
            shared.counts.append(count)
            shared.end = end
            continue
        records.append(Record(count))
        if count < TILE:
            shared = records[-1]
    return records


def _begin(end: int, count: int, own_blocks: bool) -> int:
    """Returns where a parameter begins behind those that end at `end`."""
    if not own_blocks:
        return end
    begin = math.ceil(end / 16) * 16
    return begin if begin % 256 + count <= 256 else math.ceil(begin / 256) * 256


def has_store(path: str) -> bool:
    return ranks_in(path) > 0


def ranks_in(path: str) -> int:
    """Counts the ranks that have a file of the store in `path`: on node-local storage, those of
    this node."""
    return len(list(Path(path).glob("rank*.ziggurat")))


def added_stores(path: str) -> list[str]:
    """Returns the directories in `path` that have stores of parameters that were added later."""
    return sorted(str(folder) for folder in Path(path).glob("added-*") if has_store(str(folder)))


def fits_host(needed_bytes: int, path: str | None) -> bool:
    """Decides whether "auto" takes host memory, and prints the choice. Otherwise it takes the
    drive.

    Errors: InvalidArgument if the state does not fit and there is no directory.
    """
    if path is not None and has_store(path):
        # Keeps to the store: a machine with more free memory than before would silently start from
        # the beginning.
        say(f"nvme:{path}", "the directory already has a store")
        return False
    free = free_bytes()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whose = f"the state of the {ranks} ranks on this machine" if ranks > 1 else "the state"
    why = (
        f"{whose} takes {size_text(needed_bytes * ranks)}, and may take up to half of the "
        f"{size_text(free)} of free memory"
    )
    fits = needed_bytes * ranks <= free * _SHARE
    if not fits and path is None:
        raise InvalidArgument(
            f'placement="auto": {why}. Give "auto:/path" with a directory on a drive, or "host" to '
            "take the memory all the same"
        )
    say("host" if fits else f"nvme:{path}", why)
    return fits


def memory_beside_drive(state_bytes: int) -> int | None:
    """Returns the host memory for a state on a drive, or None for the least that works, which the
    engine finds."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine, by the launcher
    room = min(state_bytes + _WORK_BYTES, int(free_bytes() * _KEPT_SHARE / ranks))
    return room if room > _WORK_BYTES else None


def say(placement: str, why: str) -> None:
    """Prints a choice on standard error, where a job's log has it too. Logging would hide it by
    default, and a choice is no reason for a warning."""
    print(f'ziggurat: placement "{placement}": {why}', file=sys.stderr)
