# SPDX-License-Identifier: Apache-2.0
"""Exchanges gradients among ranks: each rank gets the mean of its own slices, and nothing else
(ZeRO-2). Where groups of ranks have copies of the state, a slice is summed in parts, one by each rank that
has it, over all ranks in their order: so the bits are those of as many ranks without groups.

Parameters are grouped into buckets, the last parameters first, because backward reaches those
first. A bucket is sent during backward once all its gradients are there; the rest is sent at the
end. All ranks send the same buckets in the same order. A parameter that has no gradient on one
rank counts as zeros there, and one that has no gradient on any rank is left without.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ziggurat._gradients.gradient_content import Slot, Taken
from ziggurat._gradients.shared_content import SharedContent
from ziggurat._library.packing import TILE
from ziggurat._ranks.codes import Codes, padded
from ziggurat._ranks.cuts import LINE, Cut
from ziggurat._ranks.ranks import Lane, Ranks, Work

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator

BUCKET_BYTES = 25 << 20  # as in PyTorch's DistributedDataParallel
IN_FLIGHT = 2  # buckets in flight: each takes twice its bytes
_PIECE = 64 * 1024  # elements


class Bucket:
    """Where each parameter's parts are in the [ranks, row] elements that are sent to the ranks.

    After the parts, a row has one element for each parameter: whether it has a gradient. Where rows travel in
    codes each part begins a block, and what travels ends with a byte for each parameter.
    """

    def __init__(
        self, slots: Sequence[Slot], counts: Sequence[int], wire: torch.dtype, ranks: Ranks
    ) -> None:
        self.slots = list(slots)
        self.wire = wire
        self._ranks = ranks
        self.cuts = [ranks.parts(count) for count in counts]
        self._starts, at = [], 0
        self.codes = ranks.codes
        for cut in self.cuts:
            self._starts.append(at)
            at += cut.slice if self.codes is None else padded(cut.slice)
        self._flags = at
        self.row = at + (len(self.slots) if self.codes is None else 0)
        self._code_bytes = 0 if self.codes is None else self.codes.bytes_of(self._flags)
        #: what a row is made of where it travels
        self.carried = wire if self.codes is None else torch.uint8
        self.carried_row = self.row if self.codes is None else self._code_bytes + len(self.slots)
        # The sums' memory, used again once neither the engine nor anybody else holds a slice of it.
        self._sums: torch.Tensor | None = None
        self._given: list[weakref.ref[torch.Tensor]] = []

    @property
    def sums_bytes(self) -> int:
        return 0 if self._sums is None else self._sums.nbytes

    def fill(self, rows: torch.Tensor, i: int, part: Taken | None) -> None:
        """Puts the gradient of parameter `i` into `rows`, one for each part."""
        cut, start = self.cuts[i], self._starts[i]
        if self.codes is None:
            rows[:, self._flags + i] = 0.0 if part is None else 1.0
        place = rows[:, start : start + cut.slice]
        if self.codes is not None:
            rows[:, start + cut.slice : start + padded(cut.slice)] = 0.0
        if part is None or part.tensor is None or cut.count == 0:
            place.zero_()
            return
        flat = part.tensor.reshape(-1)
        full = cut.count // cut.slice
        place[:full].copy_(flat[: full * cut.slice].view(full, cut.slice))
        if full < len(place):
            rest = cut.count - full * cut.slice
            place[full, :rest].copy_(flat[full * cut.slice :])
            place[full, rest:].zero_()
            place[full + 1 :].zero_()
        if part.scale != 1.0:
            place.mul_(part.scale)

    def encode(self, rows: torch.Tensor, carried: torch.Tensor, parts: Sequence[Taken | None]) -> None:
        """Makes of `rows`, which have been filled with `parts`, those that travel."""
        assert self.codes is not None
        self.codes.encode(rows, carried)
        flags = torch.tensor([part is not None for part in parts], dtype=torch.uint8, device=carried.device)
        carried[:, self._code_bytes :] = flags

    def sum_again(self, came: torch.Tensor, sums: torch.Tensor, carried: torch.Tensor) -> None:
        """Sums over the ranks of this node, of which each has sent a row for each node, and encodes the
        sums. `sums` has room for one row, without flags."""
        assert self.codes is not None
        for node, row in enumerate(carried):
            of_node = came.view(self.codes.grid.within, self.codes.grid.nodes, -1)[:, node]
            self.codes.sum(of_node, sums)
            self.codes.encode(sums.view(1, -1), row.view(1, -1))
            row[self._code_bytes :].copy_(of_node[:, self._code_bytes :].amax(0))

    def to_ranks(self, rows: torch.Tensor, sent: torch.Tensor) -> None:
        """Puts the parts' `rows` into `sent` in the order of the ranks that sum them."""
        groups, row = (self._ranks.shards, self._ranks.replicas), self.carried_row
        sent.view(*reversed(groups), row).copy_(rows.view(*groups, row).transpose(0, 1))

    def by_place(self, rows: torch.Tensor, sent: torch.Tensor) -> None:
        """Puts the ranks' `rows` into `sent` in the order of their places in their nodes: first those of the
        first rank of every node."""
        assert self.codes is not None
        grid, row = self.codes.grid, self.carried_row
        sent.view(*reversed(grid), row).copy_(rows.view(*grid, row).transpose(0, 1))

    def sums(self, rows: torch.Tensor, copies: Lane) -> list[torch.Tensor | None]:
        """Returns each parameter's slice of the sum of `rows`, in fp32, or None if no rank had a
        gradient. The ranks of `copies` have the same slices."""
        replicas = self._ranks.replicas
        if self._sums is None or any(slice_() is not None for slice_ in self._given):
            self._sums = torch.empty(replicas * self._flags, dtype=torch.float32, device=rows.device)
        had = self._sum_alone(rows) if replicas == 1 else self._sum_in_parts(rows, copies)
        found: list[torch.Tensor | None] = []
        for cut, start, count in zip(self.cuts, self._starts, had, strict=True):
            own = self._ranks.own(cut.count)
            its = self._sums[replicas * start : replicas * start + own.stop - own.start]
            found.append((its if len(its) > 0 else its.clone()) if count > 0 else None)
        self._given = [weakref.ref(slice_) for slice_ in found if slice_ is not None and len(slice_) > 0]
        return found

    def _sum_alone(self, rows: torch.Tensor) -> list[float]:
        """Sums this rank's slices. Returns how many ranks have a gradient of each parameter."""
        assert self._sums is not None
        self._sum_rows(rows, self._sums)
        return self._count(rows)

    def _sum_rows(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        if self.codes is None:
            sum_in_order(rows[:, : self._flags], total)
        else:
            self.codes.sum(rows, total)

    def _count(self, rows: torch.Tensor) -> list[float]:
        begin = self._flags if self.codes is None else self._code_bytes
        found: list[float] = rows[:, begin:].float().sum(0).tolist()
        return found

    def _sum_in_parts(self, rows: torch.Tensor, copies: Lane) -> list[float]:
        """Sums this rank's parts, and gathers the others of its slices. Returns what _sum_alone() does."""
        assert self._sums is not None
        replicas, buffers = self._ranks.replicas, self._ranks.buffers
        own = buffers.take(self._flags, torch.float32, rows.device)
        every = buffers.take(replicas * self._flags, torch.float32, rows.device)
        self._sum_rows(rows, own)
        copies.all_gather(every, own).wait()
        parts = every.view(replicas, self._flags)
        for cut, start in zip(self.cuts, self._starts, strict=True):
            its = self._sums[replicas * start : replicas * (start + cut.slice)]
            its.view(replicas, cut.slice).copy_(parts[:, start : start + cut.slice])
        buffers.give_back(own)
        buffers.give_back(every)
        return self._count(rows)

    def let_unused_go(self) -> None:
        """Frees the sums' memory if nobody holds a slice of it, because all are in files."""
        if all(slice_() is None for slice_ in self._given):
            self._sums = None


def sum_in_order(rows: torch.Tensor, total: torch.Tensor, divisor: int = 1) -> None:
    """Sums the rows in their order, in fp32 or wider; takes pieces that stay in a core's cache."""
    wide = torch.promote_types(total.dtype, torch.float32)
    work = None if total.dtype == wide else torch.empty(_PIECE, dtype=wide, device=total.device)
    for begin in range(0, len(total), _PIECE):
        given = total[begin : begin + _PIECE]
        piece = given if work is None else work[: len(given)]
        piece.copy_(rows[0, begin : begin + _PIECE])
        for row in rows[1:]:
            piece.add_(row[begin : begin + _PIECE])
        if divisor != 1:
            piece.div_(divisor)
        if work is not None:
            given.copy_(piece)


class Sent(NamedTuple):
    """A parameter's number of elements, and the bytes of one element as it is sent and in the
    parameter."""

    count: int
    wire: int
    own: int


def planned_bytes(
    params: Sequence[Sent],
    ranks: int,
    line: int = LINE,
    in_files: bool = False,
    replicas: int = 1,
    in_codes: bool = False,
    adds: bool = True,
) -> int:
    """Returns the most memory that a rank takes to exchange the parameters and their gradients, in
    buckets of BUCKET_BYTES and one parameter more: the sums of its slices, those of one new
    bucket beside the old ones, and what is in flight. `in_files`: large slices are summed in files.
    `replicas`: how many of the ranks have the same slices. `in_codes`: they are encoded from rows that are
    there beside what is in flight. `adds`: whether a step has several backwards, so that there are old sums."""
    if not params:
        return 0
    parts = [Cut(param.count, ranks, line).slice for param in params]
    if in_codes:
        parts = [padded(part) for part in parts]
    slices = [replicas * part for part in parts]
    kept = sum(slice_ for slice_ in slices if not (in_files and slice_ >= TILE)) + len(slices)
    rows = sum(parts) + len(parts)
    filled = rows * ranks - sum(param.count for param in params)
    widest = max(max(param.wire, param.own) for param in params)
    bucket = BUCKET_BYTES + max(p.count * max(p.wire, p.own) for p in params) + filled * widest
    every = rows * ranks * widest
    bucket = min(bucket, every)
    sums_of_one = replicas * bucket // (ranks * min(param.wire for param in params)) * 4
    if replicas > 1:  # a rank's part and all of them, before they are in order
        sums_of_one += (1 + replicas) * sums_of_one // replicas
    alone = bucket == every and len({(param.wire, param.own) for param in params}) == 1  # in one bucket
    in_flight = 2 * bucket * (1 if alone else IN_FLIGHT)  # what is sent and what comes
    return kept * 4 + (sums_of_one if adds else 0) + in_flight + in_codes * bucket


def in_buckets(
    sized: Iterable[tuple[Slot, torch.Tensor]],
    ranks: Ranks,
    wire: Callable[[torch.Tensor], torch.dtype],
) -> list[Bucket]:
    """Groups parameters, in the given order, into buckets of one type and about BUCKET_BYTES
    each."""
    open_of: dict[torch.dtype, list[tuple[Slot, int]]] = {}
    room: dict[torch.dtype, int] = {}
    buckets = []

    def close(dtype: torch.dtype) -> None:
        slots, counts = zip(*open_of.pop(dtype), strict=True)
        buckets.append(Bucket(slots, counts, dtype, ranks))

    for slot, param in sized:
        dtype = wire(param)
        open_of.setdefault(dtype, []).append((slot, param.numel()))
        room[dtype] = room.get(dtype, 0) + param.numel() * dtype.itemsize
        if room[dtype] >= BUCKET_BYTES:
            close(dtype)
            room[dtype] = 0
    for dtype in list(open_of):
        close(dtype)
    return buckets


def _norm(part: torch.Tensor | None, order: float) -> float:
    return float(torch.linalg.vector_norm(part, order)) if part is not None and len(part) else 0.0


class GradientExchange:
    """Sends buckets in one order on every rank, and gives what comes back to their contents."""

    def __init__(
        self,
        ranks: Ranks,
        received: Callable[[Slot, torch.Tensor], None],
        contents: Callable[[], Iterable[SharedContent]],
        accelerator: Accelerator | None = None,
    ) -> None:
        """`received(slot, slice)` takes the sum, over the ranks, of this rank's slice, in fp32.
        `contents()` returns the contents of all gradients. `accelerator`: which makes gradients that are
        exchanged in host memory."""
        self.ranks = ranks
        self._accelerator = accelerator
        self._received = received
        self._contents = contents
        self._lane, self._across = self._lanes()
        self._copies = ranks.copies_lane("gradients of copies") if ranks.replicas > 1 else self._lane
        self._values = ranks.group_lane("gradient values")
        self._flying: list[tuple[Bucket, torch.Tensor, torch.Tensor, Work]] = []
        self._buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()  # buckets that were sent
        self.from_ranks_bytes = 0  #: of gradients that other ranks have sent to be summed
        #: Called before the first of several buckets is sent, so that others give the ranks'
        #: buffers back.
        self.before: Callable[[], None] = lambda: None

    def home_of(self, device: torch.device) -> torch.device:
        """Returns where gradients of parameters on `device` are kept and sent."""
        return device if self._accelerator is None else torch.device("cpu")

    def in_host_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Returns what backward has made, in host memory if an accelerator has made it."""
        return values if self._accelerator is None else self._accelerator.to_host(values)

    def _lanes(self) -> tuple[Lane, Lane | None]:
        """Makes the lane of all ranks, or those within a node and across nodes."""
        codes = self.ranks.codes
        if codes is None or not codes.grid.has_two_levels:
            return self.ranks.lane("gradients"), None
        return self.ranks.node_lanes("gradients", codes.grid.within)

    def send(self, bucket: Bucket, parts: Sequence[Taken | None], device: torch.device) -> None:
        """Sends a bucket. The parts may change when this returns."""
        if not self._flying:
            self.before()
        while len(self._flying) >= IN_FLIGHT:
            self._finish_one()
        self._buckets.add(bucket)
        count = self.ranks.size * bucket.carried_row
        given = self.ranks.buffers.take(count, bucket.carried, device)
        taken = self.ranks.buffers.take(count, bucket.carried, device)
        if bucket.codes is None:
            self._fill(bucket, given, parts)
        else:
            filled = self.ranks.buffers.take(self.ranks.size * bucket.row, bucket.wire, device)
            bucket.encode(self._fill(bucket, filled, parts), given.view(self.ranks.size, -1), parts)
            self.ranks.buffers.give_back(filled)
        if self.ranks.replicas > 1:
            bucket.to_ranks(given, taken)
            given, taken = taken, given
        if self._across is not None:
            bucket.by_place(given, taken)
            given, taken = taken, given
        work = self._lane.all_to_all(taken, given)
        self._flying.append((bucket, taken, given, work))

    def _fill(self, bucket: Bucket, memory: torch.Tensor, parts: Sequence[Taken | None]) -> torch.Tensor:
        rows = memory.view(self.ranks.size, bucket.row)
        for i, part in enumerate(parts):
            bucket.fill(rows, i, part)
        return rows

    @property
    def held_bytes(self) -> int:
        """Returns the bytes held for gradients, and for what is sent."""
        sums = sum(bucket.sums_bytes for bucket in self._buckets)
        return sums + self.ranks.buffers.held_bytes

    def finish(self) -> None:
        """Returns when all that was sent has come back."""
        while self._flying:
            self._finish_one()

    def _finish_one(self) -> None:
        bucket, taken, given, work = self._flying.pop(0)
        work.wait()
        own_rows = 1
        rows = taken.view(self.ranks.size, bucket.carried_row)
        if self._across is not None and bucket.codes is not None:
            own_rows = bucket.codes.grid.nodes
            rows = self._between_nodes(bucket, rows, given)
        self.from_ranks_bytes += (self.ranks.size - own_rows) * bucket.carried_row * bucket.carried.itemsize
        self.ranks.buffers.give_back(given)
        found = bucket.sums(rows, self._copies)
        self.ranks.buffers.give_back(taken)
        for slot, own in zip(bucket.slots, found, strict=True):
            if own is not None:
                self._received(slot, own)
        del found, own
        bucket.let_unused_go()

    def _between_nodes(self, bucket: Bucket, came: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Sends the sums of this node's ranks to the ranks that sum over nodes, in memory that has been sent.
        Returns the rows of the nodes."""
        assert bucket.codes is not None and self._across is not None
        nodes = bucket.codes.grid.nodes
        sent = given.view(self.ranks.size, -1)[:nodes]
        sums = self.ranks.buffers.take(bucket.row, torch.float32, given.device)
        bucket.sum_again(came, sums, sent)
        self.ranks.buffers.give_back(sums)
        rows = came[:nodes]
        self._across.all_to_all(rows.view(-1), sent.view(-1)).wait()
        self.from_ranks_bytes += (nodes - 1) * bucket.carried_row
        return rows

    # The methods below read gradients: all ranks call each of them together.

    def gathered(self, content: SharedContent) -> torch.Tensor:
        """Returns the whole gradient, gathered from the ranks' slices."""
        own = torch.zeros(content.cut.slice, dtype=torch.float32, device=content.home)
        if (values := content.slice) is not None:
            own[: values.numel()] = values
        every = torch.empty(self.ranks.shards * len(own), dtype=torch.float32, device=content.home)
        self._values.all_gather(every, own).wait()
        whole = every[: content.cut.count] * content.slice_scale.to(content.home)
        return whole.view(content.shape).to(content.dtype).to(content.device)

    def norms(self, contents: Sequence[SharedContent], order: float) -> torch.Tensor:
        """Returns the norm of each gradient, in fp64 on the CPU: the 2-norm, or with inf the
        largest absolute value.

        PyTorch asks for one norm after another; the first call finds the norms of all gradients at
        once.
        """
        for content in contents:
            content.check_sent()
        if any(order not in content.norms for content in contents):
            asked = [one for one in {*contents, *self._contents()} if order not in one.norms]
            asked.sort(key=lambda content: content.slot.index)
            self._find_norms([one for one in asked if not one.consumed], order)
        scales = torch.stack([content.slice_scale for content in contents]).abs().double().cpu()
        known = [content.norms[order] for content in contents]
        return torch.tensor(known, dtype=torch.float64) * scales

    def _part_of(self, content: SharedContent) -> torch.Tensor | None:
        """Returns what this rank has summed of its slice of a gradient."""
        own, part = content.own(), content.cut.slice // self.ranks.replicas
        return None if own is None else own[self.ranks.replica * part : (self.ranks.replica + 1) * part]

    def _find_norms(self, contents: Sequence[SharedContent], order: float) -> None:
        # One after the other, because they may be in files.
        local = [_norm(self._part_of(content), order) for content in contents]
        if math.isinf(order):
            found = self.ranks.largest(local, "the norm of gradients")
        else:
            found = self.ranks.sums_of_parts([norm * norm for norm in local], "the norm of gradients").sqrt().tolist()
        for content, norm in zip(contents, found, strict=True):
            content.norms[order] = norm
