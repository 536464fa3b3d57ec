# SPDX-License-Identifier: Apache-2.0
"""Says on standard error where an offloaded model's parameters and gradients are, and what is brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat._library.standard_error import stderr
from ziggurat._memory.memory import size_text

if TYPE_CHECKING:
    from ziggurat._optimizer.opened import Opened
    from ziggurat._streaming.streaming import Streaming


def say_where(streaming: Streaming, opened: Opened) -> None:
    in_files = streaming.files.size_bytes
    brought = size_text(streaming.size_bytes + in_files)
    rows = [unit.name for unit in streaming.units if unit.unit.by_rows and not unit.unit.tiles]
    by_rows = f"; of {', '.join(rows)} each batch's rows are read" if rows else ""
    tiled = [f"{unit.name} in {len(unit.unit.tiles)} tiles" for unit in streaming.units if unit.unit.tiles]
    in_tiles = f"; {', '.join(tiled)}, of which one is there at a time" if tiled else ""
    grads = opened.store if opened.sums_in_files else "memory"
    print(
        f"ziggurat: offload(): {len(streaming.units)} units with {brought} of parameters"
        f"{_places(streaming, opened.store, in_files)}: {_brings(streaming, brought)}; gradients are in {grads}{by_rows}{in_tiles}",
        file=stderr(),
    )


def _places(streaming: Streaming, store: str | None, in_files: int) -> str:
    room = f"memory={size_text(streaming.memory_bytes)}"
    if streaming.accelerator is not None:
        room += f" of {streaming.device}"
    home = {"device": room, "host": "host memory"}.get(streaming.tier, store)
    lives = streaming.tier == "device"
    if not in_files:
        return f" are in {home}" + ("" if lives else f", and are brought within {room}")
    kept = (
        f": {size_text(streaming.size_bytes)} are in {home}, and {size_text(in_files)} that are frozen stay in "
        "their own files"
    )
    return kept + ("" if lives else f"; they are brought within {room}")


def _brings(streaming: Streaming, brought: str) -> str:
    if streaming.fits:
        return "there is room for all of them"
    called = ", of experts those that it calls" if any(one.is_expert for one in streaming.division.units) else ""
    return f"a forward brings {brought}{called}, and so does a backward, less what stays"
