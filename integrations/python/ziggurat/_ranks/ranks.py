# SPDX-License-Identifier: Apache-2.0
"""The ranks among which an optimizer's state is divided, and what they send each other.

Only all-to-all and all-gather carry tensors. Every sum is computed here, in the order of ranks, so
results have the same bits whatever carries them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ziggurat._library import native
from ziggurat._library.native import (
    Exchange,
    InvalidArgument,
    Runtime,
    Unavailable,
    Unimplemented,
    ZigguratError,
)
from ziggurat._library.standard_error import stderr
from ziggurat._ranks.buffers import Buffers
from ziggurat._ranks.codes import Codes
from ziggurat._ranks.cuts import LINE, Cut, shards_of
from ziggurat._ranks.rank_watch import Call, RankWatch

_PATIENCE = timedelta(minutes=30)  # how long to wait for a rank, as torch.distributed does
# What a call is for: bytes of text, and with it the number of values, both in fp64's size; then the first values.
_TEXT, _HEAD, _FIRST = 120, 16, 16
GATHERS = "ziggurat-gather"  #: the thread that gathers parameters beside the script
_SENT_TO_EACH = 64 * 1024  # bytes, from which an all-gather's copies are worth to be saved
_NAP, _NAP_MOST = 2e-5, 1e-3  # seconds between two looks at a transfer
_ASKS_FOR = 3.0  # seconds; a rank that has ended is known at once
# what PyTorch's errors say if another rank has ended
_OF_A_PEER = re.compile("gloo|NCCL|peer", re.IGNORECASE)


class Work(Protocol):
    """A transfer in progress, which owns its tensors until wait() returns."""

    def wait(self) -> Any: ...


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

    def __init__(self, ranks: Ranks, call: str, works: list[Any], polls: bool) -> None:
        self._ranks, self._call, self._works, self._polls = ranks, call, works, polls

    def wait(self) -> None:
        try:
            for work in self._works:
                if self._polls:
                    self._poll(work)
                work.wait()
        except RuntimeError as error:
            raise self._ranks.lost(self._call, error) from error

    def _poll(self, work: Any) -> None:
        """Waits for a transfer, since wait() of one that never ends cannot be ended."""
        nap = _NAP
        while not work.is_completed():
            if (words := self._ranks.watch.failed) is not None:
                raise Unavailable(f"rank {self._ranks.rank}: {words}")
            time.sleep(nap)
            nap = min(2 * nap, _NAP_MOST)


class TorchLane(Lane):
    def __init__(self, ranks: Ranks, name: str, group: Any, by_all: bool) -> None:
        """`by_all`: whether all ranks make the calls, be it in groups of their own."""
        self._ranks, self._name, self._group = ranks, name, group
        self._members = dist.get_process_group_ranks(group)
        self._calls = 0
        self._all = by_all

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        return self._begun(
            "all-to-all",
            given,
            lambda: [dist.all_to_all_single(output, given, group=self._group, async_op=True)],
        )

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        if given.device.type == "cpu" and given.nbytes > _SENT_TO_EACH:
            return self._begun("all-gather", given, lambda: self._sent_to_each(output, given), polls=False)
        return self._begun(
            "all-gather",
            given,
            lambda: [dist.all_gather_into_tensor(output, given, group=self._group, async_op=True)],
        )

    def _sent_to_each(self, output: torch.Tensor, given: torch.Tensor) -> list[Any]:
        """Sends to each rank directly, because gloo's own all-gather copies the output in each of
        its threads. Such a transfer does not tell whether it has ended before it is waited for."""
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

    def _begun(
        self, call: str, given: torch.Tensor, begin: Callable[[], list[Any]], polls: bool = True
    ) -> Work:
        call = f"{call} of {self._name}"
        try:
            work = _Named(self._ranks, call, begin(), polls=polls and given.device.type == "cpu")
        except RuntimeError as error:
            raise self._ranks.lost(call, error) from error
        return self._ranks.watched(work, f"the exchange of {self._name}") if self._all else work


class EngineLane(Lane):
    """Sends through the engine's own connections, which carry host memory alone."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._exchange = Exchange(ranks.runtime, name)
        self._ranks, self._name = ranks, name
        self._size = ranks.size

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        slice_bytes = given.nbytes // self._size
        ticket = self._exchange.all_to_all(_address(given), _address(output), slice_bytes)
        return self._watched(_Ticket(ticket, output, given))

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        ticket = self._exchange.all_gather(_address(given), _address(output), given.nbytes)
        return self._watched(_Ticket(ticket, output, given))

    def _watched(self, work: Work) -> Work:
        return self._ranks.watched(work, f"the exchange of {self._name}")


