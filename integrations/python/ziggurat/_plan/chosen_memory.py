# SPDX-License-Identifier: Apache-2.0
"""Asks the planner (core/plan/auto_ways.h) what offload() and its optimizer leave to "auto": the memory for
units, where parameters, gradients and state are, and the state's host_memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ziggurat._exchange.exchange import BUCKET_BYTES
from ziggurat._library.native import MemoryChoice, ResourceExhausted, choose_memory
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.file_memory import LARGE_BYTES
from ziggurat._memory.placement import AUTO, Homes, sums_bytes

if TYPE_CHECKING:
    from ziggurat._plan.asked import Asked


class Given(NamedTuple):
    """What is given by hand."""

    memory: int | None  #: for units
    homes: Homes
    state: str  #: "host" or "nvme", or AUTO
    has_folder: bool = False  #: whether parameters and gradients have a directory where the state has none


def memory_choice(asked: Asked, given: Given) -> MemoryChoice:
    """Returns the choice for a run whose memory for units and placement `asked` does not yet know. Where nothing
    fits, rows of tables are read where they lie, the largest table's first. Errors: ResourceExhausted."""
    division, by_rows = asked.division, 0
    while True:
        division.require(math.inf, own_blocks=has_codes(asked.state_format))
        try:
            choice = choose_memory(asked.listed(), _settings(asked, given), _facts(asked, given))
            return replace(choice, tables_by_rows=by_rows)
        except ResourceExhausted:
            if not division.read_a_table_by_rows():
                raise
            by_rows += 1


def _settings(asked: Asked, given: Given) -> dict[str, Any]:
    settings = asked.engine_settings()
    if given.state != "host" and (asked.path is not None or asked.state_on_drive):
        settings["store"] = asked.path or "."
    if asked.host_memory is not None:
        settings["host_memory"] = asked.host_memory
    return settings


def _in_place(asked: Asked) -> dict[str, int]:
    """Returns what tables by rows and layers in tiles take, which are used where they are kept."""
    found = {"in_place_bytes": 0, "in_place_moved_bytes": 0, "in_place_gradient_bytes": 0}
    for unit in asked.division.units:
        for _, param in unit.params if unit.by_rows else ():
            if param in unit.in_files:
                continue
            is_large, trained = param.nbytes >= LARGE_BYTES, unit.trains(param)
            passes = 2 if unit.tiles and is_large else 0  # of rows, few are read
            found["in_place_bytes"] += param.nbytes
            found["in_place_moved_bytes"] += (passes + 2 * trained) * param.nbytes
            found["in_place_gradient_bytes"] += sums_bytes([param]) if trained and is_large else 0
    return found


def _facts(asked: Asked, given: Given) -> dict[str, Any]:
    division = asked.division
    parts = [part for unit in division.units for part in unit.parts()]
    gradients = sums_bytes(param for _, param in asked.trained()) // asked.ranks
    added = sum(param.nbytes for _, param in asked.added)
    facts: dict[str, Any] = {
        "units_least_bytes": division.smallest()[0],
        "units_all_bytes": division.ample_bytes,
        "brought_bytes": sum(part.whole_bytes for part in parts if not part.by_rows),
        "live_there": asked.ranks == 1,
        "has_folder": given.has_folder,
        "gradient_bytes": gradients + (2 * BUCKET_BYTES if asked.ranks * asked.replicas > 1 else 0),
        "beside_bytes": asked.buffer_bytes + asked.activation_bytes + added,
        "free_bytes": asked.free - asked.here,
        "here_bytes": asked.here,
        "node_ranks": asked.ranks * asked.replicas,  # where no launcher has told, all may be here
    } | _in_place(asked)
    by_hand = {
        "memory": given.memory,
        "params": None if given.homes.params == AUTO else given.homes.params,
        "grads": given.homes.grads,
        "optimizer": None if given.state == AUTO else given.state,
    }
    return facts | {name: value for name, value in by_hand.items() if value is not None}
