# SPDX-License-Identifier: Apache-2.0
"""The base of ziggurat.torch's optimizers: all but the meaning of a group's settings."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._exchange.waits import ModuleWaits
from ziggurat._gradients.engine_content import EngineContent, EngineSums
from ziggurat._gradients.gradient import GradientHooks
from ziggurat._gradients.gradient_content import Content, Slot
from ziggurat._library.native import GroupStep, InvalidArgument, Unimplemented
from ziggurat._library.standard_error import on_terminal
from ziggurat._memory.placement import AUTO, parsed
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.reports import Reports
from ziggurat._optimizer.sharing import Alone
from ziggurat._pytorch.names import generated, names_alone, names_in
from ziggurat._pytorch.torch_private import in_backward, uncompiled
from ziggurat._ranks.ranks import several_ranks
from ziggurat._streaming.streaming import streaming_around, streaming_of

_NO_MEANING = ("foreach", "fused", "capturable", "differentiable")


_TAKES_PAIRS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def _require_order(params: Any) -> None:
    """Checks that the parameters have an order. PyTorch refuses a set only in a group. Errors:
    TypeError for a set."""
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "the parameters are given as a set, whose order differs from run to run, so saved "
            "state could go to other parameters: give a list"
        )


def _with_names(param_group: dict[str, Any]) -> dict[str, Any]:
    """Turns a group of (name, parameter) pairs into what torch.optim makes of it from PyTorch
    2.6 on."""
    params = param_group["params"]
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    pairs = [one for one in given if isinstance(one, tuple)]
    if not pairs:
        return param_group | {"params": given}
    if len(pairs) < len(given):
        raise InvalidArgument(
            "a group has some parameters with names and some without: give each as (name, "
            "parameter), or give no names"
        )
    names, params = zip(*pairs, strict=True)
    return param_group | {"params": list(params), "param_names": list(names)}


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Unimplemented(f"{what} is not supported yet")


def from_zero(**arguments: float) -> None:
    """Refuses values below 0, as PyTorch's constructors do."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise InvalidArgument(
                f"{name} is a tensor of {value.numel()} elements: give one number"
            )
        if not value >= 0:
            raise InvalidArgument(f"{name}={value}: give 0 or more")


