# SPDX-License-Identifier: Apache-2.0
"""Measures how long forward, backward and step take, if ``wall_clock_breakdown`` asks for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ziggurat.deepspeed.accelerator import get_accelerator

PARTS = ("forward", "backward", "step")


class Timers:
    """Adds up milliseconds since the last ``taken()``. If it is off, it neither reads a clock nor
    waits."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        # Work that an accelerator has queued before belongs to another part.
        get_accelerator().synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            get_accelerator().synchronize()
            self._spent[name] += (time.perf_counter() - began) * 1e3

    def taken(self) -> dict[str, float]:
        spent, self._spent = self._spent, dict.fromkeys(PARTS, 0.0)
        return spent
