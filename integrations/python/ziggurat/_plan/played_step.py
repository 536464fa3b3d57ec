# SPDX-License-Identifier: Apache-2.0
"""Plays a step of an offloaded model in virtual time (core/rehearsal/lent_rehearsal.h): a recording of the model as it
is becomes the calls that hooks and optimizer of an offloaded one make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ziggurat._library.native import simulate
from ziggurat._library.packing import TILE
from ziggurat._plan.drive_profile import is_measured
from ziggurat._plan.plan_page import PlayedStep
from ziggurat._plan.times import BEGIN, END, ENTER, GRADIENT, LEAVE, Times
from ziggurat._units.units import Unit

if TYPE_CHECKING:
    from ziggurat._plan.asked import Asked

# What Python takes, in seconds of one thread, as bench/hook_costs.py has measured it on a server's core: where a unit is
# brought and let go in a forward or a backward, and of each parameter of it; where a gradient is there; of a step, and of
# each parameter in it.
UNIT_S, HELD_S, GRADIENT_S, STEP_S, STEPPED_S = 50e-6, 1.6e-6, 5e-6, 200e-6, 5e-6
# How often each byte of a unit is read where the unit is brought, on average, to see writes (_streaming/pins.py).
_LOOKED = 4 / 32


def played_step(asked: Asked, times: Times, rate: float | None) -> PlayedStep | str:
    """Returns a step among many, or what would have to be so that it can be played. `rate`: the drive's."""
    if not is_measured():
        return "measure this machine with `ziggurat profile --measure`"
    if asked.ranks * asked.replicas > 1 or asked.gpu is not None or asked.activation_bytes:
        return "steps are played of one rank on the CPU, without activations on the drive"
    if asked.state_on_drive and rate is None:
        return "give drive=, or measure it with `ziggurat bench io`"
    events = _Events(asked, times)
    recording: dict[str, Any] = {"events": list(events.of_step()), "update_at_once": True, "threads": times.threads}
    if asked.accumulation > 1:
        recording["fp32_gradients"] = True
    if rate is not None:
        recording["drive_bytes_per_s"] = rate
    step = simulate(asked.listed(), asked.opening(), recording)
    return PlayedStep(
        seconds=step.seconds,
        compute_s=step.compute_s - events.python_s,
        python_s=events.python_s,
        units_s=step.params_s,
        gradients_s=step.gradients_s,
        update_s=step.step_s,
        copies_busy_s=step.copies_busy_s,
        update_busy_s=step.update_busy_s,
        drive_busy_s=step.drive_busy_s,
        read_bytes=step.read_bytes,
        written_bytes=step.written_bytes,
    )


Event = list[Any]


class _Events:
    """Makes the events of a step."""

    def __init__(self, asked: Asked, times: Times) -> None:
        self.python_s = 0.0
        self._asked, self._times = asked, times
        self._numbers = asked.numbers()
        self._trained = {param for _, param in asked.trained()}
        self._pins: dict[Unit, int] = {}
        self._in_files = asked.grads_on_drive
        # A unit is there where something of it is brought.
        self._comes = {unit: [one for _, one in unit.params if unit.keeps(one)] for unit in asked.division.units}
        self._kept = {one for params in self._comes.values() for one in params}

    def of_step(self) -> Iterator[Event]:
        given: dict[int, bool] = {}  # gradients by number, and whether the engine keeps the parameter
        for backward in range(self._asked.accumulation):
            yield from self._of_pass(backward, given)
        if self._asked.clips:
            scaled = sum(one.nbytes for one in self._trained if self._numbers[one] in given)
            yield self._compute(scaled * self._times.norm_s_per_byte)
        yield self._python(STEP_S + STEPPED_S * len(given))
        yield ["step"]
        # Those of units wait where they are brought, if their update goes on beside the next forward.
        beside = self._asked.state_on_drive
        yield from (["wait", number] for number, is_kept in given.items() if not (beside and is_kept))

    def _of_pass(self, backward: int, given: dict[int, bool]) -> Iterator[Event]:
        entries = self._asked.division.entries
        for what, of, seconds in self._times.happened:
            yield self._compute(seconds)
            if what in (ENTER, BEGIN):
                yield from self._pin(entries[of].units)
            elif what in (LEAVE, END):
                yield from self._unpin(entries[of].units)
            elif what == GRADIENT:
                yield from self._gradient(self._times.params[of], backward, given)

    def _pin(self, units: list[Unit]) -> Iterator[Event]:
        for unit in units:
            before = self._pins.get(unit, 0)
            self._pins[unit] = before + 1
            if before == 0 and self._comes[unit]:
                looked_s = _LOOKED * self._times.norm_s_per_byte * sum(one.nbytes for one in self._comes[unit])
                yield self._python(UNIT_S + HELD_S * len(self._comes[unit]) + looked_s)
                yield ["acquire", unit.number]

    def _unpin(self, units: list[Unit]) -> Iterator[Event]:
        for unit in units:
            self._pins[unit] -= 1
            if self._pins[unit] == 0 and self._comes[unit]:
                yield ["release", unit.number]

    def _gradient(self, param: torch.Tensor, backward: int, given: dict[int, bool]) -> Iterator[Event]:
        if param not in self._trained:
            return
        yield self._python(GRADIENT_S)
        number = self._numbers[param]
        if self._in_files and param.numel() >= TILE:
            yield ["add_gradient", number]
            given[number] = True
            return
        if backward:  # in fp32, from whatever type backward makes
            yield self._compute(4 * param.numel() * self._times.add_s_per_byte)
        if number not in given:
            yield ["gradient", number]
        given[number] = param in self._kept

    def _compute(self, seconds: float) -> Event:
        return ["compute", seconds, self._times.threads]

    def _python(self, seconds: float) -> Event:
        self.python_s += seconds
        return ["compute", seconds, 1]
