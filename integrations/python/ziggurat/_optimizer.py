# SPDX-License-Identifier: Apache-2.0
"""What ziggurat.torch's optimizers share: all but the meaning of a group's settings."""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._among_ranks import AmongRanks
from ziggurat._gradient import GradientHooks
from ziggurat._gradient_content import Slot
from ziggurat._names import Named, generated, made_up, matched, names_alone, names_in
from ziggurat._native import (
    Engine,
    GroupStep,
    InvalidArgument,
    ResourceExhausted,
    Runtime,
    Unimplemented,
    stored_params,
)
from ziggurat._opened import Opened
from ziggurat._placement import (
    fits_host,
    memory_beside_drive,
    parsed,
    ranks_in,
    say,
    state_bytes,
)
from ziggurat._sharing import Alone, several_ranks
from ziggurat._state import MOMENTS, StateDicts
from ziggurat._waits import ModuleWaits

_NO_MEANING = ("foreach", "fused", "capturable", "differentiable")


_TAKES_PAIRS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def _with_names(param_group: dict[str, Any]) -> dict[str, Any]:
    """A group of (name, parameter) pairs as torch.optim has it from PyTorch 2.6 on."""
    params = param_group["params"]
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    pairs = [one for one in given if isinstance(one, tuple)]
    if not pairs:
        return param_group | {"params": given}
    if len(pairs) < len(given):
        raise InvalidArgument(
            "a group has parameters with names and others without: give each as (name, parameter), "
            "or none"
        )
    names, params = zip(*pairs, strict=True)
    return param_group | {"params": list(params), "param_names": list(names)}


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Unimplemented(f"{what} is not built yet")


