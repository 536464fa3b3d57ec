# SPDX-License-Identifier: Apache-2.0
"""Says on standard error what the planner has chosen for an offloaded model, and once, after the fourth step, what
it had planned beside what the steps took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import NamedTuple

from ziggurat._library.native import MemoryChoice, ZigguratError
from ziggurat._library.standard_error import stderr
from ziggurat._memory.loose_memory import resident_bytes
from ziggurat._memory.memory import size_text
from ziggurat._plan.asked_of import asked_of
from ziggurat._plan.plan_page import Plan
from ziggurat._streaming.streaming import Streaming

_COUNTED_FROM, _TOLD_AFTER = 2, 4  # steps: the first ones learn the order of units


def say_choice(choice: MemoryChoice, directory: str | None) -> None:
    """Says what was chosen, and why."""
    tiers = choice.placement.replace("params=device", "params=memory for units")
    where = "" if directory is None or "nvme" not in tiers else f" in {directory}"
    records = f", host_memory={size_text(choice.host_memory)}" if choice.host_memory else ""
    print(
        f"ziggurat: auto: {tiers}{where}, memory={size_text(choice.memory)} for units{records}: {choice.why}",
        file=stderr(),
    )


class _Now(NamedTuple):
    moved_bytes: int
    busy_ns: int
    seconds: float  #: of a clock


class Planned:
    """What was planned for a model that was left to "auto", until it is said beside what its steps took."""

    def __init__(self, streaming: Streaming, begin_bytes: int) -> None:
        """`begin_bytes`: what the process had beside the model before its engine opened."""
        self._begin_bytes = begin_bytes
        self._from: _Now | None = None
        self._first_step: int | None = None
        self._plan: Plan | None = None
        with contextlib.suppress(ZigguratError):  # it is only said
            self._plan = asked_of(streaming, 1, clips=False).plan(has_room=True)

    def step_made(self, steps: int, figures: Mapping[str, int]) -> bool:
        """Called after a step; the engine has made so many. Returns whether all is said."""
        if self._plan is None:
            return True
        if self._first_step is None:
            self._first_step = steps - 1
        made = steps - self._first_step
        now = _Now(
            figures["nvme_read_bytes"] + figures["nvme_write_bytes"], figures["nvme_busy_ns"], time.perf_counter()
        )
        if self._from is None and made >= _COUNTED_FROM:
            self._from = now
        elif self._from is not None and made >= _TOLD_AFTER:
            self._say(self._plan, self._from, now, made - _COUNTED_FROM)
            return True
        return False

    def _say(self, plan: Plan, before: _Now, now: _Now, steps: int) -> None:
        planned = f"{size_text(sum(plan.in_host_memory.values()))} of memory without activations"
        taken = size_text(max(0, resident_bytes() - self._begin_bytes))
        moved = plan.step.read + plan.step.written
        if moved or now.moved_bytes > before.moved_bytes:
            rate = f" in {plan.drive_s:.3g} s of the drive" if plan.drive_s is not None else ""
            planned += f", and {size_text(moved)} over the drive{rate} for a step"
            busy = (now.busy_ns - before.busy_ns) / steps / 1e9
            taken += f" and {size_text((now.moved_bytes - before.moved_bytes) / steps)} in {busy:.3g} s of the drive"
        seconds = (now.seconds - before.seconds) / steps
        print(
            f"ziggurat: auto: planned were {planned}; up to the fourth step it took {taken}, and a step "
            f"{seconds:.3g} s",
            file=stderr(),
        )
