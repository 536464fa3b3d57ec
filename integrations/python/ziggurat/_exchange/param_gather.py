# SPDX-License-Identifier: Apache-2.0
"""Gives all ranks the new parameters: each rank has updated its slices and gets the other ranks'
slices.

Buckets are sent in the order of the model's forward, the same on every rank, each as soon as the
engine has written it. That happens in ``step()``, or in a separate thread beside the next forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set

import torch

from ziggurat._exchange.exchange import BUCKET_BYTES, IN_FLIGHT
from ziggurat._exchange.parts import flat, flat_written
from ziggurat._ranks.buffers import Buffers
from ziggurat._ranks.ranks import GATHERS, Ranks, Work


class _Flight:
    """The transfer of one bucket of parameters."""

    def __init__(self, params: Sequence[torch.Tensor], ranks: Ranks, buffers: Buffers) -> None:
        self.params = params
        self._shard = ranks.shard
        self._cuts = [ranks.cut(param.numel()) for param in params]
        row = sum(cut.slice for cut in self._cuts)
        dtype, device = params[0].dtype, params[0].device
        self.given = buffers.take(row, dtype, device)
        self.taken = buffers.take(ranks.shards * row, dtype, device)
        self.work: Work | None = None

    def pack(self) -> None:
        at = 0
        for param, cut in zip(self.params, self._cuts, strict=True):
            own = flat(param)[cut.of(self._shard)]
            self.given[at : at + own.numel()].copy_(own)
            at += cut.slice

    def unpack(self, shards: int) -> None:
        rows, at = self.taken.view(shards, -1), 0
        for param, cut in zip(self.params, self._cuts, strict=True):
            # Does not write through the parameter itself, because PyTorch would count that as a
            # write by somebody else.
            values = flat(param).data
            for shard in range(shards):
                its = cut.of(shard)
                if shard != self._shard and its.stop > its.start:
                    values[its].copy_(rows[shard, at : at + its.stop - its.start])
            flat_written(param)
            at += cut.slice


class ParamGather:
    """Gathers parameters in the order of the model's forward."""

    def __init__(self, ranks: Ranks, updated: Callable[[torch.Tensor], None]) -> None:
        """`updated(param)` returns when the engine has written this rank's slice."""
        self._ranks = ranks
        self._lane = ranks.group_lane("parameters")
        self._updated = updated
        self._done: dict[torch.Tensor, threading.Event] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def run(self, params: Sequence[torch.Tensor]) -> None:
        """Returns when all ranks have all of `params`."""
        flying: list[_Flight] = []
        for bucket in _buckets(params):
            for param in bucket:
                self._updated(param)
            if len(flying) >= IN_FLIGHT:
                self._land(flying.pop(0))
            flight = _Flight(bucket, self._ranks, self._ranks.buffers)
            flight.pack()
            flight.work = self._lane.all_gather(flight.taken, flight.given)
            flying.append(flight)
        for flight in flying:
            self._land(flight)

    def _land(self, flight: _Flight) -> None:
        assert flight.work is not None
        flight.work.wait()
        with torch.no_grad():
            flight.unpack(self._ranks.shards)
        self._ranks.buffers.give_back(flight.given)
        self._ranks.buffers.give_back(flight.taken)
        for param in flight.params:
            if param in self._done:
                self._done[param].set()

    def begin(self, params: Sequence[torch.Tensor]) -> None:
        """Begins run() in a thread; wait() then waits for one parameter."""
        self._done = {param: threading.Event() for param in params}
        self._thread = threading.Thread(
            target=self._run_all, args=(params,), name=GATHERS, daemon=True
        )
        self._thread.start()

    def _run_all(self, params: Sequence[torch.Tensor]) -> None:
        try:
            self.run(params)
        except BaseException as failure:  # noqa: BLE001: told to whoever waits
            self._failure = failure
        for done in list(self._done.values()):
            done.set()

    @property
    def pending(self) -> Set[torch.Tensor]:
        return self._done.keys()

    def wait(self, param: torch.Tensor) -> None:
        """Waits for a parameter. Errors: those of the gathering."""
        done = self._done.get(param)
        if done is None:
            return
        done.wait()
        del self._done[param]
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        for param in list(self._done):
            self.wait(param)
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _buckets(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups the parameters, in order, into buckets of one type and device: the same on every
    rank."""
    buckets: list[list[torch.Tensor]] = []
    size_bytes = 0
    for param in params:
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (param.dtype, param.device)
        if not alike or size_bytes >= BUCKET_BYTES:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(param)
        size_bytes += param.numel() * param.element_size()
    return buckets
