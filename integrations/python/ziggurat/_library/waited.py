# SPDX-License-Identifier: Apache-2.0
"""Counts how long a script waits in calls of the engine, by cause, and what it does beside training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
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


class Beside:
    """What was counted beside training, as in evaluation: from a call of the model without gradients until
    the next call that trains, or backward, or step."""

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self._counters = counters
        self._begin: dict[str, int] | None = None
        self._sums: Counter[str] = Counter()

    def begin(self) -> None:
        """Does nothing the second time."""
        if self._begin is None:
            self._begin = self._now()

    def end(self) -> None:
        """Does nothing without begin()."""
        if self._begin is None:
            return
        for name, value in self._now().items():
            self._sums[name] += value - self._begin.get(name, 0)
        self._begin = None

    def sums(self) -> dict[str, int]:
        """Returns what the counters have counted so, and the time in nanoseconds as ``elapsed_ns``."""
        return dict(self._sums)

    def _now(self) -> dict[str, int]:
        return self._counters() | {"elapsed_ns": time.perf_counter_ns()}
