# SPDX-License-Identifier: Apache-2.0
"""The ranks among which an optimizer's state is divided, and what they send each other.

Only all-to-all and all-gather carry tensors. Every sum is computed here, in the order of ranks, so
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
from ziggurat._standard_error import stderr

_PATIENCE = timedelta(minutes=30)  # how long to wait for a rank, as torch.distributed does
_ASKS_FOR = 3.0  # seconds; a rank that has ended is known at once
# what PyTorch's errors say if another rank has ended
_OF_A_PEER = re.compile("gloo|NCCL|peer", re.IGNORECASE)
_LINE = 64  # elements: a slice begins where a cache line can begin
#: Elements with one scale in 8 bits (kEightBitBlock of the engine): slices of whole blocks can be
#: divided among other ranks without changing a bit.
BLOCK = 256


class Work(Protocol):
    """A transfer in progress, which owns its tensors until wait() returns."""

    def wait(self) -> Any: ...


class Cut:
    """Divides a parameter of `count` elements into a slice for each rank, in the ranks' order."""

    def __init__(self, count: int, ranks: int, line: int = _LINE) -> None:
        self.count = count
        lines = -(-count // (ranks * line))
        #: elements of a slice; the last slices may have fewer, or none
        self.slice = lines * line

    def of(self, rank: int) -> slice:
        return slice(min(rank * self.slice, self.count), min((rank + 1) * self.slice, self.count))


class Lane:
    """A sequence of calls in the same order on every rank, independent of other lanes."""

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        """Sends slice r of `given` to rank r, and receives slice r of `output` from rank r."""
        raise NotImplementedError

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        """Gathers each rank's `given` into `output`: slice r is rank r's."""
        raise NotImplementedError


class _Named:
    """A transfer whose failure tells which rank failed in which call."""

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
        """Sends to each rank directly, because gloo's own all-gather copies the output in each of
        its threads."""
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
    """Sends through the engine's own connections, which carry host memory alone."""

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


def _handles_an_error() -> bool:
    """Returns whether the caller's rank may be the only one that ends. A signal, the end of an
    iterator and an exit without an error come to all ranks, of which one may then be saving."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu":
        raise Unimplemented(
            'exchange="ziggurat" carries only host memory, but parameters are on '
            f'{tensor.device}: give exchange="torch"'
        )
    return tensor.data_ptr()


class Ranks:
    """The ranks of a ``torch.distributed`` group, of which this process is one.

    Every rank makes one, with the same group, at the same place in its script.
    """

    def __init__(self, group: Any, threads: int, exchange: str) -> None:
        """`exchange` chooses what carries tensors: "torch" (the group's own way) or "ziggurat"."""
        if exchange not in ("torch", "ziggurat"):
            raise InvalidArgument(f'exchange="{exchange}": give "torch" or "ziggurat"')
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.line = _LINE  #: slices begin at multiples of so many elements
        self.members = dist.get_process_group_ranks(group)
        self._by_engine = exchange == "ziggurat"
        self.buffers = Buffers()  #: buffers for what is sent and received
        #: The engines' runtime. Through it the engines agree on every step.
        self.runtime = Runtime(threads, self._meeting())
        self._control = Exchange(self.runtime, "control")
        _explain_failures_of(self)
        self._small = self.lane("sums")

    def _meeting(self) -> native.Ranks:
        """Returns where the engines' ranks find each other; rank 0 tells the others through
        `group`."""

        def meeting() -> tuple[str, str]:
            address = os.environ.get("MASTER_ADDR", "") or socket.gethostname()
            return f"{address}:{_free_port()}", secrets.token_hex(16)

        rendezvous, secret = self.decided(meeting)
        return native.Ranks(
            self.rank, self.size, rendezvous, secret, call_timeout_s=_PATIENCE.total_seconds()
        )

    def cut(self, count: int) -> Cut:
        """Returns how a parameter of `count` elements is divided among the ranks."""
        return Cut(count, self.size, self.line)

    def lane(self, name: str, members: Sequence[int] | None = None) -> Lane:
        """Makes a lane among `members`, or among all ranks. Every rank makes the same lanes in the
        same order. A lane of some ranks alone always uses torch.distributed."""
        members = list(members or self.members)
        if self._by_engine and members == self.members:
            return EngineLane(self, name)
        # The lane has its own group, because another thread than the training loop's may call it.
        group = dist.new_group(members, timeout=_PATIENCE, use_local_synchronization=True)
        return TorchLane(self, name, group)

    def lost(self, call: str, error: Exception) -> Unavailable:
        """Makes an error that names the rank that has ended. torch.distributed knows only
        addresses, but the engine's connections know ranks."""
        why = self.who_ended() or str(error)
        return Unavailable(f"rank {self.rank}: {call} among {self.size} ranks failed: {why}")

    def who_ended(self) -> str:
        """Returns after a failure which rank has ended; empty if no rank is known to have ended."""
        return self._meet(_ASKS_FOR)

    def part(self) -> None:
        """Waits for all ranks before this rank's engine is closed, because others may be reading
        from it. Waits only seconds while the caller handles an error, because then the others may
        be waiting for this rank, and hear of it only when its engine is closed."""
        self._meet(_ASKS_FOR if _handles_an_error() else _PATIENCE.total_seconds())

    def _meet(self, seconds: float) -> str:
        """Waits for all ranks, at most for `seconds`. Returns why they do not come, if that is
        known."""
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

    def meet(self, what: str) -> None:
        """Waits for all ranks at `what`."""
        self.gathered([0.0])

    def gathered(self, values: Sequence[float]) -> torch.Tensor:
        """Returns [ranks, values] in fp64, the same on every rank."""
        own = torch.tensor(values, dtype=torch.float64)
        every = torch.empty(self.size * len(own), dtype=torch.float64)
        self._small.all_gather(every, own).wait()
        return every.view(self.size, len(own))

    def together(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns on this rank, once it has ended on all ranks. A rank that
        failed leaves no other rank waiting. Errors: this rank's own; Unavailable, which tells
        another rank's error."""
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
        """Returns what each rank has given, as plain data, in the order of the ranks."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, what, group=self.group)
        return every

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns on all ranks what `decide` returns on rank 0, which must be plain data. Errors:
        rank 0's, on all ranks."""
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                told = [(decide(), None)]
            except ZigguratError as error:
                told = [(None, error)]
            except Exception as error:  # tells the other ranks, which wait for an answer
                told = [(None, Unavailable(f"rank {self.members[0]}: {type(error).__name__}: {error}"))]
        dist.broadcast_object_list(told, src=self.members[0], group=self.group)
        found, error = told[0]
        if error is not None:
            raise error
        return found

    def sums(self, values: Sequence[float]) -> torch.Tensor:
        """Returns the sum of each value over the ranks, in the ranks' order."""
        every = self.gathered(values)
        total = every[0].clone()
        for of_rank in every[1:]:
            total += of_rank
        return total

    def largest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of each value over the ranks; NaN if one of them is NaN."""
        found: list[float] = self.gathered(values).amax(0).tolist()
        return found


_known: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _explain_failures_of(ranks: Ranks) -> None:
    """Adds a line that names the rank if this process ends because another rank has ended, in a
    call that is not ours (FSDP2's, or the script's own)."""
    first = not _known
    _known.add(ranks)
    if not first:
        return
    before = sys.excepthook

    def explain(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if isinstance(error, RuntimeError) and _OF_A_PEER.search(str(error)):
            for ranks in list(_known):
                print(f"ziggurat: rank {ranks.rank}: {ranks.who_ended()}", file=stderr())

    sys.excepthook = explain


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
