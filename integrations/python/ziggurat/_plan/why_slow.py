# SPDX-License-Identifier: Apache-2.0
"""Judges what limits the steps of an offloaded model, and what would change it by how much.

What a script waits for something is that thing's time on the drive, less what hides behind compute. So
a change that saves the drive seconds, by the bytes of plan(), saves as many of waiting; and more compute
in a step hides as many more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ziggurat._memory.memory import size_text
from ziggurat._plan.asked import Asked
from ziggurat._plan.traffic import StepBytes

COMPUTE, UNITS, UPDATE, GRADIENTS = "compute", "units", "update", "gradients"

_LITTLE = 0.1  # of a step, waiting that is not worth a change
_WORTH = 0.05  # of a step, what a change must save to be named

_IN_WORDS = {
    COMPUTE: "compute",
    UNITS: "memory=, because units come and go",
    UPDATE: "the update, for which units wait until its records are computed, and on NVMe read and written",
    GRADIENTS: "gradients in files",
}
_READ_ANEW = "reading parameters, which all stay in memory= until a step changes them"


class Seen(NamedTuple):
    """What was counted of some steps."""

    steps: int
    seconds: float  #: from the first to the last
    figures: Mapping[str, float]  #: of EngineOptimizer.figures()


@dataclass(frozen=True)
class Change:
    """Something to change, and the time of a step's tokens that it is expected to leave."""

    what: str
    step_s: float


@dataclass(frozen=True)
class Slow:
    """What limits a run. ``str()`` is what a person reads."""

    limit: str  #: "compute", "units", "update" or "gradients"
    all_fits: bool  #: whether memory= has room for all units at once
    steps: int
    step_s: float
    seconds: dict[str, float]  #: of a step, by what it computes or waits for
    read_bytes: float  #: from the drive, in a step
    written_bytes: float
    frozen_read_bytes: float  #: of frozen parameters in their own files, from the page cache or the drive
    drive_bytes_per_s: float | None  #: while it was busy
    drive_busy: float  #: the share of the time in which it was
    prefetch_hits: float  #: the share of pieces that were there when they were needed
    changes: tuple[Change, ...]  #: that help, the smallest first

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {its:.3g} s" for name, its in self.seconds.items())
        anew = self.limit == UNITS and self.all_fits
        lines = [
            f"the limit is {_READ_ANEW if anew else _IN_WORDS[self.limit]}",
            f"a step takes {self.step_s:.3g} s, on average of {self.steps}: {parts}",
        ]
        if self.drive_bytes_per_s is not None:
            lines.append(
                f"it reads {size_text(self.read_bytes)} from the drive and writes "
                f"{size_text(self.written_bytes)}, at {self.drive_bytes_per_s / 1e9:.3g} GB a second; the "
                f"drive is busy for {self.drive_busy:.0%} of the time"
            )
        if self.frozen_read_bytes:
            lines.append(
                f"it reads {size_text(self.frozen_read_bytes)} of frozen parameters in their own files, as far "
                "as memory does not have them"
            )
        lines.append(f"{self.prefetch_hits:.0%} of what units need was there when they needed it")
        for change in self.changes:
            saved = 1 - change.step_s / self.step_s
            lines.append(f"{change.what}: about {change.step_s:.3g} s, {saved:.0%} less")
        if self.limit == COMPUTE:
            lines.append("neither memory nor a faster drive would save much")
        elif not self.changes:
            lines.append("no single change is expected to save much")
        return "\n".join(lines)


def judged(asked: Asked, seen: Seen) -> Slow:
    """Returns what limits the steps that were `seen` of the run `asked`."""
    figures = seen.figures
    step_s = seen.seconds / seen.steps
    seconds = _by_cause(seen)
    waits = {name: its for name, its in seconds.items() if name != COMPUTE}
    limit = max(waits, key=lambda name: waits[name])
    if sum(waits.values()) < _LITTLE * step_s:
        limit = COMPUTE
    moved = figures["nvme_read_bytes"] + figures["nvme_write_bytes"]
    busy = figures["nvme_busy_s"]
    needed = figures["prefetch_hits"] + figures["prefetch_misses"]
    return Slow(
        limit=limit,
        all_fits=asked.division.fits(asked.memory_bytes),
        steps=seen.steps,
        step_s=step_s,
        seconds=seconds,
        read_bytes=figures["nvme_read_bytes"] / seen.steps,
        written_bytes=figures["nvme_write_bytes"] / seen.steps,
        frozen_read_bytes=figures["frozen_read_bytes"] / seen.steps,
        drive_bytes_per_s=moved / busy if busy else None,
        drive_busy=min(1.0, busy / seen.seconds),
        prefetch_hits=figures["prefetch_hits"] / needed if needed else 1.0,
        changes=tuple(_changes(asked, limit, seconds, moved / busy if busy else None)),
    )


def _by_cause(seen: Seen) -> dict[str, float]:
    """Returns the seconds of a step by cause. Units wait for their updates too, and for a state in
    memory the update is what step() does."""
    figures = seen.figures
    update_s = min(figures["wait_sweep_s"], figures["waited_units_s"]) + figures["waited_step_s"]
    waits = {
        UNITS: max(0.0, figures["waited_units_s"] - figures["wait_sweep_s"]),
        UPDATE: update_s,
        GRADIENTS: figures["waited_gradients_s"],
    }
    compute_s = max(0.0, seen.seconds - sum(waits.values()))
    return {name: its / seen.steps for name, its in ({COMPUTE: compute_s} | waits).items()}


