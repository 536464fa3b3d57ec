# SPDX-License-Identifier: Apache-2.0
"""Prints what an engine reports of its run: notes, progress, times, memory, and figures for
monitors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._monitor import Event, Monitor
from ziggurat.deepspeed._timers import PARTS, Timers
from ziggurat.deepspeed.runtime.utils import see_memory_usage


class Report:
    """Prints reports on rank 0 alone. The values that scripts read are the engine's own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._timers = Timers(engine.wall_clock_breakdown())
        self._since_step = dict.fromkeys(PARTS, 0.0)
        self.monitor = Monitor(engine._config, engine.global_rank)
        for note in engine._config.notes:
            say(note)
        if engine.dump_state():
            say(f"configuration {json.dumps(engine._config.given, indent=2, default=str)}")

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._timers.part(name)

    def micro_step(self, is_boundary: bool) -> None:
        """Prints the reports that are due at the end of ``step()``."""
        if self._timers.enabled:
            spent = self._timers.taken()
            say("micro-step " + _times(spent))
            for name, milliseconds in spent.items():
                self._since_step[name] += milliseconds
        if is_boundary:
            self._step()
            self._since_step = dict.fromkeys(PARTS, 0.0)

    def _step(self) -> None:
        engine = self._engine
        every = engine.steps_per_print()
        if every and engine.global_steps % every == 0:
            rates = ", ".join(f"{rate:.4g}" for rate in engine.get_lr())
            say(f"step {engine.global_steps}: lr {rates}, {engine.skipped_steps} steps skipped")
        if self._timers.enabled:
            say(f"step {engine.global_steps}: " + _times(self._since_step))
        see_memory_usage("memory", force=engine.memory_breakdown())
        if self.monitor.enabled:
            self.monitor.write_events(self._events())

    def _events(self) -> list[Event]:
        engine, samples = self._engine, self._engine.global_samples
        events: list[Event] = [("Train/Samples/lr", engine.get_lr()[0], samples)]
        if engine.fp16_enabled():
            events.append(("Train/Samples/loss_scale", engine.cur_scale, samples))
        if self._timers.enabled:
            for name, milliseconds in self._since_step.items():
                events.append((f"Train/Samples/elapsed_time_ms_{name}", milliseconds, samples))
        return events


def _times(spent: dict[str, float]) -> str:
    return ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in spent.items())
