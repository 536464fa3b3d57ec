# SPDX-License-Identifier: Apache-2.0
"""How an optimizer's parameters and state lie on the ranks of a job.

``Alone``: one process has all. ``Divided``: every rank has all parameters, and a slice of each
one's state. ``Sharded``: FSDP2 has divided the parameters, and each rank's state is that of its
shards.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ziggurat._dtensor import is_dtensor, is_first_copy, like, local_of
from ziggurat._feeders import Feeder
from ziggurat._fsdp import FsdpCarriers
from ziggurat._gradient_content import Slot
from ziggurat._native import InvalidArgument, Runtime
from ziggurat._opened import Opened, runtime_of
from ziggurat._param_gather import ParamGather
from ziggurat._parts import Part, Shard, Slice
from ziggurat._ranks import Cut, Ranks


_Found = TypeVar("_Found")


class Alone:
    """One process has all."""

    ranks: Ranks | None = None
    feeder: Feeder | None = None

    def runtime(self, threads: int) -> Runtime:
        """That engines are opened on."""
        return runtime_of(threads) if self.ranks is None else self.ranks.runtime

    def run(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
        """What must be the same on all ranks, and for a store on those that resume it."""
        if self.ranks is None:
            return ""
        text = "".join(
            f"{name} {tuple(param.shape)} {param.dtype} {getattr(param, 'placements', '')}\n"
            for name, param in zip(names, params, strict=True)
        )
        divided = type(self).__name__.lower()
        return f"ranks={self.ranks.size} parameters={divided} model={zlib.crc32(text.encode()):08x}"

    def part(self, param: torch.Tensor) -> Part:
        return Part(param)

    def whole_or_shard(self, tensor: torch.Tensor) -> Part:
        """What this process has of a tensor that no engine does."""
        return Part(tensor)

    def saves(self, tensor: torch.Tensor, trained: bool) -> bool:
        """Whether what this process has of it is the first copy of that."""
        return trained or self.ranks is None or self.ranks.rank == 0

    def attach(self, slots: Iterable[Slot]) -> None:
        """The optimizer has got parameters."""
        for slot in slots:
            if self.feeder is not None:
                self.feeder.attach(slot)

    def before_open(self, params: Iterable[torch.Tensor]) -> None:
        """Errors: InvalidArgument where DDP has reduced gradients that this optimizer had taken."""
        if several_ranks() and (wrapped := _ddp_of(set(params))) is not None:
            raise InvalidArgument(
                f"{type(wrapped).__name__} has reduced gradients that this optimizer had taken: "
                "give the optimizer model=model with the wrapped model, or call "
                "optimizer.attach_ddp(model) before the first backward"
            )

    def all_of(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        return holds if self.ranks is None else self.ranks.largest([not holds]) == [0.0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each whether it holds on some rank."""
        if self.ranks is None or not flags:
            return list(flags)
        return [found > 0 for found in self.ranks.largest(flags)]

    def told(self, what: Any) -> list[Any]:
        """What every rank has given: plain data, in their order."""
        return [what] if self.ranks is None else self.ranks.told(what)

    def together(self, what: str, work: Callable[[], _Found]) -> _Found:
        """What `work` gives here, which calls no other rank, once it has ended on all of them.
        Errors: its own; Unavailable, which says what another rank's was."""
        return work() if self.ranks is None else self.ranks.together(what, work)

    def decided(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 finds: plain data. Errors: its own, on every rank."""
        return decide() if self.ranks is None else self.ranks.decided(decide)

    def opened(self, params: Sequence[torch.Tensor], resumed: bool) -> None:
        """The engine of `params` has been opened."""

    def exchange_bytes(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        """What this process has taken for `params` to exchange, and the most that it will."""
        return 0, 0

    def check_gradients(self) -> None:
        """At a step."""

    def publish(self, updated: Sequence[torch.Tensor], beside: bool) -> None:
        """`updated` are being written; `beside` what the caller does next, or before it returns."""

    def checksum(self, params: Iterable[torch.Tensor]) -> int:
        checksum = 0
        for param in params:
            flat = self.values(param).reshape(-1).view(torch.uint8).cpu()
            checksum = zlib.crc32(flat.numpy().data, checksum)
        return checksum

    def wait(self, param: torch.Tensor) -> None:
        """Returns when all of `param` is that of the newest step, but for this rank's part."""

    def finish(self) -> None:
        """wait() for all."""

    def whole_state(self, opened: Opened, param: torch.Tensor, name: str) -> torch.Tensor:
        """State `name` of all of `param`, in fp32."""
        return opened.read_state(param, name)

    def values(self, param: torch.Tensor) -> torch.Tensor:
        """What this process has of it."""
        return param.detach()

    def close(self) -> None:
        pass


class Divided(Alone):
    """Every rank has all parameters, and of each one's state a slice (ZeRO-1 and 2)."""

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

    def before_open(self, params: Iterable[torch.Tensor]) -> None:
        every = self.ranks.gathered([self.checksum(params)])[:, 0].tolist()
        if len(set(every)) > 1:
            other = next(rank for rank, sum_ in enumerate(every) if sum_ != every[0])
            raise InvalidArgument(
                f"the parameters of rank {other} are not those of rank 0: begin with the same on "
                "all ranks, by the same seed, the same checkpoint, or a broadcast"
            )

    def opened(self, params: Sequence[torch.Tensor], resumed: bool) -> None:
        if resumed:
            self._gather.run(params)

    def exchange_bytes(self, params: Sequence[torch.Tensor]) -> tuple[int, int]:
        return self.feeder.exchange.held_bytes, self.feeder.planned_bytes(params)

    def check_gradients(self) -> None:
        self.feeder.check_sent()

    def publish(self, updated: Sequence[torch.Tensor], beside: bool) -> None:
        if beside:
            self._gather.begin(updated)
        else:
            self._gather.run(updated)

    def wait(self, param: torch.Tensor) -> None:
        self._gather.wait(param)

    def finish(self) -> None:
        self._gather.finish()

    def whole_state(self, opened: Opened, param: torch.Tensor, name: str) -> torch.Tensor:
        values = torch.empty(param.numel(), dtype=torch.float32)
        cut = Cut(param.numel(), self.ranks.size)
        for rank in range(self.ranks.size):
            its = values[cut.of(rank)]
            if rank == self.ranks.rank:
                its.copy_(opened.read_state(param, name))
            elif its.numel() > 0:
                opened.read_state_of(rank, param, name, its)
        return values.view(param.shape)

    def close(self) -> None:
        self.feeder.detach()
        self.ranks.part()


class Sharded(Alone):
    """FSDP2's parameters are DTensors: each rank has shards, which FSDP2 gathers."""

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

    def before_open(self, params: Iterable[torch.Tensor]) -> None:
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


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _ddp_of(params: set[torch.Tensor]) -> DistributedDataParallel | None:
    for found in gc.get_objects():
        if isinstance(found, DistributedDataParallel) and params & set(found.parameters()):
            return found
    return None


def active_ddp() -> DistributedDataParallel | None:
    """That whose forward is under way in this thread."""
    found: DistributedDataParallel | None = getattr(
        DistributedDataParallel, "_active_ddp_module", None
    )
    return found


def group_of_meshes(params: Iterable[torch.Tensor]) -> Any:
    """The ranks of all DTensors among `params`, be it one; None where there are none."""
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
