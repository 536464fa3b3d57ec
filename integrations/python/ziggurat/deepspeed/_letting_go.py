# SPDX-License-Identifier: Apache-2.0
"""An optimizer gives its state up for one that is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ziggurat._optimizer import EngineOptimizer


@contextlib.contextmanager
def or_lost(optimizer: EngineOptimizer) -> Iterator[None]:
    """Where a state was given up and the new one does not come, nothing is trained any more: a step
    that began anew would train something else."""
    had_one, to_load = bool(optimizer._opened), dict(optimizer._to_load)
    try:
        yield
    except BaseException:
        if not had_one and not optimizer._opened:
            optimizer._to_load = to_load
            raise
        for opened in optimizer._opened:
            with contextlib.suppress(Exception):  # that of `yield` says why
                opened.close()
        _forget(optimizer)
        optimizer._lost = True
        raise


def _forget(optimizer: EngineOptimizer) -> None:
    optimizer._opened.clear()
    optimizer._opened_with.clear()
    optimizer._to_load.clear()


def let_go(optimizer: EngineOptimizer, call: str) -> None:
    """It has no state any more, on a drive neither. A call of all ranks."""
    stores = [opened.store for opened in optimizer._opened if opened.store is not None]

    def close() -> None:
        for opened in optimizer._opened:
            opened.close()
        _forget(optimizer)

    def remove() -> None:
        for store in stores:
            for file in Path(store).glob("rank*.ziggurat"):
                file.unlink(missing_ok=True)

    optimizer._sharing.together(call, close)  # by all, of what may be in one directory
    optimizer._sharing.together(call, remove)
