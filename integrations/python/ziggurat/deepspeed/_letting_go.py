# SPDX-License-Identifier: Apache-2.0
"""Gives up an optimizer's state for a state that is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ziggurat._optimizer.optimizer import EngineOptimizer


@contextlib.contextmanager
def or_lost(optimizer: EngineOptimizer) -> Iterator[None]:
    """Marks the optimizer as lost if its state was given up and the new one could not be loaded,
    because a step that started from the beginning would train something else."""
    had_one, to_load = bool(optimizer._opened), dict(optimizer._to_load)
    try:
        yield
    except BaseException:
        if not had_one and not optimizer._opened:
            optimizer._to_load = to_load
            raise
        for opened in optimizer._opened:
            with contextlib.suppress(Exception):  # the caller's error says why
                opened.close()
        _forget(optimizer)
        optimizer._lost = True
        raise


def _forget(optimizer: EngineOptimizer) -> None:
    optimizer._opened.clear()
    optimizer._opened_with.clear()
    optimizer._to_load.clear()


def let_go(optimizer: EngineOptimizer, call: str) -> None:
    """Removes the optimizer's state, from a drive too: the next step starts from the beginning. All
    ranks call this."""
    stores = [opened.store for opened in optimizer._opened if opened.store is not None]

    def give_back() -> None:
        for opened in optimizer._opened:
            opened.give_back()

    def close() -> None:
        for opened in optimizer._opened:
            opened.close()
        _forget(optimizer)

    def remove() -> None:
        for store in stores:
            for file in Path(store).glob("rank*.ziggurat"):
                file.unlink(missing_ok=True)

    # Ranks read slices of each other's engines. And all close their stores first, because these may be in one
    # directory.
    optimizer._sharing.together(call, give_back)
    optimizer._sharing.together(call, close)
    optimizer._sharing.together(call, remove)
