# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer's state is: what ``placement`` says, and what "auto" chooses."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ziggurat._memory import free_bytes, size_text
from ziggurat._native import InvalidArgument

# "auto" takes host memory for a state that takes up to this share of what is free. The rest is for
# what comes later: gradients, activations, batches, and a state_dict() of the whole state, which is
# in memory beside the state while it is saved.
_SHARE = 0.5

# Bytes that each format has of a parameter's master, and of each moment: what describe() says of an
# open engine, and none is open yet. 8bit has a scale of 4 bytes for 256 elements.
_BYTES = {
    "fp32": (4.0, 4.0),
    "bf16-moments": (4.0, 2.0),
    "8bit": (4.0, 1.0 + 4 / 256),
    "split": (4.0, 4.0),
    "bf16": (2.0, 2.0),
}
# The share of a state on a drive that is kept in memory: it is written each step, but not read.
_KEPT_SHARE = 1 / 8
_WORK_BYTES = 128 << 20  # for what passes through memory between the drive and the update
_TILE = 16 * 1024  # elements: a parameter's record holds whole ones,
_BLOCK = 64 * 1024  # and takes whole ones of these bytes: much for many small parameters


def parsed(placement: str) -> tuple[str, str | None]:
    """The tier, "auto" for one that is not chosen yet, and the directory that was named."""
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
    """What parameters of `counts` elements take as state on the host."""
    # A format that is not there is refused by the engine, in its words.
    master, moment = _BYTES.get(state_format, _BYTES["fp32"])
    of_tile = _TILE * (master + moments * moment)
    return sum(math.ceil(math.ceil(n / _TILE) * of_tile / _BLOCK) * _BLOCK for n in counts)


def has_store(path: str) -> bool:
    return ranks_in(path) > 0


def ranks_in(path: str) -> int:
    """How many ranks have a file of the store there: on node-local storage, those of this node."""
    return len(list(Path(path).glob("rank*.ziggurat")))


def fits_host(needed_bytes: int, path: str | None) -> bool:
    """Whether "auto" takes host memory, and says so; with `path`, the drive if not.

    Errors: InvalidArgument where there is no directory for a state that does not fit.
    """
    if path is not None and has_store(path):
        # A machine with more free memory than before would silently begin anew.
        say(f"nvme:{path}", "there is a store already")
        return False
    free = free_bytes()
    why = (
        f"the state takes {size_text(needed_bytes)}, but may take only half of the "
        f"{size_text(free)} of memory that are free"
    )
    fits = needed_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= free * _SHARE
    if not fits and path is None:
        raise InvalidArgument(
            f'placement="auto": {why}: give "auto:/path" with a directory on a drive, or "host" to '
            "take the memory all the same"
        )
    say("host" if fits else f"nvme:{path}", why)
    return fits


def memory_beside_drive(state_bytes: int) -> int | None:
    """Host memory for a state on a drive; None: the least that works, as the engine finds it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, as launchers tell
    room = min(state_bytes + _WORK_BYTES, int(free_bytes() * _KEPT_SHARE / ranks))
    return room if room > _WORK_BYTES else None


def say(placement: str, why: str) -> None:
    """A line on standard error, on which a job's log has it too: logging would hide it by default,
    and a choice is nothing to be warned of."""
    print(f'ziggurat: placement "{placement}": {why}', file=sys.stderr)
