# SPDX-License-Identifier: Apache-2.0
"""The part of an engine's optimizer that finds the ranks of a job and shares work with them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ziggurat._device import workers_beside
from ziggurat._feeders import BackwardFeeder, DdpFeeder, ddp_hook
from ziggurat._gradient import GradientHooks
from ziggurat._gradient_content import Slot
from ziggurat._native import (
    InvalidArgument,
    Runtime,
    ZigguratError,
    stored_params,
    stored_wholes,
)
from ziggurat._opened import Opened
from ziggurat._placement import has_store
from ziggurat._ranks import BLOCK, Ranks, several_ranks
from ziggurat._sharing import Alone, Divided, Sharded, active_ddp, group_of_meshes
from ziggurat._streaming import streaming_around


class AmongRanks:
    """The part of an engine's optimizer that knows the other ranks."""

    _hooks: GradientHooks
    _opened: list[Opened]
    _order: list[torch.Tensor]
    _threads: int
    _path: str | None
    _settings: dict[str, Any]
    _exchange: str
    _model: torch.nn.Module | None
    _sharing: Alone
    _group: Any  #: what the optimizer was given
    _reduce_dtype: torch.dtype | None
    _watches_for_ddp = False  #: whether the model may yet be wrapped in DDP

    ddp_attached: Callable[[], None]

    def _awaits_ddp(self) -> bool:
        return self._watches_for_ddp and self._sharing.ranks is None

    def _slots(self) -> list[Slot]:
        """Returns the slots of all parameters, in the model's order."""
        raise NotImplementedError

    def _param_of(self, slot: Slot) -> torch.Tensor:
        raise NotImplementedError

    def _updated(self, param: torch.Tensor) -> None:
        """Returns when the engine has written this rank's part of `param`. Any thread may call
        it."""
        raise NotImplementedError

    def _divide(self, ddp: Any, group: Any, reduce_dtype: torch.dtype | None) -> None:
        """Finds at construction which ranks there are and what each of them holds."""
        mesh = group_of_meshes(self._order)
        if mesh is not None:
            self._sharing = Sharded(self._ranks(mesh), self._model)
        elif ddp is not None:
            self.attach_ddp(ddp)
        elif group is not None and dist.get_world_size(group) > 1:
            ranks = self._ranks(group)
            feeder = BackwardFeeder(ranks, self._param_of, self._slots, reduce_dtype)
            self._sharing = Divided(ranks, feeder, self._updated)
            self._hooks.content = feeder.content

    def share_offloaded(self) -> None:
        """Divides an offloaded model among all ranks before its engine opens, unless the optimizer was
        given a group. All ranks call it."""
        if self._group is not None or self._sharing.ranks is not None or not several_ranks():
            return
        if streaming_around(self._order) is not None:
            self._divide(None, dist.group.WORLD, self._reduce_dtype)
            self._sharing.attach(self._slots())

    def _ranks(self, group: Any) -> Ranks:
        ranks = Ranks(group, self._workers(self._order), self._exchange)
        if self._settings["state_format"] == "8bit" and not ranks.decided(
            lambda: self._cuts_blocks(ranks.runtime)
        ):
            ranks.line = BLOCK
        return ranks

    def _cuts_blocks(self, runtime: Runtime) -> bool:
        """Returns whether there is a store of 8 bits whose slices do not end where blocks do, as
        earlier versions made them. Looks at the slices of rank 0, which begin at 0."""
        if self._path is None or not has_store(self._path):
            return False
        settings = {"store": self._path}
        try:
            wholes, stored = stored_wholes(runtime, settings), stored_params(runtime, settings)
        except ZigguratError:
            return False  # opening the store says what is wrong with it
        if wholes is None or len(wholes) != len(stored):
            return True
        parts = [math.prod(shape) for _, shape in stored]
        counts = [math.prod(shape) for _, shape in wholes]
        return any(
            part % BLOCK != 0 and part != whole for part, whole in zip(parts, counts, strict=True)
        )

    def _workers(self, params: Iterable[torch.Tensor]) -> int:
        return self._threads or workers_beside(list(params))

    def attach_ddp(self, model: DistributedDataParallel) -> None:
        """Exchanges gradients in `model`'s backward. Call it before the first backward if the model
        was wrapped after the optimizer was made; otherwise give the model to the constructor:
        ``model=model``."""
        if dist.get_world_size(model.process_group) == 1:
            return
        if self._opened:
            raise InvalidArgument(
                "the optimizer's state was already opened for this process alone: wrap the model "
                "in "
                "DistributedDataParallel before the first step, and before Resume"
            )
        ranks = self._ranks(model.process_group)
        feeder = DdpFeeder(ranks, self._param_of, self._slots, self._hooks.slot, model)
        self._hooks.lending = False
        self._sharing = Divided(ranks, feeder, self._updated)
        self._sharing.attach(self._slots())
        model.register_comm_hook(weakref.ref(feeder), ddp_hook)
        self._watches_for_ddp = False
        self.ddp_attached()

    def _watch_for_ddp(self, model: torch.nn.Module) -> None:
        """Attaches to the model at its first forward in DDP, because Accelerate and Trainer wrap it
        after the optimizer was made. Before that they may evaluate the model as it is."""
        this = weakref.ref(self)

        self._watches_for_ddp = True

        def attach(*_: Any) -> None:
            optimizer, ddp = this(), active_ddp()
            waits = optimizer is not None and type(optimizer._sharing) is Alone
            if waits and ddp is None:
                return
            handle.remove()
            if waits:
                optimizer.attach_ddp(ddp)

        handle = model.register_forward_pre_hook(attach)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backwards inside only add to this rank's gradients; nothing is sent to ``group``."""
        feeder = self._sharing.feeder
        with feeder.no_sync() if isinstance(feeder, BackwardFeeder) else contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Calls ``loss.backward()``. Sends fewer bytes than that where checkpointing is
        reentrant."""
        feeder = self._sharing.feeder
        alone = contextlib.nullcontext()
        with feeder.whole_backward() if isinstance(feeder, BackwardFeeder) else alone:
            loss.backward(**arguments)
