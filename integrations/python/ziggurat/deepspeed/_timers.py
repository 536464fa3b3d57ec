# SPDX-License-Identifier: Apache-2.0
"""How long forward, backward and step take, where ``wall_clock_breakdown`` asks for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ziggurat.deepspeed.accelerator import get_accelerator

PARTS = ("forward", "backward", "step")


class Timers:
    """Milliseconds since the last ``taken()``; off, it neither looks at a clock nor waits."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        # What an accelerator has queued before belongs to another part.
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
