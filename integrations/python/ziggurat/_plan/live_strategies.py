# SPDX-License-Identifier: Apache-2.0
"""What each strategy would hold of a module that plan() has measured: plain, DDP, ZeRO, FSDP and offload()."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ziggurat._library.native import ZigguratError
from ziggurat._library.state_kinds import optimizers
from ziggurat._memory.placement import Homes
from ziggurat._plan.asked import Asked
from ziggurat._plan.live_page import Fit, Held, Room
from ziggurat._units.units import divide

_GATHERED = 2  # units that are whole at once: one computes, the next one comes
_UNREDUCED = 2  # gradients of a unit: as backward makes them, and as ranks reduce them
_UNITS = 3  # that offload() is given room for: one computes, one comes, one goes
_UNBOUNDED = 1 << 60


def strategies(
    model: torch.nn.Module, optimizer: str, held: Held, room: Room, ranks: int
) -> tuple[tuple[Fit, ...], str | None]:
    """Returns them, the simplest first, and why offload() is not among them, if it is not."""
    found = list(_usual(held, room, ranks))
    if optimizer.lower() not in optimizers():
        return tuple(found), f"it has no {optimizer}: its optimizers are {', '.join(optimizers())}"
    if room.gpu:
        return tuple(found), "it is counted here for CPUs only: plan(model, tokens=, device=) tells of a GPU"
    try:
        for one in _offloaded(model, optimizer.lower(), held, room, ranks):
            found.append(one)
    except ZigguratError as error:
        return tuple(found), str(error)
    return tuple(found), None


def _usual(held: Held, room: Room, ranks: int) -> Iterator[Fit]:
    """Yields those that need nothing of Ziggurat."""

    def fit(name: str, size_bytes: float) -> Fit:
        return Fit(name, math.ceil(size_bytes * (1 + room.margin)), room.bytes)

    yield fit("plain", held.peak_bytes)
    whole = held.params + held.buffers + held.batch
    if ranks > 1:
        yield fit("DDP", held.peak_bytes + held.grads)  # and its buckets, as large as gradients
        yield fit("ZeRO-1", held.peak_bytes + held.grads - held.state + held.state / ranks)
        part = held.worst(1 / ranks).bytes + held.state / ranks
        grads = _UNREDUCED * held.unit * held.trained / max(1, held.params)
        yield fit("ZeRO-2", whole + part + grads)
        gathered = held.params / ranks + _GATHERED * held.unit
        yield fit("FSDP (ZeRO-3)", whole - held.params + gathered + part + grads)


def _offloaded(model: torch.nn.Module, optimizer: str, held: Held, room: Room, ranks: int) -> Iterator[Fit]:
    """Yields the least that offload() has in memory and on the drive, beside a forward's and a backward's own.
    Errors: those of a model that it does not take."""
    for name, home, on_drive in (
        ("offload()", "host", False),
        ("offload(), state on NVMe", "host", True),
        ("offload(), all on NVMe", "params=nvme,grads=nvme", True),
    ):
        division = divide(model, "auto", also_meta=True)
        division.set_ranks(ranks)
        every = sum(unit.size_bytes for unit in division.units)
        memory = max(division.smallest()[0], min(every, _UNITS * max(unit.size_bytes for unit in division.units)))
        asked = Asked(
            division=division,
            homes=Homes.of(home),
            memory_bytes=every if home == "host" else memory,
            optimizer=optimizer,
            state_format="fp32",
            state_on_drive=on_drive,
            path=None,
            host_memory=None,
            accumulation=held.accumulation,
            clips=False,
            free=_UNBOUNDED,
            buffer_bytes=held.buffers,
            ranks=ranks,
        )
        if on_drive:
            asked = replace(asked, host_memory=asked.least_host_memory())
        found = asked.plan(has_room=True)
        yield Fit(name, held.with_offload(found), room.bytes, drive_bytes=sum(found.on_drive.values()))
