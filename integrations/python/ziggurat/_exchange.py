# SPDX-License-Identifier: Apache-2.0
"""Exchanges gradients among ranks: each rank gets the mean of its own slices, and nothing else
(ZeRO-2).

Parameters are grouped into buckets, the last parameters first, because backward reaches those
first. A bucket is sent during backward once all its gradients are there; the rest is sent at the
end. All ranks send the same buckets in the same order. A parameter that has no gradient on one
rank counts as zeros there, and one that has no gradient on any rank is left without.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ziggurat._gradient_content import Slot, Taken
from ziggurat._ranks import LINE, Cut, Ranks, Work
from ziggurat._shared_content import SharedContent

BUCKET_BYTES = 25 << 20  # as in PyTorch's DistributedDataParallel
IN_FLIGHT = 2  # buckets in flight: each takes twice its bytes
_PIECE = 64 * 1024  # elements


class Bucket:
    """Where each parameter's slices are in the [ranks, row] elements that are sent to the ranks.

    After the slices, a row has one element for each parameter: whether it has a gradient.
    """

    def __init__(
        self, slots: Sequence[Slot], counts: Sequence[int], wire: torch.dtype, ranks: Ranks
    ) -> None:
        self.slots = list(slots)
        self.wire = wire
        self.cuts = [ranks.cut(count) for count in counts]
        self._starts, at = [], 0
        for cut in self.cuts:
            self._starts.append(at)
            at += cut.slice
        self._flags = at
        self.row = at + len(self.slots)
        # The sums' memory, used again once neither the engine nor anybody else holds a slice of it.
        self._sums: torch.Tensor | None = None
        self._given: list[weakref.ref[torch.Tensor]] = []

    @property
    def sums_bytes(self) -> int:
        return 0 if self._sums is None else self._sums.nbytes

    def fill(self, rows: torch.Tensor, i: int, part: Taken | None) -> None:
        """Puts the gradient of parameter `i` into `rows`, a slice for each rank."""
        cut, start = self.cuts[i], self._starts[i]
        rows[:, self._flags + i] = 0.0 if part is None else 1.0
        place = rows[:, start : start + cut.slice]
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

    def sums(self, rows: torch.Tensor, rank: int) -> list[torch.Tensor | None]:
        """Returns each parameter's slice of the sum of `rows`, in fp32, or None if no rank had a
        gradient."""
        if self._sums is None or any(slice_() is not None for slice_ in self._given):
            self._sums = torch.empty(self.row, dtype=torch.float32, device=rows.device)
        sum_in_order(rows, self._sums)
        found: list[torch.Tensor | None] = []
        had = self._sums[self._flags :].tolist()
        for cut, start, count in zip(self.cuts, self._starts, had, strict=True):
            own = cut.of(rank)
            found.append(self._sums[start : start + own.stop - own.start] if count > 0 else None)
        self._given = [weakref.ref(slice_) for slice_ in found if slice_ is not None]
        return found


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


def planned_bytes(params: Sequence[Sent], ranks: int, line: int = LINE) -> int:
    """Returns the most memory that a rank takes to exchange the parameters and their gradients, in
    buckets of BUCKET_BYTES and one parameter more: the sums of its slices, those of one new
    bucket beside the old ones, and what is in flight."""
    if not params:
        return 0
    rows = sum(Cut(param.count, ranks, line).slice + 1 for param in params)
    filled = rows * ranks - sum(param.count for param in params)
    widest = max(max(param.wire, param.own) for param in params)
    bucket = BUCKET_BYTES + max(p.count * max(p.wire, p.own) for p in params) + filled * widest
    bucket = min(bucket, rows * ranks * widest)
    sums_of_one = bucket // (ranks * min(param.wire for param in params)) * 4
    return rows * 4 + sums_of_one + 2 * IN_FLIGHT * bucket


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


class GradientExchange:
    """Sends buckets in one order on every rank, and gives what comes back to their contents."""

    def __init__(
        self,
        ranks: Ranks,
        received: Callable[[Slot, torch.Tensor], None],
        contents: Callable[[], Iterable[SharedContent]],
    ) -> None:
        """`received(slot, slice)` takes the sum, over the ranks, of this rank's slice, in fp32.
        `contents()` returns the contents of all gradients."""
        self.ranks = ranks
        self._received = received
        self._contents = contents
        self._lane = ranks.lane("gradients")
        self._values = ranks.lane("gradient values")
        self._flying: list[tuple[Bucket, torch.Tensor, torch.Tensor, Work]] = []
        self._buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()  # buckets that were sent
        #: Called before the first of several buckets is sent, so that others give the ranks'
        #: buffers back.
        self.before: Callable[[], None] = lambda: None

    def send(self, bucket: Bucket, parts: Sequence[Taken | None], device: torch.device) -> None:
        """Sends a bucket. The parts may change when this returns."""
        if not self._flying:
            self.before()
        while len(self._flying) >= IN_FLIGHT:
            self._finish_one()
        self._buckets.add(bucket)
        count = self.ranks.size * bucket.row
        given = self.ranks.buffers.take(count, bucket.wire, device)
        taken = self.ranks.buffers.take(count, bucket.wire, device)
        rows = given.view(self.ranks.size, bucket.row)
        for i, part in enumerate(parts):
            bucket.fill(rows, i, part)
        work = self._lane.all_to_all(taken, given)
        self._flying.append((bucket, taken, given, work))

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
        self.ranks.buffers.give_back(given)
        found = bucket.sums(taken.view(self.ranks.size, bucket.row), self.ranks.rank)
        self.ranks.buffers.give_back(taken)
        for slot, own in zip(bucket.slots, found, strict=True):
            if own is not None:
                self._received(slot, own)

    # The methods below read gradients: all ranks call each of them together.

    def gathered(self, content: SharedContent) -> torch.Tensor:
        """Returns the whole gradient, gathered from the ranks' slices."""
        own = torch.zeros(content.cut.slice, dtype=torch.float32, device=content.device)
        if content.slice is not None:
            own[: content.slice.numel()] = content.slice
        every = torch.empty(self.ranks.size * len(own), dtype=torch.float32, device=content.device)
        self._values.all_gather(every, own).wait()
        whole = every[: content.cut.count] * content.slice_scale
        return whole.view(content.shape).to(content.dtype)

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

    def _find_norms(self, contents: Sequence[SharedContent], order: float) -> None:
        own = [content.own() for content in contents]
        local = [
            float(torch.linalg.vector_norm(part, order)) if part is not None and len(part) else 0.0
            for part in own
        ]
        if math.isinf(order):
            found = self.ranks.largest(local, "the norm of gradients")
        else:
            found = self.ranks.sums([norm * norm for norm in local], "the norm of gradients").sqrt().tolist()
        for content, norm in zip(contents, found, strict=True):
            content.norms[order] = norm
