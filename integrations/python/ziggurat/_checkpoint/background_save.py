# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import os
from typing import Any

from ziggurat._library.native import InvalidArgument
from ziggurat._library.native_checkpoint import Save
from ziggurat._memory.memory import free_bytes, size_text

# Records that steps would change before they are saved may take this share of the free memory; so
# may the parameters that are not trained, and buffers.
_SHARE = 0.5
_STALL_MAX = 60.0  # seconds
_LONGEST = 1e9  # seconds; JSON knows no infinity
_FASTEST = 1e15  # bytes a second; no drive needs such a limit


class BackgroundSave:
    """A checkpoint that :func:`save_checkpoint` writes in the background.

    The next save of the optimizer and its ``close()`` wait for it, and so does the end of an
    optimizer that is not closed. If it fails and nobody has called :meth:`wait`, they say so.
    """

    def __init__(self, native: Save) -> None:
        self.step = native.step  #: the checkpoint's step
        self._native = native

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not. Never waits."""
        return not self._native.under_way()

    def wait(self) -> str:
        """Returns the checkpoint's path when it is durable. All ranks call this, or none. Errors:
        those of :func:`save_checkpoint`; ZigguratError if steps have waited for the save as
        long as `stall_max` allows, or if its drive hangs."""
        return self._native.wait()

    def finish(self) -> None:
        """Waits, and warns if the save has failed and nobody has asked."""
        self._native.settle()


def memory_share() -> int:
    """Returns the bytes that a save of this rank may take."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine, by the launcher
    return int(free_bytes() * _SHARE / ranks)


def check_copied(copied_bytes: int, twice_bytes: int) -> int:
    """Returns the memory that is left when so many bytes are copied, of which `twice_bytes` take as
    much again at first. Errors: InvalidArgument if they take more than a save may."""
    most = memory_share()
    if copied_bytes + twice_bytes > most:
        again = f", {size_text(twice_bytes)} of them twice," if twice_bytes else ""
        raise InvalidArgument(
            f"save_checkpoint(background=True) would copy {size_text(copied_bytes)}{again} of parameters "
            f"that are not trained and of buffers, but may take only {size_text(most)} of memory: save "
            "without background"
        )
    return most - copied_bytes


def limits(bandwidth: float | None, stall_max: float | None, memory_bytes: int) -> dict[str, Any]:
    """Returns what a save says of what it may cost. Errors: InvalidArgument."""
    if bandwidth is not None and not bandwidth >= 1:
        raise InvalidArgument(f"bandwidth is {bandwidth}: give bytes a second, 1 or more, or None")
    if stall_max is not None and not stall_max >= 0:
        raise InvalidArgument(f"stall_max is {stall_max}: give seconds, 0 or more")
    return {
        "memory": memory_bytes,
        "stall_max": _STALL_MAX if stall_max is None else min(float(stall_max), _LONGEST),
        "bandwidth": 0 if bandwidth is None or bandwidth > _FASTEST else int(bandwidth),
    }


def refuse_limits(bandwidth: float | None, stall_max: float | None) -> None:
    """Errors: InvalidArgument if limits are given to a save that is waited for."""
    if bandwidth is not None or stall_max is not None:
        raise InvalidArgument(
            "save_checkpoint(): bandwidth and stall_max are for saves in the background: give "
            "background=True too, or leave them out"
        )