def _bytes_of(step: StepBytes, cause: str) -> int:
    """Returns the bytes for which a step waits so."""
    if cause == UPDATE:
        return step.in_update
    if cause == GRADIENTS:
        return step.grads_read_backward + step.grads_written
    # From host memory nothing is read over a drive, but all is copied.
    return step.brought_forward + step.brought_backward + _frozen(step)


def _frozen(step: StepBytes) -> int:
    return step.frozen_read_forward + step.frozen_read_backward


class _Model:
    """The time of a step after a change, from its bytes."""

    def __init__(self, asked: Asked, seconds: Mapping[str, float], rate: float | None) -> None:
        self.seconds = seconds
        self.step_s = sum(seconds.values())
        self._step = asked.plan(has_room=True).step
        self._drive_s_per_byte = 0.0 if rate is None else 1 / rate

    def _s_per_byte(self, cause: str) -> float:
        """Returns the drive's time, or more where a script has waited longer than that for what is
        moved, as for copies in memory and for the latency of small reads."""
        moved = _bytes_of(self._step, cause)
        return max(self._drive_s_per_byte, self.seconds[cause] / moved) if moved else 0.0

    def after(self, asked: Asked, faster: float = 1.0, backwards: int = 1, tokens: int = 1) -> float:
        """Returns the time of as many tokens as a step has now, if the run is `asked`, the drive `faster`,
        and a step has so many times the `backwards`, and a backward the `tokens`. While more tokens are
        computed, more is brought; what a further backward needs is brought for it."""
        step = asked.plan(has_room=True).step
        compute_s = self.seconds[COMPUTE] * backwards * tokens
        hidden_s = self.seconds[COMPUTE] * backwards * (tokens - 1)
        waits = 0.0
        for cause in (UNITS, UPDATE, GRADIENTS):
            moved = _bytes_of(step, cause)
            saved_s = (_bytes_of(self._step, cause) - moved) * self._s_per_byte(cause)
            on_drive = moved if asked.homes.params == "nvme" or cause != UNITS else _frozen(step)
            saved_s += on_drive * self._drive_s_per_byte * (1 - 1 / faster)
            wait = max(0.0, self.seconds[cause] - saved_s) if self.seconds[cause] else 0.0
            # The update of a state in memory is the CPU's work in step(), which hides nowhere.
            hides = 0.0 if cause == UPDATE and not asked.state_on_drive else min(wait, hidden_s)
            hidden_s -= hides
            waits += wait - hides
        return (compute_s + waits) / (backwards * tokens)


def _changes(
    asked: Asked, limit: str, seconds: Mapping[str, float], rate: float | None
) -> Iterator[Change]:
    """Yields what helps against the limit, the smallest change first."""
    if limit == COMPUTE:
        return
    model = _Model(asked, seconds, rate)

    def worth(what: str, step_s: float) -> Iterator[Change]:
        if step_s < (1 - _WORTH) * model.step_s:
            yield Change(what, step_s)

    if limit == UNITS and not asked.division.fits(asked.memory_bytes):
        yield from _with_memory(asked, model)
    if limit == UPDATE and asked.state_on_drive:
        yield from worth(*_all_records(asked, model))
    # In memory adding a gradient to others takes as long as updating by it.
    if limit == UNITS or (limit == UPDATE and asked.state_on_drive):
        twice = replace(asked, accumulation=2 * asked.accumulation)
        yield from worth("twice as many backwards in a step", model.after(twice, backwards=2))
    if limit == GRADIENTS:
        here = replace(asked, homes=asked.homes._replace(grads="host"))
        yield from worth('grads=host in offload()\'s placement, if memory has room', model.after(here))
    yield from worth("twice as many tokens in each backward", model.after(asked, tokens=2))
    if asked.state_on_drive:
        yield from worth("a drive that is twice as fast", model.after(asked, faster=2))


def _with_memory(asked: Asked, model: _Model) -> Iterator[Change]:
    """Yields the fewest units more that are worth it, and room for all."""
    units = asked.division.units
    largest = max(unit.size_bytes for unit in units)
    whole = sum(unit.size_bytes for unit in units)
    for more in range(1, len(units) + 1):
        memory = asked.memory_bytes + more * largest
        if memory >= whole:
            break
        step_s = model.after(replace(asked, memory_bytes=memory))
        if step_s < (1 - _WORTH) * model.step_s:
            stay = "1 unit more stays" if more == 1 else f"{more} units more stay"
            yield Change(f"memory={memory}, so that {stay}", step_s)
            break
    step_s = model.after(replace(asked, memory_bytes=whole))
    if step_s < (1 - _WORTH) * model.step_s:
        yield Change(f"memory={whole}, so that all units stay", step_s)


def _all_records(asked: Asked, model: _Model) -> tuple[str, float]:
    """Returns the host_memory with which no record is read, and the time with it."""
    enough = asked.host_memory_for_all()
    return (
        f"host_memory={enough}, so that no record is read",
        model.after(replace(asked, host_memory=enough)),
    )
