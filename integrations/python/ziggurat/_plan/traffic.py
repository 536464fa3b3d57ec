# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a step of an offloaded model moves, by what they are and in which direction.

In a forward and in a backward each unit is brought, but for those that the pass before has left in
`memory`. A step leaves none of what is trained, since it changes it. The optimizer's records are written
in each step, and read unless they stay in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ziggurat._library.packing import TILE, staggered
from ziggurat._memory.file_memory import LARGE_BYTES
from ziggurat._units.units import ROOT, Division, Unit, UnitPart

# What makes a step durable (tiers/store/store_layout.h): a page of 4096 for each of two superblocks and the
# blob, and a table of 16 bytes a record in regions of 64 KiB.
_SEAL_BYTES, _ENTRY_BYTES, _REGION_BYTES = 3 * 4096, 16, 64 << 10


@dataclass(frozen=True)
class Settings:
    """All on which the bytes of a step depend, beside the division into units."""

    memory_bytes: int
    params_on_drive: bool
    live_in_units: bool  #: whether parameters live in `memory_bytes`, so that none are brought
    grads_on_drive: bool
    grads_are_sums: bool  #: whether a gradient is the ranks' sum, in fp32, from the first backward on
    accumulation: int  #: backwards in a step
    clips: bool  #: whether the norm of all gradients is asked for
    recomputes: bool  #: whether a backward computes forwards again, as gradient checkpointing does


