# SPDX-License-Identifier: Apache-2.0
"""The part of an engine's optimizer that finds the ranks of a job and shares work with them."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ziggurat._exchange.feeders import BackwardFeeder, DdpFeeder, ddp_hook
from ziggurat._gradients.engine_content import EngineSums
from ziggurat._gradients.gradient import GradientHooks
from ziggurat._gradients.gradient_content import Slot
from ziggurat._library.native import (
    InvalidArgument,
    Runtime,
    ZigguratError,
    stored_params,
    stored_wholes,
)
from ziggurat._library.standard_error import stderr
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.placement import has_store
from ziggurat._optimizer.device import workers_beside
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.sharing import Alone, Divided, Sharded, active_ddp, group_of_meshes
from ziggurat._plan.from_ranks import Wire
from ziggurat._ranks.codes import BITS, Codes, grid_of
from ziggurat._ranks.cuts import BLOCK, check_hpz
from ziggurat._ranks.ranks import Ranks, several_ranks
from ziggurat._streaming.streaming import streaming_around

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator


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
    _shard_group: int | None
    hpz: int | None
    quantized_weights: bool | str
    quantized_gradients: int | None
    _ranks_per_node: int | None
    _watches_for_ddp = False  #: whether the model may yet be wrapped in DDP

    ddp_attached: Callable[[], None]

    def _awaits_ddp(self) -> bool:
        return self._watches_for_ddp and self._sharing.ranks is None

    def _slots(self) -> list[Slot]:
        """Returns the slots of all parameters, in the model's order."""
        raise NotImplementedError

    def _param_of(self, slot: Slot) -> torch.Tensor:
        raise NotImplementedError

    def _sums_of(self, slot: Slot) -> tuple[EngineSums, int] | None:
        """Returns what sums this rank's slices of a gradient in files, and the parameter's index there."""
        raise NotImplementedError

    def _updated(self, param: torch.Tensor) -> None:
        """Returns when the engine has written this rank's part of `param`. Any thread may call
        it."""
        raise NotImplementedError

    def _divide(self, ddp: Any, group: Any, reduce_dtype: torch.dtype | None) -> None:
        """Finds at construction which ranks there are and what each of them holds."""
        mesh = group_of_meshes(self._order)
        self._check_given(mesh is not None)
        if mesh is not None:
            self._sharing = Sharded(self._ranks(mesh), self._model)
        elif ddp is not None:
            self.attach_ddp(ddp)
        elif group is not None and dist.get_world_size(group) > 1:
            ranks = self._ranks(group)
            this = weakref.ref(self)
            feeder = BackwardFeeder(ranks, *_seen_from_gradients(this), reduce_dtype, self._accelerator)
            feeder.place_of = lambda slot: None if (own := this()) is None else own._sums_of(slot)
            self._sharing = Divided(ranks, feeder, _waits_for(this))
            self._hooks.content = feeder.content

    def _check_given(self, in_mesh: bool) -> None:
        """Errors: InvalidArgument for shard_group or hpz where they divide nothing."""
        self._check_quantized(in_mesh)
        for name, value in (("shard_group", self._shard_group), ("hpz", self.hpz)):
            if value is not None and in_mesh:
                raise InvalidArgument(
                    f"{name}={value}: FSDP2 has divided the parameters by its mesh, which says what ranks have copies: "
                    f"leave {name} out"
                )
            if value is not None and not several_ranks():
                raise InvalidArgument(
                    f"{name}={value}: torch.distributed has one rank, so that nothing is divided: start several ranks, "
                    f"or leave {name} out"
                )

    def wire(self, ranks: Ranks) -> Wire:
        """Returns how `ranks` send each other parameters and gradients."""
        codes = ranks.codes
        weights = self.quantized_weights if ranks.shards > 1 else False
        return Wire(weights) if codes is None else Wire(weights, codes.bits, codes.grid)

    def _check_quantized(self, in_mesh: bool) -> None:
        """Errors: InvalidArgument for values of quantized_weights and quantized_gradients that mean nothing, or
        where others exchange. Says that they change nothing on one rank."""
        weights, bits = self.quantized_weights, self.quantized_gradients
        if not isinstance(weights, bool) and weights != "frozen":
            raise InvalidArgument(f'quantized_weights={weights!r}: give True, False, or "frozen" for frozen parameters alone')
        if bits is not None and (type(bits) is not int or bits not in BITS):
            raise InvalidArgument(f"quantized_gradients={bits!r} is not supported: give 4 or 8 bits, or leave it out")
        if bits is not None and self._reduce_dtype is not None:
            raise InvalidArgument(
                f"reduce_dtype={self._reduce_dtype} and quantized_gradients={bits} cannot be used together: give only "
                "one of them"
            )
        self._check_ranks_per_node()
        given = self._quantized()
        if given and in_mesh:
            raise InvalidArgument(f"{given}: FSDP2 exchanges parameters and gradients itself: leave it out")
        if given and not several_ranks():
            print(f"ziggurat: {given} changes nothing, because one rank sends nothing", file=stderr())

    def _check_ranks_per_node(self) -> None:
        per_node = self._ranks_per_node
        if per_node is None:
            return
        if type(per_node) is not int or per_node < 1:
            raise InvalidArgument(
                f"ranks_per_node={per_node!r} is no number of ranks: give how many consecutive ranks a node has, or leave "
                "it out"
            )
        if self.quantized_gradients is None:
            raise InvalidArgument(
                f"ranks_per_node={per_node}: ranks sum by nodes for quantized_gradients alone: give that too, or leave "
                "ranks_per_node out"
            )

    def _quantized(self) -> str:
        """Returns which exchanges are asked to be quantized, in the words of their arguments."""
        given = [f"quantized_weights={self.quantized_weights!r}"] if self.quantized_weights else []
        given += [f"quantized_gradients={self.quantized_gradients}"] if self.quantized_gradients else []
        return ", ".join(given)

    def _check_not_offloaded(self) -> None:
        """Errors: InvalidArgument for what concerns an offloaded model's parameters alone."""
        if self.hpz is not None:
            raise InvalidArgument(
                f"hpz={self.hpz}: ranks keep copies of an offloaded model's parameters alone: call offload() before, or "
                "leave hpz out"
            )
        if self.quantized_weights and several_ranks():
            raise InvalidArgument(
                f"quantized_weights={self.quantized_weights!r}: ranks send each other an offloaded model's parameters "
                "alone in 8 bits: call offload() before, or leave quantized_weights out"
            )

    def check_divided(self) -> None:
        """Errors: InvalidArgument for shard_group or hpz of an optimizer that shares nothing with other ranks."""
        for name, value in (("shard_group", self._shard_group), ("hpz", self.hpz)):
            if value is not None and self._sharing.ranks is None:
                raise InvalidArgument(
                    f"{name}={value}: this optimizer has no other ranks to divide anything among: give it group= of "
                    f"several, or a model in DistributedDataParallel, or leave {name} out"
                )
        if (given := self._quantized()) and several_ranks() and self._sharing.ranks is None:
            raise InvalidArgument(
                f"{given}: this optimizer has no other ranks to exchange anything with: give it group= of several, or "
                "leave it out"
            )

    def share_offloaded(self) -> None:
        """Divides an offloaded model among all ranks before its engine opens, unless the optimizer was
        given a group. All ranks call it."""
        if self._group is not None or self._sharing.ranks is not None or not several_ranks():
            return
        if streaming_around(self._order) is not None:
            self._divide(None, dist.group.WORLD, self._reduce_dtype)
            self._sharing.attach(self._slots())

    def _ranks(self, group: Any) -> Ranks:
        ranks = Ranks(group, self._workers(self._order), self._exchange, self._shard_group)
        # Or they would wait for each other in lanes of groups that differ.
        bits, per_node = self.quantized_gradients, self._ranks_per_node
        if bits is not None and per_node is None:
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
        given = f"shard_group={ranks.shards}, hpz={self.hpz}"
        if self._quantized():
            given += f", {self._quantized()}, ranks_per_node={per_node}"
        ranks.require_alike("the optimizer", given)
        check_hpz(ranks.shards, self.hpz)
        if bits is not None:
            grid = grid_of(ranks.size, per_node, f"quantized_gradients={bits}")
            ranks.codes = Codes(bits, grid, ranks.runtime)
        if has_codes(self._settings["state_format"]) and not ranks.decided(
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
        return self._threads or workers_beside(list(params), self._accelerator)

    @property
    def _accelerator(self) -> Accelerator | None:
        """Returns what an offloaded model's units are brought to, if not to the CPU."""
        streaming = streaming_around(self._order)
        return None if streaming is None else streaming.accelerator

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
        this = weakref.ref(self)
        feeder = DdpFeeder(ranks, *_seen_from_gradients(this), self._hooks.slot, model)
        self._hooks.lending = False
        self._sharing = Divided(ranks, feeder, _waits_for(this))
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


# Gradients know the exchange that they are in, and an offloaded model the hooks that make them. C++ has both, so that
# an optimizer that they knew would stay for good.
def _seen_from_gradients(
    this: weakref.ref[AmongRanks],
) -> tuple[Callable[[Slot], torch.Tensor], Callable[[], list[Slot]]]:
    """Returns what gives a slot's parameter, and what gives all slots; none once the optimizer is no more."""

    def param_of(slot: Slot) -> torch.Tensor:
        own = this()
        if own is None:
            raise InvalidArgument(
                f"the optimizer of parameter '{slot.name}' is no more, so its gradient cannot be exchanged: keep the "
                "optimizer as long as the model is trained"
            )
        return own._param_of(slot)

    return param_of, lambda: [] if (own := this()) is None else own._slots()


def _waits_for(this: weakref.ref[AmongRanks]) -> Callable[[torch.Tensor], None]:
    def updated(param: torch.Tensor) -> None:
        own = this()
        if own is not None:
            own._updated(param)

    return updated
