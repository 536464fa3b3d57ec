# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that wait for each other in different calls, which would be for ever.

Every call that all ranks make has a name and a number. A rank whose script has waited in one for a while tells the
others which, and how many calls of each name it has begun. If all ranks wait, and each waits for a call that another one
has not begun, none of them will ever come: then all of their calls fail, with words that say who waits where.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

_TELLS_AFTER = 1.0  # seconds of waiting
_LOOKS_EVERY = 0.5  # seconds


class Call(NamedTuple):
    """One of the calls that all ranks make in the same order."""

    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.what} (number {self.number})"


class RankWatch:
    """What this rank's script waits for, and who looks at what all ranks wait for."""

    def __init__(
        self, rank: int, size: int, address: tuple[str, int], end: Callable[[str], None]
    ) -> None:
        """`address`: where rank 0 keeps what ranks tell. `end(words)` makes the calls of all ranks fail."""
        self._rank, self._size, self._end = rank, size, end
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()
        self._waits: dict[int, tuple[Call, float]] = {}  # by thread: since when
        self.failed: str | None = None  #: why this rank's calls fail
        self._closed = threading.Event()
        host, port = address
        self._told = dist.TCPStore(
            host, port, size, rank == 0, timeout=timedelta(minutes=5), wait_for_workers=False
        )
        self._told.set(str(rank), "")
        threading.Thread(target=self._look, name="ziggurat-watch", daemon=True).start()

    def begin(self, what: str) -> Call:
        """Notes that this rank begins a call that all ranks make."""
        with self._lock:
            self._begun[what] += 1
            return Call(what, self._begun[what])

    @contextlib.contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Tells within that the script waits in the call."""
        thread = threading.get_ident()
        with self._lock:
            before = self._waits.get(thread)
            self._waits[thread] = (call, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                if before is None:
                    del self._waits[thread]
                else:
                    self._waits[thread] = before

    def close(self) -> None:
        self._closed.set()

    def _own(self) -> str:
        """Returns what this rank tells: nothing while its script does not wait."""
        with self._lock:
            main = self._waits.get(threading.main_thread().ident or 0)
            if main is None or time.monotonic() - main[1] < _TELLS_AFTER:
                return ""
            return json.dumps([main[0], self._begun])

    def _look(self) -> None:
        told, before = "", [""]
        # Ends where rank 0, which keeps what is told, has ended: the engines know that by themselves.
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(_LOOKS_EVERY):
                own = self._own()
                if own != told:
                    self._told.set(str(self._rank), own)
                told = own
                every = self._every() if own else [""]
                if "" not in every and every == before and (words := _parted(every)):
                    self.failed = words
                    self._end(words)
                    return
                before = every

    def _every(self) -> list[str]:
        keys = [str(rank) for rank in range(self._size)]
        if not self._told.check(keys):
            return [""]
        return [self._told.get(key).decode() for key in keys]


def _parted(every: list[str]) -> str:
    """Returns who waits where, if each rank waits for a call that another one has not begun, or an empty
    text."""
    found: list[tuple[Call, dict[str, int]]] = []
    for text in every:
        given: Any = json.loads(text)
        found.append((Call(*given[0]), given[1]))
    stuck = all(
        any(begun.get(call.what, 0) < call.number for _, begun in found) for call, _ in found
    )
    if not stuck:
        return ""
    where = ", ".join(f"rank {rank} in {call}" for rank, (call, _) in enumerate(found))
    return f"the ranks have parted ways and wait for each other: {where}; make the same calls on all ranks"
