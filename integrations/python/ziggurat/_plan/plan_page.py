# SPDX-License-Identifier: Apache-2.0
"""What plan() returns: figures for programs, and a page that a person reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ziggurat._memory.memory import size_text
from ziggurat._plan.step_bound import StepBound
from ziggurat._plan.traffic import StepBytes


_BINDS = 0.9  # of a step, what is busy for so long binds it
_TOLD = 0.005  # of a step, what is worth a word

#: a row of what offload(activations=) has in memory; the others are not known before a forward
ACTIVATIONS = "activations, within activation_memory"
GRADIENTS = "gradients"
NOT_SENT = "gradients that are not sent yet"  #: to other ranks


@dataclass(frozen=True)
class PlayedStep:
    """A step among many, as the engine is played in virtual time by a recording of the model. Seconds."""

    seconds: float
    compute_s: float  #: in which PyTorch computes, on cores that do nothing else
    python_s: float  #: in which hooks and optimizer do their part
    units_s: float  #: in which the script waits for units
    gradients_s: float  #: in which backward hands over gradients that are summed in files
    update_s: float  #: in the step, which updates what is in memory
    copies_busy_s: float  #: meanwhile
    update_busy_s: float
    drive_busy_s: float
    read_bytes: float  #: over the drive
    written_bytes: float

    @property
    def limit(self) -> str:
        """Returns what binds the step: what is busy for nearly all of it, or what it waits for most."""
        busy = {"compute": self.compute_s, "the drive": self.drive_busy_s, "copies of units": self.copies_busy_s}
        most = max(busy, key=lambda name: busy[name])
        if busy[most] >= _BINDS * self.seconds:
            return most
        waits = {"units": self.units_s, "gradients in files": self.gradients_s, "the update": self.update_s}
        longest = max(waits, key=lambda name: waits[name])
        return f"{most}, and waits for {longest}" if waits[longest] > (1 - _BINDS) / 2 * self.seconds else most


@dataclass(frozen=True)
class Plan:
    """What a run of an offloaded model takes and moves. ``str()`` is a page."""

    params: int
    trained: int
    units: int
    experts: int  #: the units that a batch may not call
    frozen_in_files: int  #: bytes of frozen parameters that stay in their own files
    by_rows: tuple[str, ...]  #: the embeddings of which a forward reads a batch's rows where they lie
    tiles: dict[str, int]  #: the linear layers that are used in tiles, and how many each has
    optimizer: str
    state_format: str
    tokens: int  #: of a step
    accumulation: int  #: backwards in a step
    memory_bytes: int  #: the limit of what is brought
    smallest_memory_bytes: int  #: the smallest `memory` that works
    all_fits: bool  #: whether `memory` has room for all units at once
    in_host_memory: dict[str, int]  #: bytes by what they are, without activations
    on_drive: dict[str, int]
    gpu: str | None  #: that units are brought to, if they are not brought to the CPU
    on_gpu: dict[str, int]  #: bytes of its memory, without activations
    step: StepBytes  #: what a step moves at most, from the fourth on
    drive_bytes_per_s: float | None  #: reads and writes together
    drive_rate_from: str  #: who says so
    drive_s: float | None  #: what the drive takes for a step if nothing else limits it
    compute_s: float | None
    bound: StepBound | None  #: the least time of a step that moves all of `step`, if both rates are known
    played: PlayedStep | None  #: a step as it is expected, if a batch was given and this machine was measured
    played_needs: str  #: else what that needs

    def __str__(self) -> str:
        sections = (self._head(), self._places(), self._moved(), self._time())
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _head(self) -> list[str]:
        frozen = self.params - self.trained
        backwards = "1 backward" if self.accumulation == 1 else f"{self.accumulation} backwards"
        stays = (
            "has room for all units"
            if self.all_fits
            else f"takes {size_text(self.memory_bytes)} of the units' parameters at a time"
        )
        return [
            f"{self.params:,} parameters in {self.units} units"
            + (f", {self.experts:,} of them experts" if self.experts else "")
            + (f", {frozen:,} of them frozen" if frozen else "")
            + f"; {self.optimizer} in {self.state_format}",
            *(f"of {name} each batch's rows are read" for name in self.by_rows),
            *(f"{name} has {count} tiles, of which one is there at a time" for name, count in self.tiles.items()),
            *([f"{size_text(self.frozen_in_files)} that are frozen stay in their own files"] if self.frozen_in_files else []),
            f"{self.tokens:,} tokens in {backwards} make a step",
            f"memory={self.memory_bytes} {stays}; it must be at least {self.smallest_memory_bytes}",
        ]

    def _places(self) -> list[str]:
        of_what = "other activations" if ACTIVATIONS in self.in_host_memory else "activations"
        lines = [f"{f'what lies where, without {of_what}':<46}on"]
        tiers = (("host", self.in_host_memory), ("nvme", self.on_drive), (self.gpu, self.on_gpu))
        for tier, found in tiers:
            lines += [f"{what:<46}{tier:<8}{size_text(its):>12}" for what, its in found.items()]
            if found:
                lines.append(f"{'sum':<46}{tier:<8}{size_text(sum(found.values())):>12}")
        return lines

    def _moved(self) -> list[str]:
        step = self.step
        called = "with all experts called, " if self.experts else ""
        brings = (
            f"{called}forward brings {size_text(step.brought_forward + step.frozen_read_forward)} of "
            f"parameters, backward {size_text(step.brought_backward + step.frozen_read_backward)}"
        )
        heads = [brings]
        if step.params_from_ranks or step.grads_from_ranks:
            given, sent = size_text(step.params_from_ranks), size_text(step.grads_from_ranks)
            heads.append(f"other ranks give {given} of these parameters, and {sent} of gradients")
        if not self.on_drive and not step.read:
            return [*heads, "a step moves nothing over the drive"]
        frozen = [
            ("frozen parameters in their files, forward", step.frozen_read_forward, 0),
            ("frozen parameters in their files, backward", step.frozen_read_backward, 0),
        ]
        rows = [
            *(row for row in frozen if self.frozen_in_files),
            ("parameters for forward", step.params_read_forward, 0),
            ("parameters for backward", step.params_read_backward, 0),
            ("parameters in the update", step.params_read_update, step.params_written),
            ("gradients in backward", step.grads_read_backward, step.grads_written),
            ("gradients in the update", step.grads_read_update, 0),
            ("optimizer state", step.state_read, step.state_written),
            ("sum", step.read, step.written),
        ]
        lines = [
            *heads,
            f"{'a step moves over the drive, at most':<46}{'read':>12}{'written':>12}",
        ]
        return lines + [
            f"{what:<46}{size_text(read):>12}{size_text(written):>12}" for what, read, written in rows
        ]

    def _time(self) -> list[str]:
        lines = []
        if self.drive_s is not None and self.drive_bytes_per_s is not None:
            rate = f"{self.drive_bytes_per_s / 1e9:.3g} GB a second"
            lines.append(
                f"the drive takes {self.drive_s:.3g} s for a step, at {rate} ({self.drive_rate_from})"
            )
        elif self.on_drive or self.step.read:
            lines.append(
                "the drive's rate is not known: give drive=, or measure it with `ziggurat bench io`"
            )
        if self.compute_s is not None:
            lines.append(f"compute takes {self.compute_s:.3g} s")
        # The least is that of a step which moves the most: what is played may move less.
        if self.bound is not None and (self.played is None or self.bound.seconds <= self.played.seconds):
            most = self.tokens / self.bound.seconds if self.bound.seconds else math.inf
            rate = f"{most:,.0f} tokens a second"
            lines.append(
                f"a step takes at least {self.bound.seconds:.3g} s, at most {rate}: the limit is "
                f"{self.bound.limit}"
            )
        if self.played is not None:
            lines.append(_told(self.played))
        elif self.played_needs:
            lines.append(f"how long a step takes is not known: {self.played_needs}")
        return lines


def _told(step: PlayedStep) -> str:
    parts = {
        "compute": step.compute_s,
        "Python's part": step.python_s,
        "waits for units": step.units_s,
        "gradients into files": step.gradients_s,
        "the update": step.update_s,
    }
    told = ", ".join(f"{name} {its:.3g} s" for name, its in parts.items() if its >= _TOLD * step.seconds)
    return f"a step takes about {step.seconds:.3g} s: {told}; the limit is {step.limit}"
