# SPDX-License-Identifier: Apache-2.0
"""Brings ranks together in a call that the script may have made on rank 0 alone.

A barrier would then wait for ever. Instead each rank writes into the job's store that it has
begun, and how it has ended. Rank 0 looks which ranks begin, and decides what all of these do. A
rank that has begun is waited for as long as it needs. If one rank fails, all ranks that wait for
it raise.
"""

from __future__ import annotations

import datetime
import time
from types import TracebackType
from typing import Any

import torch

from ziggurat._library.native import Unavailable

_PATIENCE = datetime.timedelta(seconds=10)  # how long rank 0 waits for others to begin
_LONG_PATIENCE = datetime.timedelta(minutes=30)  # the same where every rank has to begin
# limit of a save or load, long enough for a large state on a slow disk
_WORK = datetime.timedelta(hours=6)
# seconds between two looks; the store's own wait would print a warning when it times out
_PAUSE = 0.02
_FAILED = "failed: "


class Meeting:
    """The ranks inside `call`. `name` is the same on all ranks, and used once; each rank gives its
    own `word`."""

    def __init__(self, name: str, call: str, word: str) -> None:
        self._name, self._call = name, call
        self._rank = torch.distributed.get_rank()
        self.others = sorted(set(range(torch.distributed.get_world_size())) - {self._rank})
        self._say("began", self._rank, word)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(f"{_FAILED}{type(error).__name__}: {error}")

    def words(self) -> dict[int, str]:
        """Returns the words of the other ranks that begin now."""
        until = time.monotonic() + _PATIENCE.total_seconds()
        there = [rank for rank in self.others if self._waited(until, ("began", rank))]
        return {rank: self._heard("began", rank) for rank in there}

    def words_of_all(self) -> dict[int, str]:
        """Returns the words of all other ranks. Errors: Unavailable if some rank does not begin."""
        until = time.monotonic() + _LONG_PATIENCE.total_seconds()
        absent = [rank for rank in self.others if not self._waited(until, ("began", rank))]
        if absent:
            raise Unavailable(
                f"{self._call}: the ranks {absent} have not called it within "
                f"{_LONG_PATIENCE.total_seconds():g} s, but all ranks must call it if each host "
                "keeps files of its own: call it on every rank, or leave "
                "`checkpoint.use_node_local_storage` out"
            )
        return {rank: self._heard("began", rank) for rank in self.others}

    def decide(self, what: str) -> None:
        """Tells the other ranks what rank 0 decided."""
        self._say("decided", self._rank, what)

    def decision(self) -> str:
        """Returns what rank 0 decides, once it has. Errors: Unavailable if rank 0 fails before
        that."""
        self._reached("decided", 0)
        return self._heard("decided", 0)

    def prepared(self) -> None:
        """Tells the other ranks that this rank has done all its work but the last step."""
        self._say("prepared", self._rank, "")

    def wait_prepared(self, rank: int) -> None:
        """Waits until `rank` is prepared. Errors: Unavailable if it fails before that."""
        self._reached("prepared", rank)

    def _reached(self, what: str, rank: int) -> None:
        until = time.monotonic() + _WORK.total_seconds()
        self._waited(until, (what, rank), ("ended", rank))
        if not self._store().check([self._key(what, rank)]):
            self.result_of(rank)

    def end(self, result: str) -> None:
        """Tells that this rank's work is done."""
        self._say("ended", self._rank, result)

    def result_of(self, rank: int) -> str:
        """Returns a rank's result, once its work is done. Errors: Unavailable, with that rank's
        error, if it failed."""
        until = time.monotonic() + _WORK.total_seconds()
        ended = self._waited(until, ("ended", rank))
        late = f"{_FAILED}the rank did not finish within {_WORK}"
        result = self._heard("ended", rank) if ended else late
        if result.startswith(_FAILED):
            why = result.removeprefix(_FAILED)
            raise Unavailable(f"{self._call} failed on rank {rank}: {why}")
        return result

    def _waited(self, until: float, *any_of: tuple[str, int]) -> bool:
        keys = [self._key(*one) for one in any_of]
        while not any(self._store().check([key]) for key in keys):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE)
        return True

    def _heard(self, what: str, rank: int) -> str:
        word: bytes = self._store().get(self._key(what, rank))
        return word.decode()

    def _say(self, what: str, rank: int, word: str) -> None:
        if self.others:
            self._store().set(self._key(what, rank), word)

    def _key(self, what: str, rank: int) -> str:
        return f"ziggurat/{self._name}/{what}/{rank}"

    def _store(self) -> Any:
        return _store()


def tell(what: str, word: str) -> None:
    """Tells the other ranks this rank's `word`, once for each `what`. All ranks give the same
    `what`."""
    _store().set(f"ziggurat/{what}/{torch.distributed.get_rank()}", word)


def told(what: str) -> list[str]:
    """Returns what each rank tells, once all have told it."""
    keys = [f"ziggurat/{what}/{rank}" for rank in range(torch.distributed.get_world_size())]
    return [_store().get(key).decode() for key in keys]


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