class EngineOptimizer(Reports):
    """A ``torch.optim.Optimizer`` whose state is in an engine."""

    _kind: str

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        placement: str = "host",
        state_format: str = "fp32",
        state_rounding: str | None = None,
        param_rounding: str | None = None,
        threads: int = 0,
        host_memory: int | str | None = None,
        state: str = "full",
        model: torch.nn.Module | None = None,
        group: Any = None,
        shard_group: int | None = None,
        hpz: int | None = None,
        quantized_weights: bool | str = False,
        quantized_gradients: int | None = None,
        ranks_per_node: int | None = None,
        exchange: str = "torch",
        reduce_dtype: torch.dtype | None = None,
        maximize: bool = False,
        **flags: Any,
    ) -> None:
        for flag, value in flags.items():
            if flag not in _NO_MEANING:
                raise TypeError(f"{type(self).__name__}() has no argument '{flag}'")
            if value:
                warnings.warn(f"{flag}={value} has no effect, because the engine updates the "
                              f"parameters", stacklevel=3)
        self.placement = placement  #: what was given; after the first open(), what "auto" chose
        self._given_placement = placement
        self._tier, self._path = parsed(placement)
        self._threads = threads
        self._settings: dict[str, Any] = {
            "optimizer": self._kind,
            "state_format": state_format,
            "progress": on_terminal(),
        }
        if state_rounding is not None:
            self._settings["state_rounding"] = state_rounding
        if param_rounding is not None:
            self._settings["param_rounding"] = param_rounding
        if host_memory not in (None, AUTO):
            self._settings["host_memory"] = host_memory
        self.hpz = hpz  #: as it was given
        self.quantized_weights, self.quantized_gradients = quantized_weights, quantized_gradients  #: the same
        self._ranks_per_node = ranks_per_node
        self._closed = False
        # whether the state was given up for another state, which could not be loaded
        self._lost = False
        # figures of the last call of figures(), or of the opening
        self._figures: dict[str, int] = {}
        self._opened: list[Opened] = []
        self._opened_with: dict[torch.Tensor, Opened] = {}  # the engine of each parameter
        self._order: list[torch.Tensor] = []  # in the order of the hooks' indices
        self._slot_of: dict[torch.Tensor, Slot] = {}
        self._keep_state_in(state)
        self._resume: Any = None  # the ziggurat.torch.Resume of the run, if it has one
        self._save: Any = None  # the newest BackgroundSave
        self._load: Any = None  # what Opened takes, while load_checkpoint() opens
        this = weakref.ref(self)
        self._hooks = GradientHooks(lambda index: _arrived(this, index))
        self._hooks.content = functools.partial(_content_of, this)
        self._exchange = exchange
        self._group, self._reduce_dtype, self._shard_group = group, reduce_dtype, shard_group
        self._sharing = Alone()
        wrapped = model if isinstance(model, DistributedDataParallel) else None
        if wrapped is not None:
            model = wrapped.module
        self._model = model
        self._waits: ModuleWaits | None = None
        # The parameters' names. Compares with None, because `if model` would call len() of a model
        # that has it.
        params_of = {} if model is None else dict(model.named_parameters())
        short = {} if model is None else names_in(model, params_of)
        self._spelled = {param: name for name, param in params_of.items()}
        self._names = {param: short[name] for name, param in params_of.items()}
        # every parameter's name, found on demand
        self._called_by: dict[torch.Tensor, str] | None = None
        from_zero(lr=defaults["lr"], weight_decay=defaults["weight_decay"])
        from_zero(eps=defaults.get("eps", 0.0))
        _require_order(params)
        super().__init__(params, {**defaults, "maximize": maximize})
        self._divide(wrapped, group, reduce_dtype)
        self.share_offloaded()
        # A model that was offloaded waits for each unit when it acquires it.
        if model is not None and streaming_around(self._order) is None:
            self._waits = ModuleWaits(model, set(self._order), self._wait_for, self.synchronize)
            if several_ranks():
                self._watch_for_ddp(model)

    def _param_of(self, slot: Slot) -> torch.Tensor:
        return self._order[slot.index]

    def _slots(self) -> list[Slot]:
        """Returns the slots of all parameters, in the model's order."""
        return [self._slot_of[param] for param in self._in_order(self._order)]

    def _in_order(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Sorts the parameters in the model's order, because its forward waits for them in this
        order."""
        place: dict[torch.Tensor, int] = {param: i for i, param in enumerate(self._names)}
        return sorted(params, key=lambda param: place.get(param, len(place)))

    def _sums_of(self, slot: Slot) -> tuple[EngineSums, int] | None:
        opened = self._opened_with.get(self._order[slot.index])
        return None if opened is None else opened.sums_of(self._order[slot.index])

    def _updated(self, param: torch.Tensor) -> None:
        """Returns when the engine has written this rank's part of `param`. Any thread may call
        it."""
        opened = self._opened_with.get(param)
        if opened is not None:
            opened.wait_written(param)

    def _named(self) -> Iterable[tuple[str, torch.Tensor, int]]:
        """Yields name, parameter and group index."""
        called = self._called
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                yield called[param], param, index

    @property
    def _called(self) -> dict[torch.Tensor, str]:
        """Every parameter's name. The names depend on one another, so they are found once all
        groups are there."""
        if self._called_by is None:
            self._called_by = self._call_all()
        return self._called_by

    def _call_all(self) -> dict[torch.Tensor, str]:
        given = self._given_names()
        short = names_alone(list(given.values()))
        called = {}
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                name = given.get(param)
                if name is None or self._spelled.get(param) in (name, short[name]):
                    called[param] = self._names.get(param) or generated(index, i)
                else:
                    called[param] = short[name]
        return called

    def _given_names(self) -> dict[torch.Tensor, str]:
        """Returns the names as the script gave them."""
        return {
            param: name
            for group in self.param_groups
            for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _require_order(param_group["params"])
        super().add_param_group(param_group if _TAKES_PAIRS else _with_names(param_group))
        added = self.param_groups[-1]["params"]
        if len(set(added)) < len(added):
            # PyTorch would only warn, and make several steps.
            del self.param_groups[-1]
            raise InvalidArgument("a parameter is twice in its group: give each parameter once")
        self._called_by = None
        self._order.extend(added)
        self._attach(added)
        kept = {found[0] for found in map(streaming_of, added) if found is not None}
        around = None if kept else streaming_around(added)
        if around is not None and not around.is_open:
            kept = {around}
        for streaming in kept:
            streaming.optimizer = weakref.ref(self)

    def _attach(self, params: Sequence[torch.Tensor]) -> None:
        name_of = functools.partial(_name_of, weakref.ref(self))
        slots = self._hooks.attach((name_of, param) for param in params)
        self._slot_of.update(zip(params, slots, strict=True))
        if self._sharing.feeder is not None:
            self._sharing.attach(slots)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        """Returns the engine's settings for `group` in this step, from the group's PyTorch
        names."""
        step = GroupStep(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )
        if "betas" in group:
            step = replace(step, betas=(float(group["betas"][0]), float(group["betas"][1])))
        if "momentum" in group:
            step = replace(
                step,
                betas=(float(group["momentum"]), 0.0),
                dampening=float(group.get("dampening", 0.0)),
                nesterov=bool(group.get("nesterov", False)),
            )
        if "eps" in group:
            step = replace(step, eps=float(group["eps"]))
        return step

    @uncompiled  # a step is no part of what is compiled around it
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._resume is not None:
            self._resume.before_step()
        self._sharing.check_gradients()
        self.open()
        with contextlib.ExitStack() as waited:
            for opened in self._opened:
                waited.enter_context(opened.waited.step)
            self._step()
        self.compare_with_plan()
        return loss

    def _step(self) -> None:
        groups = [self._group_step(group) for group in self.param_groups]
        follows = self._resume is not None
        self.synchronize()
        stepped = [opened for opened in self._opened if opened.has_gradient()]
        for opened in stepped:
            with self._sharing.waiting("step()"):
                opened.step(groups, blob_follows=follows)
        # With all parameters on the CPU and state in host memory the update is short, so waiting at
        # each module beside PyTorch's computation is not worth it. Beside an accelerator it is.
        in_place = not any(opened.is_staged for opened in self._opened)
        beside = self._waits is not None and not (self._tier == "host" and in_place)
        if self._sharing.ranks is not None:
            trained = {param for opened in stepped for param in opened.members}
            updated = (p for p in self._order if p.grad is not None and p in trained)
            self._sharing.publish(self._in_order(updated), beside)
        if self._waits is not None and beside:
            with_gradient = [param for param in self._order if param.grad is not None]
            self._wait_for(self._waits.unseen(with_gradient))
        elif self._tier != "host" and any(opened.keeps for opened in self._opened):
            for opened in self._opened:
                opened.wait_but_for_kept()
        else:
            self.synchronize()
        if follows and stepped:
            self._resume.after_step()

    def _wait_for(self, params: Iterable[torch.Tensor]) -> None:
        if not any(opened.pending for opened in self._opened):
            return
        for param in params:
            self._sharing.wait(param)
            opened = self._opened_with.get(param)
            if opened is not None and (index := opened.index(param)) is not None:
                opened.wait(index)

    def zero_grad(self, set_to_none: bool = True) -> None:
        feeder = self._sharing.feeder
        if feeder is not None and not in_backward():
            feeder.forget_failed()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Returns when every parameter has the value of the newest step. Call it before you read
        parameters outside the model's forward, as averages do."""
        self._sharing.finish()
        for opened in self._opened:
            opened.wait()

    def engines(self) -> list[Opened]:
        """Returns what this optimizer has opened."""
        return self._opened

    @property
    def is_closed(self) -> bool:
        return self._closed

    def finish_save(self) -> None:
        """Waits for the end of a checkpoint that is saved in the background."""
        if self._save is not None:
            self._save.finish()
            self._save = None

    def close(self) -> None:
        """Waits until every step is durable and a checkpoint in the background is saved, and closes
        the engine. At exit the engine is closed without the first of these waits.

        Among ranks it waits for all of them, which may still read this rank's state; only for
        seconds if it is called while an exception is handled."""
        if self._closed:
            return
        if self._resume is not None:
            self._resume.before_step()
        self.synchronize()
        self.finish_save()
        if self._path is not None:
            for opened in self._opened:
                with self._sharing.waiting("close()"):
                    opened.engine.make_durable()
        for opened in self._opened:
            opened.give_back()  # while the other ranks still give what they have
        self._sharing.close()
        for opened in self._opened:
            opened.close()
        self._opened.clear()
        self._opened_with.clear()
        self._hooks.detach()
        if self._waits is not None:
            self._waits.detach()
        self._closed = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unimplemented(
            f"{type(self).__name__} cannot be copied or pickled, because an engine has its state. "
            "Save its state_dict(), or make a new optimizer for the copy of the model"
        )


def _name_of(this: weakref.ref[EngineOptimizer], place: int) -> str:
    """Returns the name of the optimizer's parameter number `place`."""
    optimizer = this()
    return f"number {place}" if optimizer is None else optimizer._called[optimizer._order[place]]


def _content_of(this: weakref.ref[EngineOptimizer], slot: Slot, grad: torch.Tensor) -> Content:
    """Returns the content of a gradient that backward has made for a slot's parameter."""
    optimizer = this()
    if optimizer is None:
        return Content(slot, grad)
    param = optimizer._order[slot.index]
    opened = optimizer._opened_with.get(param)
    if opened is None or not opened.hands_over(param, grad):
        return Content(slot, grad)
    index = opened.index(param)
    assert index is not None and opened.sums is not None
    return EngineContent(slot, grad, opened.sums, index)


def _arrived(this: weakref.ref[EngineOptimizer], index: int) -> None:
    """Called in backward when parameter `index` of the hooks has a gradient."""
    optimizer = this()
    if optimizer is None:
        return
    param = optimizer._order[index]
    opened = optimizer._opened_with.get(param)
    if opened is not None:
        opened.gradient_arrived(param)
    feeder = optimizer._sharing.feeder
    if feeder is not None:
        feeder.arrived(optimizer._slot_of[param])
