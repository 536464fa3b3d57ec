# SPDX-License-Identifier: Apache-2.0
"""Ranks in a call that the script may have made on rank 0 alone.

A barrier would wait for ever then. In the job's store each rank says when it begins and how it has
ended. Rank 0 looks who begins, and decides what all that do are to do. One that has begun is waited
for as long as it takes; where one fails, all that wait for it raise.
"""

from __future__ import annotations

import datetime
import time
from types import TracebackType
from typing import Any

import torch

from ziggurat._native import Unavailable

_PATIENCE = datetime.timedelta(seconds=10)  # for ranks to begin what rank 0 has begun
_LONG_PATIENCE = datetime.timedelta(minutes=30)  # where none can be done without
_WORK = datetime.timedelta(hours=6)  # for one that has begun: a large state on a slow disk
_PAUSE = 0.02  # seconds between two looks: the store's own wait prints a warning when it ends
_FAILED = "failed: "


class Meeting:
    """The ranks inside `call`; `name` is the same on all, and used once. Words may differ."""

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
        """Of the other ranks that begin now."""
        until = time.monotonic() + _PATIENCE.total_seconds()
        there = [rank for rank in self.others if self._waited(until, ("began", rank))]
        return {rank: self._heard("began", rank) for rank in there}

    def words_of_all(self) -> dict[int, str]:
        """Of all other ranks. Errors: Unavailable where some do not begin."""
        until = time.monotonic() + _LONG_PATIENCE.total_seconds()
        absent = [rank for rank in self.others if not self._waited(until, ("began", rank))]
        if absent:
            raise Unavailable(
                f"{self._call}: the ranks {absent} have not called it within "
                f"{_LONG_PATIENCE.total_seconds():g} s, but all have to where each host keeps "
                "files of its own: call it on every rank, or leave "
                "`checkpoint.use_node_local_storage` out"
            )
        return {rank: self._heard("began", rank) for rank in self.others}

    def decide(self, what: str) -> None:
        """Rank 0's."""
        self._say("decided", self._rank, what)

    def decision(self) -> str:
        """What rank 0 decides, once it has. Errors: Unavailable where it fails before."""
        self._reached("decided", 0)
        return self._heard("decided", 0)

    def prepared(self) -> None:
        """This rank's work is done, but for its last step, which waits for the others'."""
        self._say("prepared", self._rank, "")

    def wait_prepared(self, rank: int) -> None:
        """Errors: Unavailable where it fails before."""
        self._reached("prepared", rank)

    def _reached(self, what: str, rank: int) -> None:
        until = time.monotonic() + _WORK.total_seconds()
        self._waited(until, (what, rank), ("ended", rank))
        if not self._store().check([self._key(what, rank)]):
            self.result_of(rank)

    def end(self, result: str) -> None:
        """This rank's work is done."""
        self._say("ended", self._rank, result)

    def result_of(self, rank: int) -> str:
        """Once its work is done. Errors: Unavailable where it has failed, in its words."""
        until = time.monotonic() + _WORK.total_seconds()
        ended = self._waited(until, ("ended", rank))
        result = self._heard("ended", rank) if ended else f"{_FAILED}it has not ended"
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
    """`word` of this rank's, once; the same `what` on all."""
    _store().set(f"ziggurat/{what}/{torch.distributed.get_rank()}", word)


def told(what: str) -> list[str]:
    """What each rank tells, once all have."""
    keys = [f"ziggurat/{what}/{rank}" for rank in range(torch.distributed.get_world_size())]
    return [_store().get(key).decode() for key in keys]


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
