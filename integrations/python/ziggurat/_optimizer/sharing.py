# SPDX-License-Identifier: Apache-2.0
"""How an optimizer's parameters and state are divided among the ranks of a job.

``Alone``: one process has everything. ``Divided``: every rank has all parameters, and a slice of
each parameter's state. ``Sharded``: FSDP2 has divided the parameters, and each rank has the state
of its shards.
"""

from __future__ import annotations

import contextlib
import gc
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ziggurat._exchange.feeders import Feeder
from ziggurat._exchange.fsdp import FsdpCarriers
from ziggurat._exchange.param_gather import ParamGather
from ziggurat._exchange.parts import Part, Shard, Slice, checksum_of
from ziggurat._gradients.gradient_content import Slot
from ziggurat._library.native import InvalidArgument, Runtime
from ziggurat._optimizer.opened import Opened, runtime_of
from ziggurat._pytorch.dtensor import is_dtensor, is_first_copy, like, local_of
from ziggurat._ranks.ranks import Ranks, several_ranks
from ziggurat._streaming.streaming import kept_by_engine, values_of


_Found = TypeVar("_Found")
Named = tuple[str, torch.Tensor]  # a parameter and its name


class Alone:
    """The sharing of a job with one process, which has everything."""

    ranks: Ranks | None = None
    feeder: Feeder | None = None

    def runtime(self, threads: int) -> Runtime:
        """Returns the runtime on which engines are opened."""
        return runtime_of(threads) if self.ranks is None else self.ranks.runtime

    def run(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
        """Returns a text that must be the same on all ranks, and on the ranks that resume a
        store."""
        if self.ranks is None:
            return ""
        text = "".join(
            f"{name} {tuple(param.shape)} {param.dtype} {getattr(param, 'placements', '')}\n"
            for name, param in zip(names, params, strict=True)
        )
        divided = type(self).__name__.lower()
        groups = "" if self.ranks.replicas == 1 else f" shard_group={self.ranks.shards}"
        return f"ranks={self.ranks.size}{groups} parameters={divided} model={zlib.crc32(text.encode()):08x}"

    def part(self, param: torch.Tensor) -> Part:
        return Part(param)

    def whole_or_shard(self, tensor: torch.Tensor) -> Part:
        """Returns this process's part of a tensor that no engine has."""
        return Part(tensor)

    def saves(self, tensor: torch.Tensor, trained: bool) -> bool:
        """Returns whether this process saves its part of `tensor`, because it has the part's first
        copy."""
        if self.ranks is None:
            return True
        return self.ranks.replica == 0 if trained else self.ranks.rank == 0

    def attach(self, slots: Iterable[Slot]) -> None:
        """Called when the optimizer gets parameters."""
        for slot in slots:
            if self.feeder is not None:
                self.feeder.attach(slot)

    def before_open(self, trained: Sequence[Named], beside: Sequence[torch.Tensor]) -> None:
        """Errors: InvalidArgument if DDP has reduced gradients that this optimizer had already
        taken."""
        if several_ranks() and (wrapped := _ddp_of({param for _, param in trained})) is not None:
            raise InvalidArgument(
                f"{type(wrapped).__name__} has reduced gradients that this optimizer had already "
                "taken: "
                "give the optimizer model=model with the wrapped model, or call "
                "optimizer.attach_ddp(model) before the first backward"
            )

    def all_of(self, holds: bool) -> bool:
        """Returns whether `holds` is true on every rank."""
        return holds if self.ranks is None else self.ranks.largest([not holds]) == [0.0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Returns for each flag whether it is true on at least one rank."""
        if self.ranks is None or not flags:
            return list(flags)
        return [found > 0 for found in self.ranks.largest(flags)]

    def told(self, what: Any) -> list[Any]:
        """Returns what each rank has given, as plain data, in the order of the ranks."""
        return [what] if self.ranks is None else self.ranks.told(what)

    def require_alike(self, call: str, given: str) -> None:
        """Does what Ranks.require_alike() does."""
        if self.ranks is not None:
            self.ranks.require_alike(call, given)

    def together(self, what: str, work: Callable[[], _Found]) -> _Found:
        """Returns what `work`, which calls no other rank, returns on this rank, once it has ended
        on all. Errors: this rank's own; Unavailable, which tells another rank's error."""
        return work() if self.ranks is None else self.ranks.together(what, work)

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns what rank 0 finds, as plain data. Errors: rank 0's, on every rank."""
        return decide() if self.ranks is None else self.ranks.decided(decide)

    def opened(self, opened: Opened) -> None:
        """Called when an engine has been opened."""
        if self.ranks is None or not opened.engine.resumed:
            return
        # The store of a rank that has no part of a parameter does not have its number of steps.
        steps = self.ranks.largest([opened.steps_of(param) for param in opened.members])
        for param, made in zip(opened.members, steps, strict=True):
            if opened.index(param) is None:
                opened.set_steps(param, int(made))

    def exchange_bytes(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Returns the bytes that this process has taken to exchange `params`, and the most that it
        will take."""
        return 0, 0

    def check_gradients(self) -> None:
        """Checks at a step that gradients were exchanged. Errors: InvalidArgument if not."""

    def publish(self, updated: Sequence[torch.Tensor], beside: bool) -> None:
        """Gives all ranks the `updated` parameters, which the engine is writing: beside what the
        caller does next, or before this returns."""

    def checksum(self, params: Iterable[torch.Tensor]) -> int:
        checksum = 0
        for param in params:
            checksum = checksum_of(self.values(param), checksum)
        return checksum

    def wait(self, param: torch.Tensor) -> None:
        """Returns when the other ranks' parts of `param` have the values of the newest step."""

    def finish(self) -> None:
        """Waits for all parameters."""

    def whole_state(self, opened: Opened, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns state `name` of the whole `param`, in fp32."""
        return opened.read_state(param, name)

    def values(self, param: torch.Tensor) -> torch.Tensor:
        """Returns this process's part of `param`."""
        return values_of(param)

    def close(self) -> None:
        pass

    def waiting(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Makes a call of the engine within that all ranks make."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.waiting(call)


class Divided(Alone):
    """The sharing in which every rank has a slice of each state, and all parameters (ZeRO-1, 2), or
    slices of those that the engines keep (ZeRO-3)."""

    ranks: Ranks
    feeder: Feeder

    def __init__(
        self, ranks: Ranks, feeder: Feeder, updated: Callable[[torch.Tensor], None]
    ) -> None:
        """`updated(param)` returns when the engine has written this rank's slice."""
        self.ranks = ranks
        self.feeder = feeder
        self._gather = ParamGather(ranks, updated)
        feeder.exchange.before = self._gather.finish

    def part(self, param: torch.Tensor) -> Part:
        return Slice(param, self.ranks)

    def before_open(self, trained: Sequence[Named], beside: Sequence[torch.Tensor]) -> None:
        params = [param for _, param in trained]
        kept = any(kept_by_engine(param) is not None for param in params)
        if kept and (wrapped := _ddp_of(set(params))) is not None:
            raise InvalidArgument(
                f"{type(wrapped).__name__} was given an offloaded model, whose gradients it would hold whole: leave it "
                "out, because offload() divides the model among all ranks"
            )
        names = self.ranks.told([name for name, _ in trained], "open()")
        for rank, others in enumerate(names):
            if differs := sorted(set(others) ^ set(names[0])):
                one, other = (0, rank) if differs[0] in names[0] else (rank, 0)
                raise InvalidArgument(
                    f"rank {one} trains parameter '{differs[0]}', which rank {other} does not: set requires_grad "
                    "alike on all ranks"
                )
        every = self.ranks.gathered([self.checksum([*params, *beside])], "open()")[:, 0].tolist()
        if len(set(every)) > 1:
            other = next(rank for rank, sum_ in enumerate(every) if sum_ != every[0])
            raise InvalidArgument(
                f"the parameters of rank {other} differ from those of rank 0: begin with the same "
                "values on all ranks, by the same seed, the same checkpoint, or a broadcast"
            )

    def opened(self, opened: Opened) -> None:
        super().opened(opened)
        if opened.engine.resumed:
            self._gather.run(_with_memory(opened.members))
        if opened.keeps:
            self.ranks.meet("the opening of the engine")  # before another rank reads slices that this one has not written yet

    def exchange_bytes(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        return self.feeder.exchange.held_bytes, self.feeder.planned_bytes(params)

    def check_gradients(self) -> None:
        self.feeder.check_sent()

    def publish(self, updated: Sequence[torch.Tensor], beside: bool) -> None:
        gathered = _with_memory(updated)
        if beside:
            self._gather.begin(gathered)
        else:
            self._gather.run(gathered)

    def wait(self, param: torch.Tensor) -> None:
        self._gather.wait(param)

    def finish(self) -> None:
        self._gather.finish()

    def whole_state(self, opened: Opened, param: torch.Tensor, name: str) -> torch.Tensor:
        values = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        cut = self.ranks.cut(param.numel())
        for shard in range(self.ranks.shards):
            its = values[cut.of(shard)]
            if shard == self.ranks.shard:
                its.copy_(opened.read_state(param, name))
            elif its.numel() > 0:
                opened.read_state_of(self.ranks.with_shard(shard), param, name, its)
        return values.view(param.shape)

    def close(self) -> None:
        self.feeder.detach()
        self.ranks.part()
        self.ranks.close()


def _with_memory(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those that have all values on each rank: the engines keep the others, and bring them when
    they are used."""
    return [param for param in params if kept_by_engine(param) is None]


class Sharded(Alone):
    """FSDP2 makes parameters DTensors: each rank has shards, which FSDP2 gathers."""

    ranks: Ranks

    def __init__(self, ranks: Ranks, model: torch.nn.Module | None) -> None:
        self.ranks = ranks
        self._carriers = None if model is None else FsdpCarriers(model, ranks)

    def part(self, param: torch.Tensor) -> Part:
        return Shard(param) if is_dtensor(param) else Part(param)

    def whole_or_shard(self, tensor: torch.Tensor) -> Part:
        return self.part(tensor)

    def saves(self, tensor: torch.Tensor, trained: bool) -> bool:
        return is_first_copy(tensor) if is_dtensor(tensor) else self.ranks.rank == 0

    def before_open(self, trained: Sequence[Named], beside: Sequence[torch.Tensor]) -> None:
        pass

    def whole_state(self, opened: Opened, param: torch.Tensor, name: str) -> torch.Tensor:
        values = super().whole_state(opened, param, name)
        if not is_dtensor(param):
            return values
        return like(param, values.view(local_of(param).shape))

    def values(self, param: torch.Tensor) -> torch.Tensor:
        return self.part(param).memory().detach()

    def exchange_bytes(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        planned = 0 if self._carriers is None else self._carriers.largest_bytes
        return self.ranks.buffers.held_bytes, planned

    def close(self) -> None:
        if self._carriers is not None:
            self._carriers.close()


def _ddp_of(params: set[torch.Tensor]) -> DistributedDataParallel | None:
    for found in gc.get_objects():
        if isinstance(found, DistributedDataParallel) and params & set(found.parameters()):
            return found
    return None


def active_ddp() -> DistributedDataParallel | None:
    """Returns the module whose forward runs in this thread."""
    found: DistributedDataParallel | None = getattr(
        DistributedDataParallel, "_active_ddp_module", None
    )
    return found


def group_of_meshes(params: Iterable[torch.Tensor]) -> Any:
    """Returns the group of all ranks that have a part of a DTensor in `params`, or None without
    DTensors."""
    members: set[int] = set()
    for param in params:
        if is_dtensor(param):
            mesh: Any = param.device_mesh  # type: ignore[attr-defined]
            members.update(mesh.mesh.flatten().tolist())
    if not members:
        return None
    if len(members) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(sorted(members), use_local_synchronization=True)