@dataclass(frozen=True)
class State:
    """The optimizer's records on the drive."""

    bytes: int
    count: int
    read_bytes: int  #: what a step reads of them


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a step moves. All but what is brought, and what comes from other ranks, cross the
    drive."""

    brought_forward: int = 0  #: parameters, in all forwards of the step, from where the engine keeps them
    brought_backward: int = 0
    frozen_read_forward: int = 0  #: of frozen parameters that stay in their own files, at most
    frozen_read_backward: int = 0
    params_read_forward: int = 0  #: of these, from the drive
    params_read_backward: int = 0
    params_read_update: int = 0  #: read by the update: records that several parameters share
    params_written: int = 0
    state_read: int = 0
    state_written: int = 0  #: with what makes the step durable
    grads_read_backward: int = 0  #: sums of earlier backwards, and what clipping reads
    grads_written: int = 0
    grads_read_update: int = 0
    params_from_ranks: int = 0  #: what other ranks give of parameters for all forwards and backwards, without hpz
    grads_from_ranks: int = 0  #: what other ranks send of gradients

    @property
    def read(self) -> int:
        """Returns what comes from the drive."""
        return sum(getattr(self, one.name) for one in fields(self) if "_read" in one.name)

    @property
    def written(self) -> int:
        """Returns what goes to the drive."""
        return sum(getattr(self, one.name) for one in fields(self) if "_written" in one.name)

    @property
    def in_forward(self) -> int:
        """Returns what the forwards move over the drive."""
        return self.params_read_forward + self.frozen_read_forward

    @property
    def in_backward(self) -> int:
        params = self.params_read_backward + self.frozen_read_backward
        return params + self.grads_read_backward + self.grads_written

    @property
    def in_update(self) -> int:
        return self.read + self.written - self.in_forward - self.in_backward


def step_bytes(
    division: Division, added: Sequence[UnitPart], settings: Settings, state: State | None
) -> StepBytes:
    """Returns the most that a step moves once the first three have been made; `state` is None for
    a state in memory. `added` are trained beside the units. What a run moves is less by
    some pieces of parameters, as they happen to fit into `memory`, and by experts that no batch calls."""
    entries = [part for entry in division.entries for unit in entry.units for part in unit.parts()]
    uses = [part for part in entries if not part.by_rows]
    trained = [part for part in dict.fromkeys(entries) if part.trained]
    forward, backward = _brought(division, uses, settings)
    frozen_forward, frozen_backward = _read_frozen(division, settings)
    step = StepBytes(forward, backward, frozen_forward, frozen_backward)
    step = replace(step, **_grads([*trained, *added], settings))
    if state is not None:
        table = math.ceil(_ENTRY_BYTES * state.count / _REGION_BYTES) * _REGION_BYTES
        step = replace(step, state_read=state.read_bytes, state_written=state.bytes + table + _SEAL_BYTES)
    if not settings.params_on_drive:
        return step
    tiles = _read_tiles(division, settings, in_own_files=False)
    # Each rank reads its own slices, once for all ranks that use a unit about the same time.
    own, whole = _home(dict.fromkeys(uses)), _whole(dict.fromkeys(uses))
    return replace(
        step,
        params_read_forward=forward * own // max(1, whole) + tiles,
        params_read_backward=backward * own // max(1, whole) + tiles,
        # The kernel reads a page of a table before a part of it is written.
        params_read_update=_home(part for part in trained if part.members > 1 or part.by_rows),
        params_written=_home(trained),
    )


def _home(parts: Iterable[UnitPart]) -> int:
    return sum(part.home_bytes for part in parts)


def _whole(parts: Iterable[UnitPart]) -> int:
    return sum(part.whole_bytes for part in parts)


def _brought(
    division: Division, uses: Sequence[UnitPart], settings: Settings
) -> tuple[int, int]:
    """Returns what all forwards bring, and all backwards. `uses` are a forward's, in their order: of a
    unit that several modules share there are several, between which it may have gone."""
    if settings.live_in_units:
        return 0, 0
    parts = list(dict.fromkeys(uses))
    engine_bytes = division.share_of_engine(settings.memory_bytes)
    sizes = {unit: sum(unit.pieces()) for unit in division.units}  # without what stays in files
    if sum(sizes.values()) <= engine_bytes:
        return _whole(part for part in parts if part.trained), 0
    room = _room(sizes, engine_bytes)
    front = _left(parts, room)  # what a forward finds when a backward has ended
    back = _left(list(dict.fromkeys(reversed(uses))), room)
    experts = _whole(part for unit in division.units if unit.is_expert for part in unit.parts())
    # In a pass those that are called, and those that are brought ahead and not called, are different
    # ones. A few give way before they are called, and are read again.
    guessed = experts // 8
    missed = _whole(uses) - _whole(front) + guessed
    backward = _whole(uses) - _whole(back) + guessed
    if settings.recomputes:  # which finds a block there, but calls its experts before their backward
        backward += experts + guessed
    # The step has dropped all that it has changed.
    first = _whole(uses) - _whole(part for part in front if not part.trained) + guessed
    again = settings.accumulation - 1
    return first + again * missed, (again + 1) * backward


def _read_frozen(division: Division, settings: Settings) -> tuple[int, int]:
    """Returns what all forwards and all backwards read of frozen parameters in their own files, of which
    nothing stays from one use to the next unless there is room for all units."""
    tiles = _read_tiles(division, settings, in_own_files=True)
    if division.fits(settings.memory_bytes):
        return tiles, tiles
    uses = [unit for entry in division.entries for unit in entry.units if not unit.tiles]
    once = sum(unit.bytes_in_files for unit in uses)
    experts = sum(unit.bytes_in_files for unit in uses if unit.is_expert) if settings.recomputes else 0
    return settings.accumulation * once + tiles, settings.accumulation * (once + experts) + tiles


def _read_tiles(division: Division, settings: Settings, in_own_files: bool) -> int:
    """Returns what all forwards read of linear layers in tiles, and so do all backwards, at most: of those that
    stay in their own files, or of the others, which are in a file if they are large."""
    found = 0
    for unit in division.units:
        if not unit.tiles or (unit.weight in unit.in_files) != in_own_files:
            continue
        if unit.weight.nbytes >= LARGE_BYTES and not division.keeps_tiles(unit, settings.memory_bytes):
            found += settings.accumulation * unit.weight.nbytes
    return found


def _room(sizes: Mapping[Unit, int], engine_bytes: int) -> int:
    """Returns how much of the engine's memory, in which units take `sizes`, is sure to hold what was used
    last when the next pass begins. One piece may find no place between others. Beside less than three units
    what is brought ahead may take all places, and then everything is dropped. What stays of experts, nobody
    knows."""
    if any(unit.is_expert for unit in sizes):
        return 0
    root = sum(its for unit, its in sizes.items() if unit.name == ROOT)
    largest = max((its for unit, its in sizes.items() if unit.name != ROOT), default=0)
    if engine_bytes < root + 3 * largest:
        return 0
    pieces = [piece for unit in sizes for piece in unit.pieces()]
    return engine_bytes - max(pieces)


def _left(parts: Sequence[UnitPart], room: int) -> list[UnitPart]:
    """Returns the parts that stay, which are the first for which there is room."""
    left = []
    for part in parts:
        size_bytes = staggered(part.whole_bytes)
        if size_bytes <= room:
            left.append(part)
            room -= size_bytes
    return left


def _grads(trained: Sequence[UnitPart], settings: Settings) -> dict[str, int]:
    """Returns what gradients in files move. Small ones stay in memory."""
    if not settings.grads_on_drive:
        return {}
    large = [part for part in trained if part.members == 1 and part.elements >= TILE]
    sums = sum(4 * TILE * part.tiles for part in large)
    own = sums if settings.grads_are_sums else _home(large)
    added = settings.accumulation - 1  # the first backward's is written as it is
    newest = sums if added else own
    return {
        "grads_written": own + added * sums,
        "grads_read_backward": (own + (added - 1) * sums if added else 0)
        + (newest if settings.clips else 0),
        "grads_read_update": newest,
    }