def from_zero(**arguments: float) -> None:
    """What PyTorch's constructors refuse too."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise InvalidArgument(f"{name} is a tensor of {value.numel()} elements: give one")
        if not value >= 0:
            raise InvalidArgument(f"{name}={value}: give 0 or more")


class EngineOptimizer(AmongRanks, StateDicts):
    """A ``torch.optim.Optimizer`` whose state an engine has."""

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
        exchange: str = "torch",
        reduce_dtype: torch.dtype | None = None,
        maximize: bool = False,
        **flags: Any,
    ) -> None:
        for flag, value in flags.items():
            if flag not in _NO_MEANING:
                raise TypeError(f"{type(self).__name__}() has no argument '{flag}'")
            if value:
                warnings.warn(f"{flag}={value} changes nothing: the engine updates", stacklevel=3)
        self.placement = placement  #: with "auto": from the first open() on what was chosen
        self._tier, self._path = parsed(placement)
        self._threads = threads
        self._settings: dict[str, Any] = {
            "optimizer": self._kind,
            "state_format": state_format,
            "progress": sys.stderr.isatty(),
        }
        if state_rounding is not None:
            self._settings["state_rounding"] = state_rounding
        if param_rounding is not None:
            self._settings["param_rounding"] = param_rounding
        if host_memory is not None:
            self._settings["host_memory"] = host_memory
        self._closed = False
        self._lost = False  # its state was given up for one that could not be loaded
        self._figures: dict[str, int] = {}  # as of the last call of figures(), or at open
        self._opened: list[Opened] = []
        self._opened_with: dict[torch.Tensor, Opened] = {}  # of every parameter of those
        self._order: list[torch.Tensor] = []  # as the hooks count them
        self._slot_of: dict[torch.Tensor, Slot] = {}
        self._keep_state_in(state)
        self._resume: Any = None  # ziggurat.torch.Resume, where the run has one
        self._load: Any = None  # while load_checkpoint() opens: what Opened takes
        this = weakref.ref(self)
        self._hooks = GradientHooks(lambda index: _arrived(this, index))
        self._exchange = exchange
        self._sharing = Alone()
        wrapped = model if isinstance(model, DistributedDataParallel) else None
        if wrapped is not None:
            model = wrapped.module
        self._model = model
        self._waits: ModuleWaits | None = None
        # What the parameters are called. `if model` would ask for the length of one that has it.
        params_of = {} if model is None else dict(model.named_parameters())
        short = {} if model is None else names_in(model, params_of)
        self._spelled = {param: name for name, param in params_of.items()}
        self._names = {param: short[name] for name, param in params_of.items()}
        self._called_by: dict[torch.Tensor, str] | None = None  # every parameter's name, when asked
        from_zero(lr=defaults["lr"], weight_decay=defaults["weight_decay"])
        from_zero(eps=defaults.get("eps", 0.0))
        super().__init__(params, {**defaults, "maximize": maximize})
        self._divide(wrapped, group, reduce_dtype)
        if model is not None:
            self._waits = ModuleWaits(model, set(self._order), self._wait_for, self.synchronize)
            if several_ranks():
                self._watch_for_ddp(model)

    def _param_of(self, slot: Slot) -> torch.Tensor:
        return self._order[slot.index]

    def _slots(self) -> list[Slot]:
        """Of all parameters, in the model's order."""
        return [self._slot_of[param] for param in self._in_order(self._order)]

    def _in_order(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """As the model has them, whose forward waits for them in this order."""
        place: dict[torch.Tensor, int] = {param: i for i, param in enumerate(self._names)}
        return sorted(params, key=lambda param: place.get(param, len(place)))

    def _updated(self, param: torch.Tensor) -> None:
        """Returns when the engine has written what is here of `param`; any thread's."""
        opened = self._opened_with.get(param)
        if opened is not None:
            opened.wait_written(param)

    def _named(self) -> Iterable[tuple[str, torch.Tensor, int]]:
        """Name, parameter, group."""
        called = self._called
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                yield called[param], param, index

    @property
    def _called(self) -> dict[torch.Tensor, str]:
        """Every parameter's name. What the names are depends on all of them, so they are found
        once all groups are there."""
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
        """As the script has given them."""
        return {
            param: name
            for group in self.param_groups
            for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group if _TAKES_PAIRS else _with_names(param_group))
        added = self.param_groups[-1]["params"]
        if len(set(added)) < len(added):
            # PyTorch warns, and makes several steps.
            del self.param_groups[-1]
            raise InvalidArgument("a parameter is twice in its group: give each once")
        self._called_by = None
        self._order.extend(added)
        self._attach(added)

    def _attach(self, params: Sequence[torch.Tensor]) -> None:
        name_of = functools.partial(_name_of, weakref.ref(self))
        slots = self._hooks.attach((name_of, param) for param in params)
        self._slot_of.update(zip(params, slots, strict=True))
        if self._sharing.feeder is not None:
            self._sharing.attach(slots)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        """The engine's settings of `group` in this step: what it has, by its PyTorch name."""
        step = GroupStep(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )
        if "betas" in group:
            step = replace(step, betas=(float(group["betas"][0]), float(group["betas"][1])))
        if "eps" in group:
            step = replace(step, eps=float(group["eps"]))
        return step

    @property
    def engine(self) -> Engine | None:
        """Of the first step's parameters, from that on."""
        return self._opened[0].engine if self._opened else None

    def open(self, *, resume: bool = False) -> None:
        """Takes masters from all parameters that are trained and not yet known, into a new store.

        The first ``step()`` does so. With `resume` a store that is there is gone on from instead,
        and writes the parameters.
        """
        known = self._opened_with
        if len(known) == len(self._order):
            return  # all are: a step of many parameters looks at none of them
        new = [one for one in self._named() if one[1].requires_grad and one[1] not in known]
        if not new:
            return
        named = {param: one for one in new for param in (one[1],)}
        new = [named[param] for param in self._in_order(named)]
        self.need_open()
        if self._resume is not None:
            raise Unimplemented(
                f"parameter '{new[0][0]}' was added after Resume, whose store has no state of "
                "it, and that is not built yet: let all be trained from the beginning, or give "
                "it an optimizer of its own"
            )
        self._attach([param for param in named if self._slot_of[param].handle is None])
        if self._sharing.feeder is not None:
            self._sharing.attach(self._slot_of[param] for param in named)
        self._sharing.before_open([param for _, param, _ in new])
        if resume and self._tier == "auto":
            self.need_store("open(resume=True)")
        if self._tier == "auto":
            opened = self._open_auto(new)
        else:
            opened = self._open(new, self._path, resume)
        self._opened.append(opened)
        if len(self._opened) == 1:
            self._figures = opened.figures()
        self._opened_with |= dict.fromkeys(opened.members, opened)
        self._sharing.opened(opened.members, opened.engine.resumed)
        self._give_loaded(opened)

    def need_open(self) -> None:
        """Errors: InvalidArgument where its state is gone: beginning anew is nothing that was asked
        for."""
        if self._closed or self._lost:
            raise InvalidArgument("the optimizer is closed, and its state is gone: make a new one")

    def _open(
        self, new: list[tuple[str, torch.Tensor, int]], path: str | None, resume: bool = False
    ) -> Opened:
        settings = self._settings | {"resume": "auto" if resume else "new"}
        settings["placement"] = "optimizer=host" if path is None else "optimizer=nvme"
        if path is not None:
            added = f"/added-{len(self._opened)}" if self._opened else ""
            settings["store"] = path + added
            room = memory_beside_drive(self._state_bytes(param for _, param, _ in new))
            if room is not None:
                settings.setdefault("host_memory", room)
            if resume:
                new = self._as_stored(settings["store"], new)
        names, params, groups = zip(*new, strict=True)
        parts = [self._sharing.part(param) for param in params]
        settings["run"] = self._sharing.run(names, params)

        def runtime() -> Runtime:
            return self._sharing.runtime(self._workers(params))

        for part in parts:
            part.slot = self._slot_of[part.param]
        return Opened(parts, names, groups, self._hooks, runtime, settings, self._load)

    def _as_stored(
        self, store: str, new: list[tuple[str, torch.Tensor, int]]
    ) -> list[tuple[str, torch.Tensor, int]]:
        """With the names and in the order of the store that is there, if one is: rank 0's, which
        has a part of every parameter."""
        _, params, _ = zip(*new, strict=True)
        runtime = self._sharing.runtime(self._workers(params))
        order = self._sharing.decided(lambda: self._order_in(store, runtime, new))
        if order is None:
            return new
        placed = {place for place, _ in order}
        empty = [(place, one[0]) for place, one in enumerate(new) if place not in placed]
        return [(name, *new[place][1:]) for place, name in [*order, *empty]]

    def _order_in(
        self, store: str, runtime: Runtime, new: list[tuple[str, torch.Tensor, int]]
    ) -> list[tuple[int, str]] | None:
        """For each parameter of the store its place in `new`, and its name there; None where there
        is none, or it has just these."""
        stored = [Named(*one) for one in stored_params(runtime, {"store": store})]
        shapes = [tuple(self._sharing.part(param).memory().shape) for _, param, _ in new]
        here = [place for place, shape in enumerate(shapes) if math.prod(shape) > 0]
        ours = [Named(new[place][0], shapes[place]) for place in here]
        if not stored or not here or stored == ours:
            return None
        given = self._given_names()
        as_given = [
            Named(given.get(param) or self._spelled.get(param) or name, shapes[place])
            for place in here
            for name, param, _ in [new[place]]
        ]
        if len(self.param_groups) > 1 and made_up(one.name for one in ours) and not made_up(
            one.name for one in stored
        ):
            raise InvalidArgument(
                f"the store {store} knows its parameters by name, but this optimizer has several "
                "groups without names, which may be in another order: give it model=, or named "
                "parameters"
            )
        # In the order of the groups, which is that of made-up names.
        position = {param: i for i, param in enumerate(self._order)}
        in_groups = sorted(range(len(here)), key=lambda i: position[new[here[i]][1]])
        spellings = [[own[i] for i in in_groups] for own in (ours, as_given)]
        try:
            found = matched(f"the store {store}", stored, spellings)
        except InvalidArgument:
            ranks = self._sharing.ranks
            if ranks_in(store) == (1 if ranks is None else ranks.size):
                raise
            return None  # slices of another number of ranks, about which the engine has the words
        return [
            (here[in_groups[at]], one.name) for at, one in zip(found, stored, strict=True)
        ]

    def _open_auto(self, new: list[tuple[str, torch.Tensor, int]]) -> Opened:
        """Where the state fits; what is added later goes to the same tier."""
        needed_bytes = self._state_bytes(param for _, param, _ in new)
        fits = self._sharing.together(
            'placement="auto"', lambda: fits_host(needed_bytes, self._path)
        )
        if self._sharing.all_of(fits):
            try:
                opened = self._open(new, None)
                self._tier = self.placement = "host"
                self._path = None
                return opened
            except ResourceExhausted as error:  # a budget that was given, or a limit of the process
                if self._path is None or self._sharing.ranks is not None:
                    raise
                say(f"nvme:{self._path}", f"host memory was refused: {error}")
        opened = self._open(new, self._path)
        self.need_store("open()")
        return opened

    def _state_bytes(self, params: Iterable[torch.Tensor]) -> int:
        """Of what this process has."""
        counts = (self._sharing.part(param).memory().numel() for param in params)
        return state_bytes(counts, self._settings["state_format"], len(MOMENTS[self._kind]))

    def need_store(self, who: str) -> None:
        """For what has no use without one: "auto" is its directory from now on.

        Errors: InvalidArgument where none was named.
        """
        if self._path is None:
            raise InvalidArgument(
                f'{who}: with placement="{self.placement}" no step is durable: give "nvme:/path", '
                'or "auto:/path", which is the same here'
            )
        self._tier, self.placement = "nvme", f"nvme:{self._path}"

    @torch._disable_dynamo  # type: ignore[misc]  # a step is no part of what is compiled around it
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
        groups = [self._group_step(group) for group in self.param_groups]
        follows = self._resume is not None
        self.synchronize()
        stepped = [opened for opened in self._opened if opened.has_gradient()]
        for opened in stepped:
            opened.step(groups, blob_follows=follows)
        # The engine's arithmetic alone is worth no wait for each module beside PyTorch's on the CPU,
        # and is beside an accelerator's.
        in_place = not any(opened.is_staged for opened in self._opened)
        beside = self._waits is not None and not (self._tier == "host" and in_place)
        if self._sharing.ranks is not None:
            trained = {param for opened in stepped for param in opened.members}
            updated = (p for p in self._order if p.grad is not None and p in trained)
            self._sharing.publish(self._in_order(updated), beside)
        if self._waits is None or not beside:
            self.synchronize()
        else:
            with_gradient = [param for param in self._order if param.grad is not None]
            self._wait_for(self._waits.unseen(with_gradient))
        if follows and stepped:
            self._resume.after_step()
        return loss

    def _wait_for(self, params: Iterable[torch.Tensor]) -> None:
        if not any(opened.pending for opened in self._opened):
            return
        for param in params:
            self._sharing.wait(param)
            opened = self._opened_with.get(param)
            if opened is not None and (index := opened.index(param)) is not None:
                opened.wait(index)

    def figures(self) -> dict[str, float]:
        """Of what was done since the last call, for a logger: steps, bytes, seconds waited and busy.

        ``exchange_bytes`` is memory for what ranks send each other and for the gradients that came,
        ``exchange_planned_bytes`` the most that it will be.
        Counters are those of the process, which two optimizers share; what was copied from and to
        accelerators (device_down_bytes, device_up_bytes) is this optimizer's.
        """
        engine = self.engine
        if engine is None:
            return {}
        now = self._opened[0].figures()
        trained = [param for opened in self._opened for param in opened.members]
        exchange = self._sharing.exchange_bytes(trained)
        for opened in self._opened[1:]:
            for name, value in opened.figures().items():
                if name.startswith("device_"):  # all others are the process's
                    now[name] += value
        before, self._figures = self._figures, now
        told: dict[str, float] = {"generation": engine.generation}
        told["durable_generation"] = engine.durable_generation
        told["exchange_bytes"], told["exchange_planned_bytes"] = exchange
        for name, value in now.items():
            if name.startswith("host_"):
                told[name] = value
            elif name.endswith("_ns"):
                told[name[:-3] + "_s"] = (value - before.get(name, 0)) / 1e9
            else:
                told[name] = value - before.get(name, 0)
        return told

    def synchronize(self) -> None:
        """Returns when every parameter is that of the newest step: for what reads them outside the
        model's forward, as averages do."""
        self._sharing.finish()
        for opened in self._opened:
            opened.wait()

    def close(self) -> None:
        """Waits until every step is durable, and lets the engine go; also at exit, unwaited.

        Among ranks it waits for all of them, which may still read this one's state."""
        if self._closed:
            return
        if self._resume is not None:
            self._resume.before_step()
        self.synchronize()
        if self._path is not None:
            for opened in self._opened:
                opened.engine.make_durable()
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
            f"{type(self).__name__} is not copied or pickled: its state is the engine's; save its "
            "state_dict(), or make an optimizer of its own for the copy of the model"
        )


def _name_of(this: weakref.ref[EngineOptimizer], place: int) -> str:
    """Of parameter `place` of the optimizer."""
    optimizer = this()
    return f"number {place}" if optimizer is None else optimizer._called[optimizer._order[place]]


def _arrived(this: weakref.ref[EngineOptimizer], index: int) -> None:
    """In backward: parameter `index` of the hooks has a gradient."""
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
