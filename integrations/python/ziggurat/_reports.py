# SPDX-License-Identifier: Apache-2.0
"""The part of an engine's optimizer that tells what was done, how long it took and why."""

from __future__ import annotations

import contextlib
import time

from ziggurat._asked import asked_of
from ziggurat._native import Engine, InvalidArgument, Unimplemented
from ziggurat._opening import Opening
from ziggurat._streaming import Streaming, streaming_around
from ziggurat._why_slow import Seen, Slow, judged

_OWN = ("device_", "waited_", "brought_", "frozen_")  #: begin counters that are an optimizer's own
_Now = tuple[dict[str, int], int, float]  # counters, steps, and the clock in seconds


class Reports(Opening):
    """Figures for loggers, and a judgement for people."""

    _judged_at: _Now | None = None  # when why_slow() was called last, or the engine opened

    def open(self, *, resume: bool | str = False) -> None:
        super().open(resume=resume)
        if self._judged_at is None and self._opened:
            self._judged_at = self._now()

    @property
    def engine(self) -> Engine | None:
        """The engine of the first step's parameters, or None before that step."""
        return self._opened[0].engine if self._opened else None

    def figures(self) -> dict[str, float]:
        """Returns, for a logger, what was done since the last call: steps, bytes, seconds waited
        and busy. Names may change from one version to the next.

        ``nvme_read_bytes``, ``nvme_write_bytes``
            What came from the drive and went there, and of it ``state_read_bytes`` and
            ``state_write_bytes``, the optimizer's; ``record_cache_hit_bytes`` stayed in memory. The
            drive was busy for ``nvme_busy_s``, ``nvme_read_busy_s``, ``nvme_write_busy_s``.
        ``device_down_bytes``, ``device_up_bytes``
            What was copied from and to accelerators.
        ``prefetch_hits``, ``prefetch_misses``
            Pieces of an offloaded model's units that were there when they were needed, or were not.
        ``frozen_read_bytes``
            What was read of an offloaded model's frozen parameters that stay in their own files, from the
            page cache or the drive; of tables that are read by rows, nothing.
        ``brought_units``, ``brought_experts``
            How often units of an offloaded model were brought: experts, and all others.
        ``waited_units_s``, ``waited_gradients_s``, ``waited_step_s``
            What the script waited for units (of it ``wait_sweep_s`` for their updates), for gradients in
            files, and in ``step()``. ``why_slow()`` says what to do about it.
        ``exchange_bytes``, ``exchange_planned_bytes``
            The memory for what ranks send each other and for the gradients that came, and the most
            that it will be.
        ``host_budget_bytes``, ``host_used_bytes``
            The engine's host memory, and what of it is in use now.

        Counters are the process's, and two optimizers share them. Only what was copied from and to
        accelerators, ``brought_``, ``frozen_`` and ``waited_`` is this optimizer's own.
        """
        engine = self.engine
        if engine is None:
            return {}
        now = self._counters()
        trained = [param for opened in self._opened for param in opened.members]
        exchange = self._sharing.exchange_bytes(trained)
        before, self._figures = self._figures, now
        told: dict[str, float] = {"generation": engine.generation}
        told["durable_generation"] = engine.durable_generation
        told["exchange_bytes"], told["exchange_planned_bytes"] = exchange
        return told | _since(before, now)

    def _counters(self) -> dict[str, int]:
        now = self._opened[0].figures()
        for opened in self._opened[1:]:
            for name, value in opened.figures().items():
                if name.startswith(_OWN):
                    now[name] += value
        return now

    def why_slow(self) -> Slow:
        """Returns what limits the steps made since the last call, or since the first step: compute, or
        waiting for units that come and go, for the update, or for gradients in files. ``str()`` says it in
        words, with the changes that would help and by how much; call it when some steps were made, right
        after one. Of an offloaded model. Errors: Unimplemented for another; InvalidArgument if no step was
        made."""
        streaming = streaming_around(self._order)
        if streaming is None:
            raise Unimplemented("why_slow() only knows models that were given to offload(): see figures()")
        with contextlib.ExitStack() as waiting:
            for opened in self._opened:
                waiting.enter_context(opened.waited.step)
            self.synchronize()
        before, now = self._judged_at, self._now() if self._opened else None
        if before is None or now is None or now[1] == before[1]:
            raise InvalidArgument("why_slow(): no step was made since the last call: call it after some")
        self._judged_at = now
        accumulation = self._passes(streaming, before, now)
        seen = Seen(now[1] - before[1], now[2] - before[2], _since(before[0], now[0]))
        return judged(asked_of(streaming, accumulation, clips=False), seen)

    def _now(self) -> _Now:
        engine = self.engine
        return self._counters(), 0 if engine is None else engine.generation, time.perf_counter()

    @staticmethod
    def _passes(streaming: Streaming, before: _Now, now: _Now) -> int:
        """Returns how many backwards a step had: each, and each forward, needs each unit once, but for
        experts."""
        units = sum(bool(unit.held) and not unit.unit.is_expert for unit in streaming.units)
        brought = now[0]["brought_units"] - before[0]["brought_units"]
        return max(1, round(brought / max(1, units) / (now[1] - before[1]) / 2))


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, float]:
    """Returns what counters have counted; of memory, what it is now."""
    told: dict[str, float] = {}
    for name, value in now.items():
        if name.startswith("host_"):
            told[name] = value
        elif name.endswith("_ns"):
            told[name[:-3] + "_s"] = (value - before.get(name, 0)) / 1e9
        else:
            told[name] = value - before.get(name, 0)
    return told
