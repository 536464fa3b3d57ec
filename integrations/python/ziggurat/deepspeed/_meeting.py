# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the work of a call, which the script may have made on rank 0 alone.

A barrier would wait for ever then. In the job's store each rank says when it begins and how it has
ended, and claims its share of the work. Rank 0 does the share of a rank that does not begin. One
that has begun is waited for as long as it takes; where one fails, all that wait for it raise.
"""

from __future__ import annotations

import datetime
import time
from types import TracebackType
from typing import Any

import torch

from ziggurat._native import Unavailable

_PATIENCE = datetime.timedelta(seconds=10)  # for a rank to begin what rank 0 has begun
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

    def claim(self, rank: int) -> bool:
        """Whether the share of `rank` is the caller's to do."""
        return not self.others or bool(self._store().add(self._key("claimed", rank), 1) == 1)

    def word_of(self, rank: int) -> str | None:
        """None for one that does not begin."""
        there = self._waited("began", rank, _PATIENCE)
        return self._heard("began", rank) if there else None

    def end(self, result: str) -> None:
        """This rank's work is done."""
        self._say("ended", self._rank, result)

    def result_of(self, rank: int) -> str:
        """Once its work is done. Errors: Unavailable where it has failed, in its words."""
        ended = self._waited("ended", rank, _WORK)
        result = self._heard("ended", rank) if ended else f"{_FAILED}it has not ended"
        if result.startswith(_FAILED):
            why = result.removeprefix(_FAILED)
            raise Unavailable(f"{self._call} failed on rank {rank}: {why}")
        return result

    def _waited(self, what: str, rank: int, patience: datetime.timedelta) -> bool:
        until = time.monotonic() + patience.total_seconds()
        while not self._store().check([self._key(what, rank)]):
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
        return torch.distributed.distributed_c10d._get_default_store()
