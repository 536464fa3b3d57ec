# SPDX-License-Identifier: Apache-2.0
"""The ranks that an optimizer's state is divided among, and what they send each other.

Only all-to-all and all-gather carry tensors, and every sum is taken here in the order of ranks: so
results have the same bits whatever carries them.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ziggurat import _native as native
from ziggurat._buffers import Buffers
from ziggurat._native import (
    Exchange,
    InvalidArgument,
    Runtime,
    Unavailable,
    Unimplemented,
    ZigguratError,
)

_PATIENCE = timedelta(minutes=30)  # with a rank that does not come, as torch.distributed has
_ASKS_FOR = 3.0  # seconds: a rank that has ended is known at once
_PARTS_WITHIN = 60.0
_OF_A_PEER = re.compile("gloo|NCCL|peer", re.IGNORECASE)  # what such a call of PyTorch's says
_ALIGNMENT = 64  # elements: a slice begins where a cache line can


class Work(Protocol):
    """A transfer under way; its tensors are its own until wait() returns."""

    def wait(self) -> Any: ...


class Cut:
    """How a parameter of `count` elements is divided: a slice for each rank, in their order."""

    def __init__(self, count: int, ranks: int) -> None:
        self.count = count
        lines = -(-count // (ranks * _ALIGNMENT))
        self.slice = lines * _ALIGNMENT  #: elements of each; the last ones may have fewer, or none

    def of(self, rank: int) -> slice:
        return slice(min(rank * self.slice, self.count), min((rank + 1) * self.slice, self.count))


class Lane:
    """Calls that go in one order on every rank, beside those of other lanes."""

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        """Slice r of `given` goes to rank r; slice r of `output` comes from it."""
        raise NotImplementedError

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        """Slice r of `output` is rank r's `given`."""
        raise NotImplementedError


class _Named:
    """A transfer whose failure says which rank failed in which call."""

    def __init__(self, ranks: Ranks, call: str, works: list[Any]) -> None:
        self._ranks, self._call, self._works = ranks, call, works

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._ranks.lost(self._call, error) from error


class TorchLane(Lane):
    def __init__(self, ranks: Ranks, name: str, group: Any) -> None:
        self._ranks, self._name, self._group = ranks, name, group
        self._members = dist.get_process_group_ranks(group)
        self._calls = 0

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        return self._begun(
            "all-to-all",
            lambda: [dist.all_to_all_single(output, given, group=self._group, async_op=True)],
        )

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        if given.device.type == "cpu":
            return self._begun("all-gather", lambda: self._sent_to_each(output, given))
        return self._begun(
            "all-gather",
            lambda: [dist.all_gather_into_tensor(output, given, group=self._group, async_op=True)],
        )

    def _sent_to_each(self, output: torch.Tensor, given: torch.Tensor) -> list[Any]:
        """gloo's own all-gather makes a copy of the output in each of its threads."""
        self._calls += 1
        rows = output.view(len(self._members), -1)
        works = []
        for row, member in zip(rows, self._members, strict=True):
            if member == dist.get_rank():
                if row.data_ptr() != given.data_ptr():
                    row.copy_(given)
                continue
            works.append(dist.isend(given, member, group=self._group, tag=self._calls))
            works.append(dist.irecv(row, member, group=self._group, tag=self._calls))
        return works

    def _begun(self, call: str, begin: Callable[[], list[Any]]) -> Work:
        call = f"{call} of {self._name}"
        try:
            return _Named(self._ranks, call, begin())
        except RuntimeError as error:
            raise self._ranks.lost(call, error) from error


