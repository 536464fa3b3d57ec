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
from typing import Any, NamedTuple

import torch.distributed as dist

from ziggurat._library.standard_error import stderr

_TELLS_AFTER = 1.0  # seconds of waiting
_LOOKS_EVERY = 0.5  # seconds
_SAYS_AFTER = 30.0  # seconds of waiting
_JOINED = "(joined)"  # how many have


class Call(NamedTuple):
    """One of the calls that all ranks make in the same order."""

    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.what} (number {self.number})"


class RankWatch:
    """What this rank's script waits for, and who looks at what all ranks wait for. All that the ranks of a
    group have among themselves share one."""

    def __init__(self, rank: int, size: int, told: dist.Store) -> None:
        """`told`: where all ranks tell what they wait for."""
        self._rank, self._size, self._told = rank, size, told
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()
        self._waits: dict[int, tuple[Call, float]] = {}  # by thread: since when
        self._newest: int | None = None  # the thread that has begun a call last
        self._users: dict[object, Callable[[str], None]] = {}
        self._said: set[Call] = set()
        self.failed: str | None = None  #: why this rank's calls fail
        self._closed = threading.Event()
        self._told.set(str(rank), "")
        threading.Thread(target=self._look, name="ziggurat-watch", daemon=True).start()

    def join(self, user: object, end: Callable[[str], None]) -> int:
        """Adds what makes calls. `end(words)` makes those of all ranks fail. Returns a number that is the same
        on all ranks if they join alike."""
        with self._lock:
            self._users[user] = end
            self._begun[_JOINED] += 1
            return self._begun[_JOINED]

    def leave(self, user: object) -> None:
        """Ends the watch when nobody makes calls any more."""
        with self._lock:
            self._users.pop(user, None)
            if not self._users:
                self._closed.set()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def begin(self, what: str, beside: bool = False) -> Call:
        """Notes that this rank begins a call that all ranks make, in the script or `beside` it."""
        with self._lock:
            self._begun[what] += 1
            if not beside:
                self._newest = threading.get_ident()
            return Call(what, self._begun[what])

    @contextlib.contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Tells within that this thread waits in the call."""
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

    def _own(self) -> str:
        """Returns what this rank tells: nothing while its script does not wait. The script is in the thread
        that has begun a call last: main, or one that works for it while it waits."""
        with self._lock:
            waits = None if self._newest is None else self._waits.get(self._newest)
            waited = 0.0 if waits is None else time.monotonic() - waits[1]
            if waits is None or waited < _TELLS_AFTER:
                return ""
            call = waits[0]
            says = waited > _SAYS_AFTER and call not in self._said
            self._said.update([call] if says else [])
            text = json.dumps([call, self._begun])
        if says:
            print(
                f"ziggurat: rank {self._rank} has waited {_SAYS_AFTER:.0f} s for other ranks, in {call.what}",
                file=stderr(),
            )
        return text

    def _look(self) -> None:
        told, before = "", [""]
        # Ends where the rank that keeps what is told has ended: the engines know that by themselves.
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(_LOOKS_EVERY):
                own = self._own()
                if own != told:
                    self._told.set(str(self._rank), own)
                told = own
                every = self._every() if own else [""]
                if "" not in every and every == before and (words := _parted(every)):
                    self._fail(words)
                    return
                before = every

    def _fail(self, words: str) -> None:
        self.failed = words
        with self._lock:
            users = list(self._users.values())
        for end in users:
            end(words)

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
