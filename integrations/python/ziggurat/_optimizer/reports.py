# SPDX-License-Identifier: Apache-2.0
"""The part of an engine's optimizer that tells what was done, how long it took and why."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import NamedTuple

from ziggurat._library.native import Engine, InvalidArgument, Unimplemented
from ziggurat._optimizer.auto_said import Planned
from ziggurat._optimizer.opening import Opening
from ziggurat._optimizer.step_said import say_step
from ziggurat._plan.asked_of import asked_of
from ziggurat._plan.why_slow import Seen, Slow, judged
from ziggurat._streaming.streaming import Streaming, streaming_around

_OWN = ("device_", "waited_", "brought_", "frozen_", "tiles_", "activations_", "from_")  #: begin counters that are an optimizer's own
#: of these counters a run is judged by what it counts while it trains: a step's update moves what it moves
#: in evaluation too
_OF_PASSES = ("prefetch_hits", "prefetch_misses", "wait_sweep_ns", "waited_units_ns", "frozen_read_bytes")


class _Now(NamedTuple):
    counters: dict[str, int]
    beside: dict[str, int]  #: of them, in evaluation
    backwards: list[int]  #: by the unit of an offloaded model
    steps: int
    seconds: float  #: of a clock


class Reports(Opening):
    """Figures for loggers, and a judgement for people."""

    _planned: Planned | None = None  # of what the planner has chosen, until it was compared
    _judged_at: _Now | None = None  # when why_slow() was called last, or the engine opened

    def open(self, *, resume: bool | str = False) -> None:
        known = len(self._opened)
        super().open(resume=resume)
        for opened in self._opened[known:]:
            streaming = streaming_around(opened.members) if opened.keeps else None
            if streaming is None:
                continue
            say_step(streaming, opened)
            if self._memory is not None and self._begin_bytes is not None:
                self._planned = Planned(streaming, self._begin_bytes)
        if self._judged_at is None and self._opened:
            self._judged_at = self._now()

    def compare_with_plan(self) -> None:
        """Says once, after some steps, what was planned beside what they took, if the planner has chosen."""
        if self._planned is not None and self.engine is not None:
            if self._planned.step_made(self.engine.generation, self._counters()):
                self._planned = None

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
        ``tiles_read_bytes``
            What was read, as that was, of linear layers that ``offload(tiles=)`` uses in tiles and that lie in files.
        ``brought_units``, ``brought_experts``
            How often units of an offloaded model were brought: experts, and all others. Of these others
            ``brought_backward`` for a backward.
        ``brought_bytes``
            What these units have where the engine keeps it, in host memory or on the drive: as much was copied
            or read, less what was there from the use before. It is all that tells of placement="host", where
            nothing is read from a drive; there it is 0 if memory= has room for all, which live in it then.
        ``from_ranks_bytes``
            What other ranks gave of an offloaded model's parameters, of it ``from_other_nodes_bytes`` ranks that are
            not among the ``hpz`` that share copies; 0 without ``hpz``.
        ``gradients_from_ranks_bytes``
            What other ranks sent of gradients, of which this rank sums its part; where ``exchange`` is FSDP2's, 0.
        ``activations_put_bytes``
            What ``offload(activations=)`` kept of forwards, of it ``activations_written_bytes`` on the drive, and
            ``activations_read_bytes`` from there. ``activations_wait_s`` were waited for that.
        ``waited_units_s``, ``waited_gradients_s``, ``waited_step_s``
            What the script waited for units (of it ``wait_sweep_s`` for their updates), for gradients in
            files, and in ``step()``. ``why_slow()`` says what to do about it.
        ``exchange_bytes``, ``exchange_planned_bytes``
            The memory for what ranks send each other and for the gradients that came, and the most
            that it will be.
        ``host_budget_bytes``, ``host_used_bytes``, ``host_peak_bytes``
            The engine's host memory, and what of it is in use now and was at most.
        ``units_budget_bytes``, ``units_peak_bytes``
            The engine's memory for an offloaded model's units, on the GPU if they are brought there.

        Counters are the process's, and two optimizers share them. Only what was copied from and to
        accelerators, ``brought_``, ``frozen_``, ``tiles_``, ``activations_``, ``from_`` and ``waited_`` is this optimizer's own.
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
        feeder = self._sharing.feeder
        now["gradients_from_ranks_bytes"] = 0 if feeder is None else feeder.exchange.from_ranks_bytes
        return now

    def why_slow(self) -> Slow:
        """Returns what limits the steps made since the last call, or since the first step: compute, or
        waiting for units that come and go, for the update, or for gradients in files. ``str()`` says it in
        words, with the changes that would help and by how much; call it when some steps were made, right
        after one. What calls of the model without gradients begin, as evaluation, is left out, until training
        goes on. Of an offloaded model. Errors: Unimplemented for another; InvalidArgument if no step was made."""
        streaming = streaming_around(self._order)
        if streaming is None:
            raise Unimplemented("why_slow() only knows models that were given to offload(): see figures()")
        with contextlib.ExitStack() as waiting:
            for opened in self._opened:
                opened.beside.end()
                waiting.enter_context(opened.waited.step)
            self.synchronize()
        before, now = self._judged_at, self._now() if self._opened else None
        if before is None or now is None or now.steps == before.steps:
            raise InvalidArgument("why_slow(): no step was made since the last call: call it after some")
        self._judged_at = now
        steps = now.steps - before.steps
        aside = _since(before.beside, now.beside)
        figures = _without(_since(before.counters, now.counters), aside)
        seen = Seen(steps, now.seconds - before.seconds - aside.get("elapsed_s", 0.0), figures)
        earlier = before.backwards or [0] * len(now.backwards)  # its units may have been added since
        backwards = [count - known for count, known in zip(now.backwards, earlier, strict=True)]
        accumulation = self._passes(streaming, backwards, steps)
        return judged(asked_of(streaming, accumulation, clips=False), seen)

    def _now(self) -> _Now:
        engine, beside = self.engine, Counter[str]()
        for opened in self._opened:
            beside.update(opened.beside.sums())
        streaming = streaming_around(self._order)
        backwards = [] if streaming is None else [unit.backwards for unit in streaming.units]
        steps = 0 if engine is None else engine.generation
        return _Now(self._counters(), dict(beside), backwards, steps, time.perf_counter())

    @staticmethod
    def _passes(streaming: Streaming, backwards: list[int], steps: int) -> int:
        """Returns how many backwards a step had, of which each unit has had so many `backwards` in all: what
        most units had that had any. Those before the first that is trained have none, experts have as many as
        their router calls, and what a forward calls twice has twice as many."""
        pairs = zip(streaming.units, backwards, strict=True)
        had = [count for unit, count in pairs if count and not unit.unit.is_expert]
        # The low median. The module that has one, statistics, takes as long to import as this package's 16 rooms.
        return max(1, round(sorted(had)[(len(had) - 1) // 2] / steps)) if had else 1


def _without(figures: dict[str, float], beside: dict[str, float]) -> dict[str, float]:
    """Returns `figures` without what evaluation has counted of units."""
    moved = figures["nvme_read_bytes"] + figures["nvme_write_bytes"]
    read = beside.get("nvme_read_bytes", 0) - beside.get("state_read_bytes", 0)
    left = {name: figures[name] - beside.get(name, 0) for name in map(_told_as, _OF_PASSES)}
    left["nvme_read_bytes"] = figures["nvme_read_bytes"] - read
    left["nvme_busy_s"] = figures["nvme_busy_s"] * (1 - read / moved if moved else 1)
    return figures | left


def _told_as(name: str) -> str:
    """Returns under what name a program is told of a counter."""
    return name[:-3] + "_s" if name.endswith("_ns") else name


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, float]:
    """Returns what counters have counted; of memory, what it is now."""
    told: dict[str, float] = {}
    for name, value in now.items():
        if name.startswith(("host_", "units_")):
            told[name] = value
        elif name.endswith("_ns"):
            told[_told_as(name)] = (value - before.get(name, 0)) / 1e9
        else:
            told[name] = value - before.get(name, 0)
    return told