class EngineLane(Lane):
    """Through the engine's own connections, which carry host memory."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._exchange = Exchange(ranks.runtime, name)
        self._size = ranks.size

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        slice_bytes = given.nbytes // self._size
        ticket = self._exchange.all_to_all(_address(given), _address(output), slice_bytes)
        return _Ticket(ticket, output, given)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        ticket = self._exchange.all_gather(_address(given), _address(output), given.nbytes)
        return _Ticket(ticket, output, given)


class _Ticket:
    def __init__(self, ticket: Any, *kept: torch.Tensor) -> None:
        self._ticket, self._kept = ticket, kept

    def wait(self) -> None:
        self._ticket.finish()


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu":
        raise Unimplemented(
            'exchange="ziggurat" carries only host memory, but parameters are on '
            f'{tensor.device}: give exchange="torch"'
        )
    return tensor.data_ptr()


class Ranks:
    """Those of a ``torch.distributed`` group, this process among them.

    Every rank makes one, with the same group, at the same place in its script.
    """

    def __init__(self, group: Any, threads: int, exchange: str) -> None:
        """`exchange`: what carries tensors, "torch" (the group's own way) or "ziggurat"."""
        if exchange not in ("torch", "ziggurat"):
            raise InvalidArgument(f'exchange="{exchange}": give "torch" or "ziggurat"')
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        self._by_engine = exchange == "ziggurat"
        self.buffers = Buffers()  #: for what is sent and received
        #: For the engines, which agree on every step through it.
        self.runtime = Runtime(threads, self._meeting())
        self._control = Exchange(self.runtime, "control")
        _explain_failures_of(self)
        self._small = self.lane("sums")

    def _meeting(self) -> native.Ranks:
        """Where they find each other: rank 0 says it, through the group that they have already."""

        def meeting() -> tuple[str, str]:
            address = os.environ.get("MASTER_ADDR", "") or socket.gethostname()
            return f"{address}:{_free_port()}", secrets.token_hex(16)

        rendezvous, secret = self.decided(meeting)
        return native.Ranks(
            self.rank, self.size, rendezvous, secret, call_timeout_s=_PATIENCE.total_seconds()
        )

    def lane(self, name: str, members: Sequence[int] | None = None) -> Lane:
        """Among `members` of the job, or all ranks. Every rank makes the same ones in the same
        order. Some of the ranks always go through torch.distributed."""
        members = list(members or self.members)
        if self._by_engine and members == self.members:
            return EngineLane(self, name)
        # A group of its own: its calls may come from another thread than the training loop's.
        group = dist.new_group(members, timeout=_PATIENCE, use_local_synchronization=True)
        return TorchLane(self, name, group)

    def lost(self, call: str, error: Exception) -> Unavailable:
        """torch.distributed tells addresses; the engine's connections know who has ended."""
        why = self.who_ended() or str(error)
        return Unavailable(f"rank {self.rank}: {call} among {self.size} ranks: {why}")

    def who_ended(self) -> str:
        """After a failure: which rank has ended. Empty: none is known to have."""
        return self._meet(_ASKS_FOR)

    def part(self) -> None:
        """Before this rank's engine is closed, of which others may be reading."""
        self._meet(_PARTS_WITHIN)

    def _meet(self, seconds: float) -> str:
        """Waits for all ranks, but no longer; why they do not come, where that is known."""
        known: list[str] = []

        def meet() -> None:
            try:
                self._control.barrier()
            except ZigguratError as error:
                known.append(str(error))

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        meeting.join(seconds)
        return "".join(known)

    def gathered(self, values: Sequence[float]) -> torch.Tensor:
        """[ranks, values] in fp64, alike on every rank."""
        own = torch.tensor(values, dtype=torch.float64)
        every = torch.empty(self.size * len(own), dtype=torch.float64)
        self._small.all_gather(every, own).wait()
        return every.view(self.size, len(own))

    def together(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` gives here, once it has ended on all ranks: one that failed leaves none
        waiting for it. Errors: its own; Unavailable, which says what another rank's was."""
        found, own = None, None
        try:
            found = work()
        except Exception as error:
            own = error
        if self.largest([own is not None]) == [0.0]:
            return found
        words = self.told(None if own is None else f"{type(own).__name__}: {own}")
        if own is not None:
            raise own
        rank = next(rank for rank, text in enumerate(words) if text is not None)
        raise Unavailable(f"{what} was given up, because rank {rank} failed: {words[rank]}")

    def told(self, what: Any) -> list[Any]:
        """What every rank has given, plain data, in their order."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, what, group=self.group)
        return every

    def decided(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 finds, plain data, on all ranks. Errors: its own, on all of them."""
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                told = [(decide(), None)]
            except ZigguratError as error:
                told = [(None, error)]
            except Exception as error:  # the others wait for it
                told = [(None, Unavailable(f"rank {self.members[0]}: {type(error).__name__}: {error}"))]
        dist.broadcast_object_list(told, src=self.members[0], group=self.group)
        found, error = told[0]
        if error is not None:
            raise error
        return found

    def sums(self, values: Sequence[float]) -> torch.Tensor:
        """Of each over the ranks, in their order."""
        every = self.gathered(values)
        total = every[0].clone()
        for of_rank in every[1:]:
            total += of_rank
        return total

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each over the ranks; NaN where one is."""
        found: list[float] = self.gathered(values).amax(0).tolist()
        return found


_known: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _explain_failures_of(ranks: Ranks) -> None:
    """If the process ends because another rank has, in a call that is not ours (FSDP2's, or the
    script's own), adds a line that names the rank."""
    first = not _known
    _known.add(ranks)
    if not first:
        return
    before = sys.excepthook

    def explain(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if isinstance(error, RuntimeError) and _OF_A_PEER.search(str(error)):
            for ranks in list(_known):
                print(f"ziggurat: rank {ranks.rank}: {ranks.who_ended()}", file=sys.stderr)

    sys.excepthook = explain


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
