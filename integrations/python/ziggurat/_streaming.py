# SPDX-License-Identifier: Apache-2.0
"""Keeps a model's parameters in the engine of the optimizer that trains it.

A forward pins a unit from its module's call to the return, a backward from the first use to the
last (_passes.py), and gathered() as long as its block runs; a unit that a backward with
create_graph has used stays until the step. Until an optimizer opens its engine the values stay in
PyTorch's memory and nothing is pinned.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat import _storage
from ziggurat._memory import free_bytes
from ziggurat._native import InvalidArgument, Param, ResourceExhausted, Unimplemented
from ziggurat._parts import DTYPES
from ziggurat._pins import Held, PinnedUnit, Pins
from ziggurat._released import Released
from ziggurat._units import Division, check_params

if TYPE_CHECKING:
    from ziggurat._opened import Opened

# Tensor -> weakref.ref[Held]: a Held has its tensor, which would otherwise never be freed
_kept: Any = WeakTensorKeyDictionary()


class Streaming(Pins):
    """The parameters of one model that offload() was called for."""

    def __init__(self, division: Division, placement: str, memory_bytes: int) -> None:
        self.placement = placement  #: "host" or "nvme"
        self._division = division
        super().__init__([PinnedUnit(unit, self) for unit in division.units], memory_bytes)
        self._lost = False  # whether the engine was closed, and nothing here has the values
        self._copies: dict[Held, torch.Tensor] | None = None  # while state_dict() runs
        self._loading = False  # whether load_state_dict() runs
        #: what opens the engine: the optimizer that trains the model, if there is one
        self.optimizer: weakref.ref[Any] | None = None
        self.backwards: Any = weakref.WeakValueDictionary()  #: of _passes, by their task's number
        for held in self._all():
            _kept[held.param] = weakref.ref(held)

    def _all(self) -> Iterable[Held]:
        return (held for unit in self.units for held in unit.held)

    @property
    def size_bytes(self) -> int:
        return sum(held.size_bytes for held in self._all())

    def first_of(self, dtype: torch.dtype) -> str | None:
        """Returns the name of a parameter of that type, if there is one."""
        return next((held.name for held in self._all() if held.param.dtype == dtype), None)

    def needs_pins(self) -> bool:
        """Returns whether a use must bring values, or is refused because they are gone."""
        return self._opened is not None or self._lost

    # -- the engine

    def open(self) -> None:
        """Lets the optimizer that trains the model open its engine."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None and self._opened is None and not self._lost:
            with torch.no_grad():
                optimizer.open()

    def require_new(self, names: Sequence[str]) -> None:
        """Errors: InvalidArgument if the parameters `names` are in an engine already."""
        if self._opened is not None:
            raise Unimplemented(
                f"parameter '{names[0]}' of an offloaded model is in the engine already, where it "
                "is not trained by this optimizer: give one optimizer all parameters that are "
                "trained, with requires_grad, before its first step"
            )
        if self._lost:
            raise InvalidArgument(
                f"parameter '{names[0]}' is away, and its optimizer was closed when memory had no "
                "room for all values: make the model again, and resume"
            )

    def require_memory(self, state_format: str) -> None:
        """Errors: InvalidArgument if the memory for units is too little now that the format of the
        state is known, and the model is what it is going to be."""
        check_params({held.param: held.name for held in self._all()})
        self._division.require(self.memory_bytes, own_blocks=state_format == "8bit")

    def frozen(self, trained: Iterable[torch.Tensor], taken: Iterable[str]) -> list[Param]:
        """Returns the parameters that the engine is given beside those it trains, in the order in
        which take() counts them. Their names differ from those `taken`."""
        known, names = set(trained), set(taken)
        return [
            Param(
                held.name if held.name not in names else f"{held.name} (frozen)",
                tuple(held.param.shape),
                DTYPES[held.param.dtype],
                None,
                unit=held.unit.index,
                frozen=True,
            )
            for held in self._all()
            if held.param not in known
        ]

    def take(self, opened: Opened, values_are_there: bool) -> None:
        """Gives the engine the values, parameter by parameter, and frees PyTorch's memory of each.
        `values_are_there`: of those that are trained a store or a checkpoint has the values."""
        frozen_from = len(opened.parts)
        engine = opened.engine
        for held in self._all():
            index = opened.index(held.param)
            trained = index is not None
            if index is None:
                index, frozen_from = frozen_from, frozen_from + 1
            if not (trained and values_are_there):
                engine.write_param(index, held.param.data_ptr())
            held.leave(index)
        self._opened = opened

    def before_step(self) -> None:
        """Errors: InvalidArgument if a unit is in use."""
        self.let_kept_go()
        for unit in self.units:
            if unit.pins:
                raise InvalidArgument(
                    f"a step began while unit '{unit.name}' is in use: call optimizer.step() "
                    "outside of the model's forward and backward and of gathered()"
                )

    def give_back(self) -> None:
        """Gives the values back to PyTorch's memory before the engine is closed, if there is room.
        Otherwise the parameters stay away, in the store.

        Errors: ResourceExhausted if there is no room and some of them are in no store."""
        opened = self._opened
        if opened is None:
            return
        self.before_step()
        away = self.size_bytes > free_bytes()
        frozen = any(held.index >= len(opened.parts) for held in self._all())
        if away and (opened.store is None or frozen):
            raise ResourceExhausted(
                f"close(): memory has no room for the model's {self.size_bytes} bytes, and "
                f"{'its frozen parameters are' if opened.store else 'they are'} in no store: save "
                "them with ziggurat.torch.save_checkpoint() or under gathered(), and end the process"
            )
        self._opened = self.optimizer = None
        self._lost = away
        if self._lost:
            return
        for held in self._all():
            values = _storage.empty(held.size_bytes)
            opened.engine.read_param(held.index, values.data_ptr())
            held.give_back(values)

    # -- uses of what is away

    def used(self, func: Any, what: str, held: Held, args: Any, kwargs: Any) -> Any:
        """Does what state_dict() and load_state_dict() do with parameters that are away. Errors:
        InvalidArgument for all other uses."""
        if self._copies is not None and what == "detach":
            if held not in self._copies:
                self._copies[held] = self.copy_of(held)
            return self._copies[held]
        if self._loading and what == "copy_" and args[0] is held.param:
            self.pin([held.unit])
            try:
                return func(*args, **kwargs)
            finally:
                self.unpin([held.unit])
        raise self._refusal(what, held)

    def copy_of(self, held: Held) -> torch.Tensor:
        """Returns the values in memory of PyTorch's. Errors: ResourceExhausted if it has no room
        for them."""
        opened, free = self._opened, free_bytes()
        if opened is None:
            raise self._refusal("copy", held)
        if held.size_bytes > free:
            raise ResourceExhausted(
                f"parameter '{held.name}' is offloaded, and memory has no room for a copy of it: "
                f"it takes {held.size_bytes} bytes, and {free} are free; save the model with "
                "ziggurat.torch.save_checkpoint(), which needs no copies of what is trained"
            )
        copy = torch.empty(held.param.shape, dtype=held.param.dtype, device="cpu")
        opened.engine.read_param(held.index, copy.data_ptr())
        return copy

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Lets detach() copy what is away. Tied parameters share a copy."""
        before = self._copies
        self._copies = {} if before is None else before
        try:
            yield
        finally:
            self._copies = before

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Lets copy_() write what is away."""
        before, self._loading = self._loading, True
        try:
            yield
        finally:
            self._loading = before

    def _refusal(self, what: str, held: Held) -> InvalidArgument:
        where = f"{what}: parameter '{held.name}' of unit '{held.unit.name}'"
        if self._lost:
            return InvalidArgument(
                f"{where} is away, and its optimizer was closed when memory had no room for all "
                "values: make the model and its optimizer again, and resume"
            )
        return InvalidArgument(
            f"{where} is away, because only the forward and backward of that unit's module bring "
            "it: use it within `with ziggurat.torch.gathered([param])`, or give offload() units "
            f"without '{held.unit.name}', so that it is there while the model runs"
        )


def streaming_of(param: torch.Tensor) -> tuple[Streaming, Held] | None:
    """Returns what keeps the parameter, or None if it was not offloaded."""
    found = _kept.get(param)
    held = None if found is None else found()
    return None if held is None else (held.unit.streaming, held)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's present values: its own memory, or a copy if it is away."""
    found = streaming_of(tensor) if isinstance(tensor, Released) else None
    return tensor.detach() if found is None else found[0].copy_of(found[1])


def _used(func: Any, what: str, param: torch.Tensor, args: Any, kwargs: Any) -> Any:
    found = streaming_of(param)
    if found is None:
        raise InvalidArgument(f"{what}: the parameter is away, and nothing keeps it any more")
    return found[0].used(func, what, found[1], args, kwargs)


Released.used = staticmethod(_used)
