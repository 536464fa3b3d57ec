# SPDX-License-Identifier: Apache-2.0
"""What plan() returns of a module that is not offloaded: what a step holds at each moment, and a page about it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from ziggurat._memory.memory import size_text
from ziggurat._plan.plan_page import GRADIENTS, NOT_SENT, Plan
from ziggurat._plan.recorded_step import FORWARD, Moment

UPDATE = 2


class Room(NamedTuple):
    """The memory that a rank may take."""

    name: str
    bytes: float  #: where it computes
    host_bytes: float  #: of its node's, if it computes on a GPU
    margin: float = 0.0  #: of what is counted, which blocks of a GPU's allocator take beside it
    gpu: bool = False


class Worst(NamedTuple):
    """The moment at which most is held."""

    bytes: int
    phase: int
    moment: Moment


@dataclass(frozen=True)
class Held:
    """What a training on one rank holds, in bytes."""

    params: int
    trained: int  #: of them
    buffers: int
    batch: int
    state: int  #: the optimizer's
    beside_update: int  #: what an update takes for itself
    moments: list[Moment]  #: of forward and backward, beyond all that
    saved: int  #: for backward
    saved_fixed: int  #: of that, what does not grow with the batch
    output: int  #: logits and the loss
    unit: int  #: parameters of the largest unit
    accumulation: int  #: backwards in a step

    @property
    def grads(self) -> int:
        return int(self.moments[-1].grads)

    def worst(self, grads_kept: float = 1.0) -> Worst:
        """Returns the worst moment beyond parameters, buffers, batch and state, if a rank keeps such a part of gradients."""
        if self.accumulation > 1:  # the sums of backwards before are there from the forward on
            seen = [(one.held - one.grads + grads_kept * self.grads, one) for one in self.moments]
        else:
            seen = [(one.held - (1 - grads_kept) * one.grads, one) for one in self.moments]
        size_bytes, moment = max(seen, key=lambda pair: pair[0])
        found = Worst(-int(-size_bytes // 1), moment.phase, moment)
        last = self.moments[-1]
        update = last.held - last.grads + grads_kept * self.grads + grads_kept * self.beside_update
        return Worst(int(update), UPDATE, last) if update > found.bytes else found

    @property
    def work_bytes(self) -> int:
        """Returns what a forward or backward takes at most beside gradients that are whole."""
        return int(max(one.held - one.grads for one in self.moments))

    def with_offload(self, plan: Plan) -> int:
        """Returns the most that a step holds in host memory if the model is offloaded as planned. Gradients that other
        ranks sum, or that files have, grow no further than what is there of them at once."""
        there = sum(plan.in_host_memory.get(what, 0) for what in (GRADIENTS, NOT_SENT))
        at_once: float = there
        if GRADIENTS in plan.on_drive:
            grads = [one.grads for one in self.moments]
            at_once += max(after - before for before, after in itertools.pairwise(grads))
        if self.accumulation > 1:  # the sums of backwards before are there from the forward on
            beyond: float = self.work_bytes
        else:
            beyond = max(one.held - one.grads + min(one.grads, at_once) for one in self.moments) - there
        return sum(plan.in_host_memory.values()) + self.batch - int(-beyond // 1)

    @property
    def at_rest(self) -> int:
        return self.params + self.buffers + self.batch + self.state

    @property
    def peak_bytes(self) -> int:
        return self.at_rest + self.worst().bytes

    def lines(self) -> dict[str, int]:
        """Returns what is held at the worst moment, by what it is."""
        worst = self.worst()
        grads = self.grads if self.accumulation > 1 or worst.phase == UPDATE else int(worst.moment.grads)
        found = {
            "parameters that are trained": self.trained,
            "frozen parameters": self.params - self.trained,
            "buffers": self.buffers,
            "the batch": self.batch,
            "optimizer state": self.state,
            "gradients": grads,
        }
        left = worst.bytes - grads
        if worst.phase == UPDATE:
            found["what the update takes beside them"] = left
        else:
            found["saved for backward"] = min(self.saved, left)
            found["logits, loss, and what operations take"] = left - min(self.saved, left)
        return {what: its for what, its in found.items() if its}


class Fit(NamedTuple):
    """What one rank holds under a strategy."""

    strategy: str
    bytes: int  #: where it computes
    room: float
    host_bytes: int = 0  #: beside a GPU
    host_room: float = 0.0
    drive_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.bytes <= self.room and self.host_bytes <= self.host_room


@dataclass(frozen=True)
class LivePlan:
    """What a step of a module holds, and where it fits. ``str()`` is a page."""

    params: int
    trained: int
    shared: tuple[str, ...]  #: names of parameters that have another name already, each counted once
    by_dtype: dict[str, int]  #: bytes of parameters
    optimizer: str
    trains: bool  #: whether the module was in train mode, and not in eval mode
    rows: int  #: of the batch
    by: str  #: how the step was found
    largest_unit: str
    held: Held
    peak_bytes: int  #: of a plain step, from the second on
    machine: str
    ranks: int
    strategies: tuple[Fit, ...]
    no_offload: str | None  #: why offload() is not among them

    def __str__(self) -> str:
        return "\n\n".join("\n".join(lines) for lines in (self._head(), self._lines(), self._fits()))

    def _head(self) -> list[str]:
        frozen = f", {self.params - self.trained:,} of them frozen" if self.trained < self.params else ""
        types = ", ".join(f"{size_text(its)} in {dtype}" for dtype, its in self.by_dtype.items())
        held = self.held
        return [
            f"{self.params:,} parameters{frozen}: {types}; {self.optimizer}",
            *(f"{name} is shared, and is counted once" for name in self.shared),
            "in train mode"
            if self.trains
            else "in eval mode, without dropout and gradient checkpointing: for those call model.train() before",
            f"a batch of {self.rows} rows, found {self.by}",
            f"a forward saves {size_text(held.saved)} for backward"
            + (f", of which {size_text(held.saved_fixed)} do not grow with the batch" if held.saved_fixed > 0 else ""),
            f"logits and loss take {size_text(held.output)}; the largest unit is {self.largest_unit}, "
            f"{size_text(held.unit)} of parameters",
        ]

    def _lines(self) -> list[str]:
        phase = self.held.worst().phase
        when = {FORWARD: "in forward", UPDATE: "in the update"}.get(phase, "in backward")
        lines = [f"{f'a plain step holds most {when}':<46}"]
        lines += [f"{what:<46}{size_text(its):>12}" for what, its in self.held.lines().items()]
        return [*lines, f"{'sum':<46}{size_text(self.peak_bytes):>12}"]

    def _fits(self) -> list[str]:
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        lines = [f"{f'what is held{each}':<46}{'here':>12}{'host':>12}{'drive':>12}  on {self.machine}"]
        for one in self.strategies:
            sizes = (one.bytes, one.host_bytes, one.drive_bytes)
            columns = "".join(f"{size_text(its) if its else '-':>12}" for its in sizes)
            over = max(one.bytes - one.room, one.host_bytes - one.host_room)
            lines.append(f"{one.strategy:<46}{columns}  {'fits' if one.fits else f'{size_text(over)} too much'}")
        if self.no_offload is not None:
            lines.append(f"offload() is left out: {self.no_offload}")
        return lines