class _Ticket:
    def __init__(self, ticket: Any, *kept: torch.Tensor) -> None:
        self._ticket, self._kept = ticket, kept

    def wait(self) -> None:
        self._ticket.finish()


class _Watched:
    """A transfer of which the other ranks hear if it is waited for."""

    def __init__(self, watch: RankWatch, work: Work, call: Call) -> None:
        self._watch, self._work, self._call = watch, work, call

    def wait(self) -> None:
        with self._watch.waiting(self._call):
            self._work.wait()


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

    def __init__(self, group: Any, threads: int, exchange: str, shard_group: int | None = None) -> None:
        """`exchange` chooses what carries tensors: "torch" (the group's own way) or "ziggurat". Every
        `shard_group` ranks divide the state among them; None: all ranks do."""
        if exchange not in ("torch", "ziggurat"):
            raise InvalidArgument(f'exchange="{exchange}": give "torch" or "ziggurat"')
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        #: how many consecutive ranks divide the state among them, and of how many such groups each has a copy
        self.shards = shards_of(self.size, shard_group)
        self.replicas = self.size // self.shards
        self.shard, self.replica = self.rank % self.shards, self.rank // self.shards  #: this rank's
        self.line = LINE  #: slices begin at multiples of so many elements
        self.codes: Codes | None = None  #: in which gradients travel, if not in their own type
        self.members = dist.get_process_group_ranks(group)
        self._by_engine = exchange == "ziggurat"
        self.buffers = Buffers()  #: buffers for what is sent and received
        #: The engines' runtime. Through it the engines agree on every step.
        known = _watches.get(tuple(self.members))
        meeting, told = self._meeting(None if known is None or known.is_closed else known)
        self.runtime = Runtime(threads, meeting)
        if isinstance(told, RankWatch):
            self.watch = told
        else:
            self.watch = _watches[tuple(self.members)] = RankWatch(self.rank, self.size, told)
        number = self.watch.join(id(self), _weakly(self.runtime))
        self._of_these = "" if number == 1 else f" of optimizer {number}"
        self._control = Exchange(self.runtime, "control")
        _explain_failures_of(self)
        self._small = self.lane("sums")

    def _meeting(self, watch: RankWatch | None) -> tuple[native.Ranks, RankWatch | dist.Store]:
        """Returns where the engines' ranks find each other, and `watch`, or where the ranks can tell what they
        wait for; rank 0 tells the others through `group`."""
        told: list[dist.Store] = []

        def meeting() -> tuple[str, int, int, str]:
            address = os.environ.get("MASTER_ADDR", "") or socket.gethostname()
            if watch is None:  # on a port that it has before the others hear of it
                told.append(dist.TCPStore(address, 0, self.size, True, _PATIENCE, wait_for_workers=False))
            port = told[0].port if told else 0
            return address, _free_port(), port, secrets.token_hex(16)

        address, port, told_port, secret = _from_rank_0(self, meeting)
        if watch is None and not told:
            told.append(dist.TCPStore(address, told_port, self.size, False, _PATIENCE))
        ranks = native.Ranks(
            self.rank, self.size, f"{address}:{port}", secret, call_timeout_s=_PATIENCE.total_seconds()
        )
        return ranks, watch or told[0]

    def watched(self, work: Work, what: str) -> Work:
        """Returns `work`, a call that all ranks make, of which they hear if this one waits for it."""
        beside = threading.current_thread().name == GATHERS
        return _Watched(self.watch, work, self.watch.begin(what + self._of_these, beside))

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Makes a call within that all ranks make, and waits for them. Errors: Unavailable, which says who
        waits where, if they wait for each other."""
        with self.watch.waiting(self.watch.begin(what + self._of_these)):
            yield

    def cut(self, count: int) -> Cut:
        """Returns how a parameter of `count` elements is divided among the ranks of a group, by their `shard`."""
        return Cut(count, self.shards, self.line * self.replicas)

    def parts(self, count: int) -> Cut:
        """Returns how the sum of a gradient of `count` elements is divided among all ranks: each group's slice
        among the ranks that have it, in the order of groups. Without groups that is cut()."""
        return Cut(count, self.size, self.line)

    def own(self, count: int) -> slice:
        """Returns this rank's slice of a parameter of `count` elements."""
        return self.cut(count).of(self.shard)

    def with_shard(self, shard: int) -> int:
        """Returns which rank of this rank's group has a slice."""
        return self.replica * self.shards + shard

    def group_lane(self, name: str) -> Lane:
        """Makes a lane among the ranks of this rank's group."""
        return self._lane_of(name, [self.with_shard(shard) for shard in range(self.shards)])

    def copies_lane(self, name: str) -> Lane:
        """Makes a lane among the ranks that have this rank's slice."""
        return self._lane_of(name, list(range(self.shard, self.size, self.shards)))

    def node_lanes(self, name: str, within: int) -> tuple[Lane, Lane]:
        """Makes a lane among the `within` consecutive ranks of this one's node, and one among the ranks that
        have its place in their nodes."""
        first, place = self.rank // within * within, self.rank % within
        node = self._lane_of(f"{name} within a node", range(first, first + within))
        return node, self._lane_of(f"{name} between nodes", range(place, self.size, within))

    def _lane_of(self, name: str, ranks: Sequence[int]) -> Lane:
        return self.lane(name, [self.members[rank] for rank in ranks], by_all=True)

    def lane(self, name: str, members: Sequence[int] | None = None, by_all: bool = False) -> Lane:
        """Makes a lane among `members`, or among all ranks. Every rank makes the same lanes in the
        same order. A lane of some ranks alone always uses torch.distributed; `by_all` tells that the others
        have such lanes too, in which they make the same calls."""
        members = list(members or self.members)
        if self._by_engine and members == self.members:
            return EngineLane(self, name)
        # The lane has its own group, because another thread than the training loop's may call it.
        group = dist.new_group(members, timeout=_PATIENCE, use_local_synchronization=True)
        return TorchLane(self, name, group, by_all or members == self.members)

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
        with self.waiting("close()"):
            meeting.join(seconds)
        return "".join(known)

    def close(self) -> None:
        """Called when nothing is sent any more."""
        self.watch.leave(id(self))

    def meet(self, what: str) -> None:
        """Waits for all ranks at `what`."""
        self.gathered([], what)

    def gathered(self, values: Sequence[float], what: str = "an agreement") -> torch.Tensor:
        """Returns [ranks, values] in fp64, the same on every rank. Errors: InvalidArgument, on all ranks,
        if they do not all call for `what`, or not with as many values."""
        with self.waiting(what):
            return self._gathered(values, what)

    def _gathered(self, values: Sequence[float], what: str) -> torch.Tensor:
        # Ranks that call for different things would take one's values for the other's, so what the call is for
        # travels with the first values, in a message of one size.
        own = torch.tensor(values, dtype=torch.float64)
        text = what.encode()[:_TEXT].ljust(_TEXT, b"\0") + len(values).to_bytes(8, "little")
        head = torch.zeros(_HEAD + _FIRST, dtype=torch.float64)
        head[:_HEAD] = torch.frombuffer(bytearray(text), dtype=torch.float64)
        head[_HEAD : _HEAD + min(_FIRST, len(own))] = own[:_FIRST]
        heads = torch.empty(self.size * len(head), dtype=torch.float64)
        self._small.all_gather(heads, head).wait()
        rows = heads.view(self.size, -1)
        self._require_one_call(rows[:, :_HEAD])
        if len(own) <= _FIRST:
            return rows[:, _HEAD : _HEAD + len(own)]
        every = torch.empty(self.size * len(own), dtype=torch.float64)
        self._small.all_gather(every, own).wait()
        return every.view(self.size, len(own))

    def _require_one_call(self, heads: torch.Tensor) -> None:
        texts = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in heads]
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if other is None:
            return
        said = [f"{text[:_TEXT].rstrip(bytes(1)).decode(errors='replace')} ({text[_TEXT]} values)" for text in texts]
        raise InvalidArgument(
            f"the ranks have parted ways: rank 0 is at {said[0]}, but rank {other} at {said[other]}: make the "
            "same calls on all ranks"
        )

    def together(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns on this rank, once it has ended on all ranks. A rank that
        failed leaves no other rank waiting. Errors: this rank's own; Unavailable, which tells
        another rank's error."""
        found, own = None, None
        try:
            found = work()
        except Exception as error:
            own = error
        if self.largest([own is not None], what) == [0.0]:
            return found
        words = self.told(None if own is None else f"{type(own).__name__}: {own}", what)
        if own is not None:
            raise own
        rank = next(rank for rank, text in enumerate(words) if text is not None)
        raise Unavailable(f"{what} was given up, because rank {rank} failed: {words[rank]}")

    def told(self, what: Any, call: str = "an exchange of words") -> list[Any]:
        """Returns what each rank has given, as plain data, in the order of the ranks. All are in `call`."""
        own = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        sizes = self.gathered([len(own)], call)[:, 0].long().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        every = torch.empty(self.size * len(padded), dtype=torch.uint8)
        self._small.all_gather(every, padded).wait()
        rows = every.view(self.size, -1)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def require_alike(self, call: str, given: str) -> None:
        """Requires that all ranks have `given` the same to `call`. Errors: InvalidArgument, on all
        ranks, which names two that differ."""
        every = self.told(given, call)
        other = next((rank for rank, its in enumerate(every) if its != every[0]), None)
        if other is not None:
            raise InvalidArgument(
                f"{call}: rank 0 gives {every[0]}, but rank {other} gives {every[other]}: give the "
                "same on all ranks"
            )

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns on all ranks what `decide` returns on rank 0, which must be plain data. Errors:
        rank 0's, on all ranks."""
        return _found(self.told(_decision(self, decide) if self.rank == 0 else None)[0])

    def sums_of_parts(self, values: Sequence[float], what: str) -> torch.Tensor:
        """Returns the sum of each value, of which every rank gives its part's, in the order of parts()."""
        rows = self.gathered(values, what).view(self.replicas, self.shards, -1).transpose(0, 1).flatten(0, 1)
        total = rows[0].clone()
        for of_part in rows[1:]:
            total += of_part
        return total

    def largest(self, values: Sequence[float], what: str = "an agreement") -> list[float]:
        """Returns the largest of each value over the ranks; NaN if one of them is NaN."""
        found: list[float] = self.gathered(values, what).amax(0).tolist()
        return found


_watches: weakref.WeakValueDictionary[tuple[int, ...], RankWatch] = weakref.WeakValueDictionary()
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


def _decision(ranks: Ranks, decide: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Returns what `decide` returns, or the error that is raised on all ranks."""
    try:
        return decide(), None
    except ZigguratError as error:
        return None, error
    except Exception as error:  # tells the other ranks, which wait for an answer
        return None, Unavailable(f"rank {ranks.members[0]}: {type(error).__name__}: {error}")


def _found(decision: tuple[Any, Exception | None]) -> Any:
    found, error = decision
    if error is not None:
        raise error
    return found


def _from_rank_0(ranks: Ranks, decide: Callable[[], Any]) -> Any:
    """Does what Ranks.decided() does before there are lanes."""
    told: list[Any] = [_decision(ranks, decide) if ranks.rank == 0 else None]
    dist.broadcast_object_list(told, src=ranks.members[0], group=ranks.group)
    return _found(told[0])


def _weakly(runtime: Runtime) -> Callable[[str], None]:
    """Returns what ends the calls of a runtime, if it still lives."""
    known = weakref.ref(runtime)

    def end(words: str) -> None:
        its = known()
        if its is not None:
            its.abort(words)

    return end


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def rank_count() -> int:
    """Returns how many ranks torch.distributed has; 1 without it."""
    return dist.get_world_size() if several_ranks() else 1


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
