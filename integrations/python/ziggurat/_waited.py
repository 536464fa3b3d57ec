# SPDX-License-Identifier: Apache-2.0
"""Counts how long a script waits in calls of the engine, by cause."""

from __future__ import annotations

import time
from types import TracebackType


class Waited:
    """Nanoseconds by cause: for units that are brought, for gradients that are handed over or read, and
    in ``step()``."""

    def __init__(self) -> None:
        self.units, self.gradients, self.step = Stretch(), Stretch(), Stretch()

    def figures(self) -> dict[str, int]:
        return {
            "waited_units_ns": self.units.ns,
            "waited_gradients_ns": self.gradients.ns,
            "waited_step_ns": self.step.ns,
        }


class Stretch:
    """The time within its blocks. One thread at a time; a block within another one is counted once."""

    def __init__(self) -> None:
        self.ns = 0
        self._depth = 0
        self._begin = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = time.perf_counter_ns()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.ns += time.perf_counter_ns() - self._begin
