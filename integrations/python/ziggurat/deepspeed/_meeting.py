# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other in a call that the script may have made on rank 0 alone.

A barrier would wait for ever then. Ranks say in the job's store when they begin the call and how
they have ended it: one that has begun is waited for as long as it takes, one that does not begin is
an error, which names it, and so is one that fails.
"""

from __future__ import annotations

import datetime
from types import TracebackType
from typing import Any

import torch

from ziggurat._native import InvalidArgument, Unavailable

_PATIENCE = datetime.timedelta(seconds=120)  # for a rank to begin what another has begun
_WORK = datetime.timedelta(hours=6)  # for one that has begun: a large state on a slow disk


class Meeting:
    """The ranks inside `call`, which the name of this meeting is used for once.

    Each gives a `word`, which may differ. Rank 0 leaves behind all others' work, they behind its.
    """

    def __init__(
        self, name: str, call: str, word: str = "", patience: datetime.timedelta = _PATIENCE
    ) -> None:
        self._name, self._call, self._patience = name, call, patience
        self._rank = torch.distributed.get_rank()
        self._others = set(range(torch.distributed.get_world_size())) - {self._rank}
        self._say("began", word)

    def __enter__(self) -> Meeting:
        return self

    def wait_for_others(self) -> None:
        """On rank 0, until all others have done their work."""
        self._wait(self._others)

    def words(self) -> dict[int, str]:
        """Those of the others, behind wait_for_others()."""
        return {rank: self._heard("began", rank) for rank in self._others}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._say("ended", "" if error is None else f"{type(error).__name__}: {error}")
        if error is None:
            self._wait(self._others & {0})

    def _wait(self, ranks: set[int]) -> None:
        """Errors: InvalidArgument where a rank has not made the call; Unavailable for one that has
        failed in it."""
        absent = [rank for rank in sorted(ranks) if not self._there("began", rank, self._patience)]
        if absent:
            raise InvalidArgument(
                f"{self._call} was not called by {_list(absent)} within "
                f"{self._patience.total_seconds():.0f} s: call it on all ranks, as each has a part "
                "of the state"
            )
        for rank in sorted(ranks):
            ended = self._there("ended", rank, _WORK)
            failure = self._heard("ended", rank) if ended else "it has not ended"
            if failure:
                raise Unavailable(f"{self._call} failed on rank {rank}: {failure}")

    def _there(self, what: str, rank: int, patience: datetime.timedelta) -> bool:
        try:
            self._store().wait([self._key(what, rank)], patience)
        except RuntimeError:  # the store's word for a time that has passed
            return False
        return True

    def _heard(self, what: str, rank: int) -> str:
        word: bytes = self._store().get(self._key(what, rank))
        return word.decode()

    def _say(self, what: str, word: str) -> None:
        if self._others:
            self._store().set(self._key(what, self._rank), word)

    def _key(self, what: str, rank: int) -> str:
        return f"ziggurat/{self._name}/{what}/{rank}"

    def _store(self) -> Any:
        return torch.distributed.distributed_c10d._get_default_store()


def _list(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
