# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from ziggurat._memory import free_bytes, size_text
from ziggurat._native import InvalidArgument, ZigguratError
from ziggurat._native_checkpoint import Save, Values

# Records that steps would change before they are saved may take this share of the free memory; so
# may the parameters that are not trained, and buffers.
_SHARE = 0.5
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class BackgroundSave:
    """A checkpoint that :func:`save_checkpoint` writes in the background.

    The next save of the optimizer and its ``close()`` wait for it. If it fails and nobody has
    called :meth:`wait`, they warn.
    """

    def __init__(self, native: Save, step: int) -> None:
        self.step = step  #: the checkpoint's step
        self._native = native
        self._asked = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not. Never waits."""
        return not self._native.under_way()

    def wait(self) -> str:
        """Returns the checkpoint's path when it is durable. All ranks call this, or none. Errors:
        those of :func:`save_checkpoint`; ZigguratError if steps have waited for the save as
        long as `stall_max` allows, or if its drive hangs."""
        self._asked = True
        return self._native.wait()

    def finish(self) -> None:
        """Waits, and warns if the save has failed and nobody has asked."""
        asked = self._asked
        try:
            self.wait()
        except ZigguratError as error:
            if not asked:
                warnings.warn(f"the checkpoint of step {self.step} is not saved: {error}", stacklevel=3)


def memory_share() -> int:
    """Returns the bytes that a save of this rank may take."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine, by the launcher
    return int(free_bytes() * _SHARE / ranks)


def check_copied(values: Sequence[Values]) -> None:
    """Refuses to copy more than there is memory for. Errors: InvalidArgument."""
    copied = sum(one.count * _ELEMENT_BYTES[one.dtype] for one in values)
    most = memory_share()
    if copied > most:
        raise InvalidArgument(
            f"save_checkpoint(background=True) would copy {size_text(copied)} of parameters that are "
            f"not trained and of buffers, but may take only {size_text(most)} of memory: save "
            "without background"
        )


def limits(bandwidth: float | None, stall_max: float) -> dict[str, Any]:
    """Returns what a save says of itself. Errors: InvalidArgument."""
    if bandwidth is not None and not bandwidth >= 1:
        raise InvalidArgument(f"bandwidth is {bandwidth}: give bytes a second, 1 or more, or None")
    if not stall_max >= 0:
        raise InvalidArgument(f"stall_max is {stall_max}: give seconds, 0 or more")
    return {
        "memory": memory_share(),
        "stall_max": float(stall_max),
        "bandwidth": 0 if bandwidth is None else int(bandwidth),
    }
