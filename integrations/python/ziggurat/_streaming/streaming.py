# SPDX-License-Identifier: Apache-2.0
"""Keeps a model's parameters in the engine of the optimizer that trains it.

A forward pins a unit from its module's call to the return, a backward from the first use to the
last (_offload/passes.py), and gathered() as long as its block runs; a unit that a backward with
create_graph has used stays until the step. Until an optimizer opens its engine the values stay in
PyTorch's memory and nothing is pinned.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._exchange.parts import checksum_of
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import InvalidArgument, Param, Places, ResourceExhausted, Unimplemented
from ziggurat._library.standard_error import stderr
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.file_memory import empty_in_file, is_in_file, let_pages_go
from ziggurat._memory.frozen_files import FileMappings, FileRange, SameStays
from ziggurat._memory.memory import free_bytes, keep_freed, return_freed, size_text
from ziggurat._memory.placement import AUTO, Homes, fits_half, sums_bytes
from ziggurat._memory.progress import Progress
from ziggurat._pytorch import storages
from ziggurat._pytorch.later import Later
from ziggurat._pytorch.torch_private import uncompiled
from ziggurat._streaming import exports
from ziggurat._streaming.pins import Held, PinnedUnit, Pins
from ziggurat._streaming.place_said import say_where
from ziggurat._streaming.read_at_use import ReadAtUse
from ziggurat._streaming.released import CONVERSIONS, NoAddress, Released, changes_nothing
from ziggurat._streaming.table_rows import TablesCopied, placed_table
from ziggurat._units.refusals import check_params, check_sharing, warn_of_no_optimizer
from ziggurat._units.units import ROOT, Division

if TYPE_CHECKING:
    from ziggurat._activations.activations import Activations
    from ziggurat._gradients.engine_content import EngineSums
    from ziggurat._library.native import Engine, MemoryChoice
    from ziggurat._optimizer.opened import Opened
    from ziggurat._pytorch.accelerator import Accelerator
    from ziggurat._ranks.ranks import Ranks
    from ziggurat._streaming.tiled_linear import Tiled

# Tensor -> weakref.ref[Held]: a Held has its tensor, which would otherwise never be freed
_kept: Any = WeakTensorKeyDictionary()

_all: weakref.WeakSet[Streaming] = weakref.WeakSet()

# What of a module's state_dict() and load_state_dict() reads and writes its own parameters.
_SAVE = torch.nn.Module._save_to_state_dict.__code__
_LOAD = torch.nn.Module._load_from_state_dict.__code__
# What AveragedModel reads a model in.
_AVERAGE = inspect.unwrap(torch.optim.swa_utils.AveragedModel.update_parameters).__code__
_FRAMES_BETWEEN = 8  # at most, of PyTorch's and ours

_CLOSED = (
    "its optimizer was closed when memory had no room for all values: make the model and its optimizer "
    "again, and resume"
)


@dataclass
class Whole:
    """A parameter of which each rank's engine keeps a slice, as ziggurat_engine_open() takes it."""

    name: str
    count: int
    dtype: str
    unit: int
    param: int | None  #: this rank's slice, if it has one
    first: int
    trained: bool
    optional: bool
    quantized: bool  #: whether it comes in 8 bits from the other ranks for a forward or backward


class Streaming(Pins):
    """The parameters of one model that offload() was called for."""

    def __init__(
        self,
        division: Division,
        homes: Homes,
        memory_bytes: int | None,
        accelerator: Accelerator | None = None,
    ) -> None:
        #: what was given: the rest is chosen anew whenever an engine opens
        self.given_homes, self.given_bytes = homes, memory_bytes
        self.chosen: MemoryChoice | None = None  #: what was chosen last
        if memory_bytes is None:  # until it is chosen, all have room
            memory_bytes = division.ample_bytes
        if homes.params == AUTO:
            homes = homes._replace(params="host")
        self.placement = homes.params  #: "host" or "nvme"
        #: the ranks of which each keeps a slice of each parameter, once an optimizer opens the engine
        self.ranks: Ranks | None = None
        #: which parameters come in 8 bits from the other ranks for a forward or backward: all, "frozen" ones or none
        self.quantized_weights: bool | str = False
        self._rounded: set[int] = set()  # the indices of the units that have some
        self.homes = homes
        self.division = division
        units = [PinnedUnit(unit, self, accelerator) for unit in division.units]
        super().__init__(units, memory_bytes, accelerator)
        # The engine of a take() that has not ended, and could not be undone
        self._taking: Opened | None = None
        self._numbers: dict[Held, int] = {}  # of the parameters, in the engine that is being opened
        self._copies: dict[Held, torch.Tensor] | None = None  # while state_dict() runs
        self._copies_folder: str | None = None  # for copies that memory has no room for
        self._copies_later = False  # whether each copy is made when it is written
        self._loading = False  # whether load_state_dict() runs
        self._copying_deeply = False  # whether a deep copy of a module is made
        self.tiled: dict[int, Tiled] = {}  #: the layers that are used tile by tile, by their unit's index
        self._own_files: dict[torch.Tensor, FileRange] = {}  # of what stays in files
        self.warned_of_casts = False  #: that autocast keeps
        self.recomputes = False  #: whether a backward has called a module again, as checkpointing does
        #: what keeps what forwards save for backward, if PyTorch does not
        self.activations: Activations | None = None
        self.seams: list[Any] = []  #: whose `made` belongs to the pass that runs
        #: whether close() puts values that memory has no room for into files of the state's directory
        self.returns_to_files = False
        #: what opens the engine: the optimizer that trains the model, if there is one
        self.optimizer: weakref.ref[Any] | None = None
        self._looked_for_optimizer = False  # or there was one
        #: settings of the engine that limit what is brought, in elements: more than "memory" does
        self.limits: dict[str, int] = {}
        #: how a unit is there as long as the model runs
        self.keeps_by = "give offload() units without '{unit}'"
        #: how a script brings a parameter itself
        self.brings_by = "ziggurat.torch.gathered([param])"
        #: where parameters are on a drive if the optimizer's state is in host memory
        self.folder: str | None = None
        self._opening = threading.RLock()
        self._owner: weakref.ref[Any] | None = None  # the optimizer that has opened the engine
        self.backwards: Any = weakref.WeakValueDictionary()  #: of _passes, by their task's number
        self.model = weakref.ref(division.entries[0].module)
        for held in self._all():
            _kept[held.param] = weakref.ref(held)
        _all.add(self)

    def _all(self) -> Iterable[Held]:
        return (held for unit in self.units for held in unit.held)

    @property
    def size_bytes(self) -> int:
        return sum(held.size_bytes for held in self._all())

    @property
    def store(self) -> str | None:
        """Returns the directory of the state, if the engine is open and has one."""
        return None if self._opened is None else self._opened.store

    def waited_for_units(self) -> contextlib.AbstractContextManager[object]:
        """Counts the block's time as one that the script has waited for a unit, while an engine is open."""
        return contextlib.nullcontext() if self._opened is None else self._opened.waited.units

    def let_tiles_go(self) -> None:
        """Lets the pages go that a step has written of layers that are used tile by tile."""
        for tiled in self.tiled.values():
            tiled.let_go()

    @property
    def tiles_read_bytes(self) -> int:
        return sum(tiled.read_bytes for tiled in self.tiled.values())

    @property
    def sums(self) -> EngineSums | None:
        """Returns what sums gradients in files, if they are there."""
        return None if self._opened is None else self._opened.sums

    def room_bytes(self, trained: Iterable[torch.Tensor]) -> int:
        """Returns the host memory that the parameters take beside the state of those that are `trained`:
        all of them, or on NVMe the largest frozen one, which the engine puts together there; and units on
        their way to a GPU."""
        if self.tier != "nvme":
            return self.staged_bytes + (self.size_bytes if self.tier == "host" else 0)
        known = set(trained)
        return self.staged_bytes + max((held.size_bytes for held in self._all() if held.param not in known), default=0)

    @property
    def staged_bytes(self) -> int:
        """Returns the host memory in which the engine puts units together of the ranks' slices for a GPU."""
        return 0 if self.accelerator is None or self.ranks is None else self.division.staged_bytes

    # -- the engine

    @uncompiled  # a compiled model's first call comes here
    def open(self) -> None:
        """Lets the optimizer that trains the model open its engine."""
        if self._lost is not None or self.is_open:
            return
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None:
            if self.accelerator is None:  # else the forward is refused
                self._look_for_optimizer()
            return
        if not self._opening.acquire(blocking=False):
            raise InvalidArgument(
                f"the model is called in thread '{threading.current_thread().name}' while another one opens the "
                "engine: use an offloaded model in one thread at a time"
            )
        try:
            with torch.no_grad():
                optimizer.open()
        finally:
            self._opening.release()

    @uncompiled
    def compute_there(self) -> None:
        """Prepares a forward on the accelerator. Errors: InvalidArgument while the parameters are not there."""
        if self.has_values_here:
            raise InvalidArgument(
                f"the model computes on {self.device}, where its parameters are only while an optimizer of ziggurat has "
                "its engine open: make the optimizer before this forward"
            )
        # Backward runs in the thread that calls it, what was made last first, as the pins expect.
        torch.autograd.set_multithreading_enabled(False)

    def _look_for_optimizer(self) -> None:
        """Says, once, that a model that is trained has no optimizer that opens an engine."""
        model = self.model()
        if model is not None and model.training and not self._looked_for_optimizer:
            check_sharing(model)
            self._looked_for_optimizer = True
            if any(param.requires_grad for param in model.parameters()):
                warn_of_no_optimizer()

    @property
    def device(self) -> torch.device:
        """Returns where units are brought to."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    @property
    def fits(self) -> bool:
        """Returns whether there is room for all units."""
        return self.division.fits(self.memory_bytes)

    @property
    def tier(self) -> str:
        """Returns where the engine keeps the parameters: "host", "nvme", or "device", the memory for units."""
        lives_there = self.ranks is None and self.homes.lives_in_units(self.fits)
        return "device" if lives_there else self.placement

    @property
    def opened(self) -> Opened | None:
        """The engine that has the values, if there is one."""
        return self._opened

    @property
    def has_values_here(self) -> bool:
        """Returns whether the parameters have their values in PyTorch's memory, or in files behind it."""
        return self._opened is None and self._lost is None

    @property
    def is_open(self) -> bool:
        """Returns whether the engine of an optimizer that still lives has the values."""
        return self._opened is not None and not self._is_orphan()

    def has_around(self, params: Iterable[torch.Tensor]) -> bool:
        """Returns whether one of `params` is in the model, such as an adapter's."""
        model = self.model()
        return model is not None and not set(params).isdisjoint(model.parameters())

    def _is_orphan(self) -> bool:
        """Returns whether no optimizer knows the engine: its own was dropped without close(), or was
        interrupted while it opened the engine."""
        owner = None if self._owner is None else self._owner()
        return owner is None or self._opened not in owner.engines()

    def _leave_in_files(self, places: dict[torch.Tensor, FileRange]) -> None:
        """Leaves parameters in the files that their memory is a mapping of, at `places`."""
        is_brought = self.tier != "device"
        for unit in self.units:
            unit.held = [held for held in unit.all_held if unit.unit.keeps(held.param)]
            brings = unit.held and is_brought
            unit.kept_bytes = sum(part.whole_bytes for part in unit.unit.parts()) if brings else 0
        files = {
            unit.index: [(held.name, places[held.param]) for held in unit.all_held if held.param in places]
            for unit in self.units
            if unit.unit.in_files and not unit.unit.by_rows
        }
        self._own_files = places
        experts = {unit.index for unit in self.units if unit.unit.is_expert}
        self.files.set(files, experts, keeps_all=self.fits)

    def divide_among(self, ranks: Ranks | None, quantized_weights: bool | str) -> None:
        """Sets the ranks of which each keeps a slice of each parameter, and which parameters they send each
        other in 8 bits."""
        self.ranks = ranks
        self.quantized_weights = quantized_weights if ranks is not None and ranks.shards > 1 else False
        self.division.set_ranks(1 if ranks is None else ranks.shards)

    def place_in_file(self, param: torch.Tensor) -> FileRange | None:
        """Returns where the parameter is if it stays in the file that it was in when an engine opened."""
        return self._own_files.get(param)

    def place_tables(self, path: str | None) -> None:
        """Puts the tables that are read by rows where their home is: for "nvme" into the state's directory
        `path`. Errors: ResourceExhausted."""
        by_rows = {unit.index: unit.all_held[0].param for unit in self.units if unit.unit.by_rows}
        by_rows |= {index: self.units[index].unit.weight for index in self.tiled}
        folder = path if self.placement == "nvme" else None
        placed = {index: placed_table(one, self._own_files, folder) for index, one in by_rows.items()}
        left_bytes = self.memory_bytes - sum(unit.unit.size_bytes for unit in self.units)
        spare_bytes = self.memory_bytes - self.division.smallest()[0]
        for index, tiled in self.tiled.items():
            keeps_all = self.division.keeps_tiles(self.units[index].unit, self.memory_bytes)
            tiled.place(placed.pop(index), spare_bytes, keeps_all)
        self.tables_in_files = {index: place for index, place in placed.items() if place is not None}
        self.tables = {
            index: place for index, place in self.tables_in_files.items() if place.size_bytes > left_bytes
        }

    @property
    def gives_some(self) -> bool:
        """Returns whether an engine gets parameters of the model; the others stay in files."""
        return any(unit.held for unit in self.units)

    @property
    def engine_bytes(self) -> int:
        """What the engine takes of the memory for units."""
        stay = self.ranks is not None and "max_reuse_distance" not in self.limits and self.division.stays(self.memory_bytes)
        return self.division.taken_by_engine(self.memory_bytes, self.tier == "device" or stay)

    @property
    def leaves_choice(self) -> bool:
        """Returns whether the memory for units or the placement is left to the planner."""
        return self.given_bytes is None or self.given_homes.params == AUTO

    @property
    def here_bytes(self) -> int:
        """Returns what the model's parameters take of PyTorch's memory, until an engine has them."""
        if not self.has_values_here:
            return 0
        mappings = FileMappings()  # what lies in files takes none
        held = (held for unit in self.units for held in unit.all_held)
        here = (held for held in held if not is_in_file(held.param) and mappings.of(held.param) is None)
        return sum(held.size_bytes for held in here)

    def settle(self, choice: MemoryChoice) -> None:
        """Takes what the planner has chosen, for the engine that opens next."""
        its = dict(part.split("=") for part in choice.placement.split(","))
        self.placement = "nvme" if its["params"] == "nvme" else "host"
        self.homes = Homes(self.placement, its["grads"])
        self.memory_bytes, self.chosen = choice.memory, choice

    def begin_opening(self, optimizer: Any, names: Sequence[str]) -> None:
        """Tells that `optimizer` is going to open an engine for the parameters `names`. Closes the
        engine of an optimizer that is no more. Errors: if they are in an engine already."""
        model = self.model()
        if model is not None:
            check_sharing(model)
        self._finish_undoing()
        self._looked_for_optimizer = True
        if self._opened is not None and not self._is_orphan():
            gc.collect()  # a scheduler and its optimizer have each other
        if self._opened is not None and self._is_orphan():
            self._opened.end()
        if self._opened is not None:
            raise Unimplemented(
                f"parameter '{names[0]}' of an offloaded model is in the engine already, where it "
                "is not trained by this optimizer: give one optimizer all parameters that are "
                "trained, with requires_grad, before its first step; close() an optimizer before "
                "another one trains the model"
            )
        if self._lost is not None:
            raise InvalidArgument(f"parameter '{names[0]}' is away, and {self._lost}")
        self._owner = weakref.ref(optimizer)

    def divide_memory(self, state_format: str, trained: Iterable[torch.Tensor]) -> None:
        """Divides the memory for units between the engine and what stays in files, now that the format
        of the state is known and the model is what it is going to be. Errors: InvalidArgument if it
        is too little, or if an array has the memory of a parameter that goes to the engine."""
        check_params({held.param: held.name for unit in self.units for held in unit.all_held}, self.device)
        its = set(trained)
        self.division.set_trained(None)
        places = self.division.leave_in_files(its)
        for _ in range(0 if self.chosen is None else self.chosen.tables_by_rows):
            self.division.read_a_table_by_rows()  # whose gradients have no room in memory, though the table may
        self.division.require(self.memory_bytes, own_blocks=has_codes(state_format))
        # What an optimizer has only a part of takes a little more. It is not refused what offload() allowed.
        self.division.set_trained(its)
        self._leave_in_files(places)
        exports.require_own(self._all())

    def kept_beside(self, trained: Container[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parameters that are not `trained` and do not stay in files."""
        return [
            held.param
            for unit in self.units
            for held in unit.all_held
            if held.param not in trained and unit.unit.keeps(held.param)
        ]

    @property
    def needs_directory(self) -> bool:
        return "nvme" in (self.placement, self.homes.grads)

    def place_gradients(self, trained: Sequence[torch.Tensor], path: str | None) -> str:
        """Returns where gradients are: "host", which is PyTorch's memory, or "nvme", with the state in
        `path`. Says it if it is chosen here."""
        if self.homes.grads is not None or path is None:
            return self.homes.grads or "host"
        if self.ranks is not None:  # ranks that choose for themselves may not choose alike
            return "host"
        size_bytes = sums_bytes(trained)
        if fits_half(size_bytes, free_bytes()):
            return "host"
        print(
            f"ziggurat: gradients are kept in {path}, because they may take {size_text(size_bytes)}, more "
            f"than half of the memory that is free ({size_text(free_bytes())}); a step writes and "
            'reads them there. "params=' + self.placement + ',grads=host" in offload() keeps them in '
            "memory",
            file=stderr(),
        )
        return "nvme"

    def frozen(self, trained: Iterable[torch.Tensor], taken: Iterable[str]) -> list[Param]:
        """Returns the parameters, or this rank's slices, that the engine is given beside those it trains,
        in the order in which number() counts them. Their names differ from those `taken`."""
        names = set(taken)
        return [
            Param(
                held.name if held.name not in names else f"{held.name} (frozen)",
                tuple(held.param.shape) if self.ranks is None else (self._slice_of(held)[1],),
                DTYPES[held.param.dtype],
                None,
                unit=held.unit.unit.number,
                frozen=True,
                optional=held.unit.unit.is_expert,
            )
            for held in self._frozen(trained)
        ]

    def _frozen(self, trained: Iterable[torch.Tensor]) -> list[Held]:
        """Returns what is not `trained`, and of which this rank has something."""
        known = set(trained)
        return [held for held in self._all() if held.param not in known and self._slice_of(held)[1] > 0]

    def _slice_of(self, held: Held) -> tuple[int, int]:
        """Returns the first element that this rank has of a parameter, and how many it has."""
        if self.ranks is None:
            return 0, held.param.numel()
        its = self.ranks.own(held.param.numel())
        return its.start, its.stop - its.start

    def number(
        self, indices: Mapping[torch.Tensor, int], trained: Sequence[torch.Tensor], count: int
    ) -> list[Whole]:
        """Notes each parameter's index in an engine of `count` parameters, in which those that are
        `trained` have `indices`. Returns the whole parameters among several ranks, which follow those."""
        frozen = self._frozen(trained)
        own = dict(indices)
        own |= {held.param: count - len(frozen) + i for i, held in enumerate(frozen)}
        known = set(trained)
        wholes: list[Whole] = []
        self._numbers = {}
        for held in self._all():
            held.own = own.get(held.param)
            if self.ranks is None:
                assert held.own is not None
                self._numbers[held] = held.own
                continue
            self._numbers[held] = count + len(wholes)
            wholes.append(
                Whole(
                    name=held.name,
                    count=held.param.numel(),
                    dtype=DTYPES[held.param.dtype],
                    unit=held.unit.unit.number,
                    param=held.own,
                    first=self._slice_of(held)[0],
                    trained=held.param in known,
                    optional=held.unit.unit.is_expert,
                    quantized=self._is_quantized(trained=held.param in known),
                )
            )
        quantized = {whole.unit for whole in wholes if whole.quantized}
        self._rounded = {unit.index for unit in self.units if unit.held and unit.unit.number in quantized}
        return wholes

    def _is_quantized(self, trained: bool) -> bool:
        return self.quantized_weights is True or (self.quantized_weights == "frozen" and not trained)

    def rounds(self, unit: PinnedUnit) -> bool:
        return unit.index in self._rounded

    def take(self, opened: Opened, there: Container[int]) -> None:
        """Gives the engine the values, parameter by parameter, and frees PyTorch's memory of each. It
        has those of the indices `there` from a store or a checkpoint. After an error or an interrupt
        the model is as it was."""
        self._taking = opened
        try:
            self._move(opened, there)
            for unit in self.units:
                unit.places = Places([held.index for held in unit.held])
            self._opened = opened
            self._bring_pinned(opened.engine)
        except BaseException:
            self._finish_undoing()
            raise
        self._taking = None
        return_freed()
        if opened.sums is None:  # each step frees all gradients
            keep_freed(sum(held.size_bytes for held in self._all() if held.param.requires_grad))
        say_where(self, opened)

    def _bring_pinned(self, engine: Engine) -> None:
        """Brings the units that were pinned before there was an engine, as by a gathered() around
        all this."""
        brought = []
        try:
            for unit in self.units:
                if unit.pins:
                    self._bring(unit)
                    brought.append(unit)
        except BaseException:
            for unit in brought:
                self._take_out(unit, engine)
            raise

    def _move(self, opened: Opened, there: Container[int]) -> None:
        written, left = [], []
        for held in self._all():
            is_there = held.own is None or held.own in there  # None: other ranks have it all
            (left if is_there else written).append((held, self._numbers[held]))
        # Values that are written to host memory can be read again, so that there is no need of both.
        # A drive may fail, and those that are there are not the model's.
        where = "host memory" if self.placement == "host" else opened.store
        total_bytes = sum(held.size_bytes for held, _ in written)
        with Progress(f"moving parameters to {where}", total_bytes) as progress:
            for held, index in written:
                assert held.own is not None
                begin = self._slice_of(held)[0] * held.param.element_size()
                values = held.param.detach().cpu()
                opened.engine.write_param(held.own, values.data_ptr() + begin)
                progress.add(held.size_bytes)
                let_pages_go(held.param)
                if self.placement == "host":
                    held.leave(index)
                    held.forget()
        for held, index in (*written, *left):
            held.leave(index)
        for held in self._all():
            held.forget()

    def _finish_undoing(self) -> None:
        """Undoes a take(). May be called again after an interrupt."""
        taking = self._taking
        if taking is None:
            return
        self._opened = None
        for held in self._all():
            held.return_to(functools.partial(self._read, taking.engine, held))
        self._taking = None
        taking.engine.close()

    def _read(self, engine: Engine, held: Held, folder: str | None = None) -> torch.UntypedStorage:
        """Returns the values in memory, or in a file without a name in `folder`."""
        if folder is not None:
            return self._read_into_file(engine, held, folder).untyped_storage()
        values = storages.empty(held.size_bytes)
        engine.read_param(held.index, values.data_ptr())
        return values

    def _read_into_file(self, engine: Engine, held: Held, folder: str) -> torch.Tensor:
        values = empty_in_file(folder, held.param)
        self._fill(engine, held, values)
        let_pages_go(values)
        return values

    def _fill(self, engine: Engine, held: Held, values: torch.Tensor) -> None:
        if held.unit.unit.keeps(held.param):
            engine.read_param(held.index, values.data_ptr())
        else:  # a table that is read by rows where it lies
            values.copy_(held.param.detach())
            let_pages_go(held.param)

    def require_unused(self, call: str) -> None:
        """Errors: InvalidArgument if a unit is in use, or another thread uses the model. `call` is the
        optimizer's call that would change it."""
        self.let_kept_go()
        unit = self.in_use()
        if unit is not None:
            raise InvalidArgument(
                f"{call} was called while unit '{unit.name}' of the offloaded model is in use: call it "
                "outside of the model's forward and backward and of gathered()"
            )
        self.require_thread(self.units)

    def give_back(self) -> None:
        """Gives the values back to PyTorch's memory before the engine is closed, if there is room.
        Otherwise the parameters stay away, in the store, or are in files without names if
        `returns_to_files`. After an error or an interrupt all is as before.

        Errors: ResourceExhausted if there is no room and some of them are in no store."""
        opened = self._opened
        if opened is None:
            return
        self.require_unused("close()")
        no_room = self.size_bytes > free_bytes()
        folder = opened.store if no_room and self.returns_to_files else None
        away = no_room and folder is None
        trained = set(opened.members)
        frozen = any(held.param not in trained for held in self._all())
        if away and (opened.store is None or frozen or not opened.is_stored):
            raise ResourceExhausted(
                f"close(): memory has no room for the model's {self.size_bytes} bytes, and "
                f"{'its frozen parameters are' if frozen and opened.store else 'they are'} in no store: save "
                "them with ziggurat.torch.save_checkpoint() or under gathered(), and end the process"
            )
        if not away:
            try:
                for held in self._all():
                    held.give_back(self._read(opened.engine, held, folder))
            except BaseException:
                for held in self._all():  # the engine still has the values
                    held.leave(held.index)
                    held.forget()
                raise
        self._lost = _CLOSED if away else None
        self._opened = self.optimizer = None
        if self.activations is not None:
            self.activations.close()
        self.tables_in_files, self.tables = {}, {}
        for tiled in self.tiled.values():
            tiled.place(None, 0, False)

    def begin_writing(self, changed: Sequence[Held]) -> None:
        if self.ranks is None or not changed:
            return
        what = f"the writing of parameter '{changed[0].name}'"
        sums = [float(checksum_of(self._in_host_memory(held.param))) for held in changed]
        every = self.ranks.gathered(sums, what)
        differs = (every != every[0]).any(0).tolist()
        if True in differs:
            raise InvalidArgument(
                f"the ranks have written different values into parameter '{changed[differs.index(True)].name}', of "
                "which each keeps a slice: write the same on all ranks, as by one seed or torch.distributed.broadcast()"
            )

    def _in_host_memory(self, param: torch.Tensor) -> torch.Tensor:
        return param if self.accelerator is None else self.accelerator.to_host(param)

    def end_writing(self, changed: Sequence[Held]) -> None:
        if self.ranks is not None and changed:
            self.ranks.meet(f"the writing of parameter '{changed[0].name}'")

    def forget_written(self, opened: Opened) -> None:
        if self.ranks is None:
            return
        for held in self._all():
            if held.own is not None and not held.unit.pins:
                # What is brought from now on is as the ranks have it: the engine has let all go that it had.
                _, count = self._slice_of(held)
                own = torch.empty(count, dtype=held.param.dtype, device="cpu")
                opened.engine.read_param(held.own, own.data_ptr())
                opened.engine.write_param(held.own, own.data_ptr())
                return

    # -- uses of what is away

    def used(self, func: Any, what: str, held: Held, args: Any, kwargs: Any) -> Any:
        """Does what state_dict() and load_state_dict() do with parameters that are away. Errors:
        InvalidArgument for all other uses."""
        if self._copies is not None and what == "detach":
            if self._opened is None:
                raise self._refusal(what, held)
            if held not in self._copies:
                later = functools.partial(self.copy_of, held)
                self._copies[held] = Later.of(held.param, later) if self._copies_later else later()
            return self._copies[held]
        if what == "deepcopy" and self._copying_deeply and self._opened is not None:
            return self.copy_of(held)
        if what == "detach" and self._opened is not None:
            if _is_called_by(_SAVE):
                return self.copy_of(held)  # of a module within a unit
            if _is_called_by(_AVERAGE):
                return ReadAtUse.of(held.param, functools.partial(self.copy_of, held))
        if what in CONVERSIONS and changes_nothing(func, held.param, args, kwargs):
            return held.param
        if what == "data" and len(args) == 2 and args[1] is held.param:
            return None  # model.to() assigns what it has converted
        if what == "copy_" and args[0] is held.param and (self._loading or _is_called_by(_LOAD)):
            self.pin([held.unit])
            try:
                return func(*args, **kwargs)
            finally:
                self.unpin([held.unit])
        raise self._refusal(what, held)

    def copy_of(self, held: Held, folder: str | None = None) -> torch.Tensor:
        """Returns the values in memory of PyTorch's, or in a file in `folder`. Errors: ResourceExhausted if
        there is no room for them."""
        with self.alone(held.unit):
            return self._copy_of(held, folder)

    def _copy_of(self, held: Held, folder: str | None) -> torch.Tensor:
        free = free_bytes()
        opened = self._opened
        if opened is None:
            raise self._refusal("copy", held)
        if folder is None:
            folder = opened.store if is_in_file(held.param) else self._copies_folder  # a table is in one
        if folder is not None:
            return self._read_into_file(opened.engine, held, folder)
        if held.size_bytes > free:
            raise ResourceExhausted(
                f"parameter '{held.name}' is offloaded, and memory has no room for a copy of it: "
                f"it takes {held.size_bytes} bytes, and {free} are free; save the model with "
                "ziggurat.torch.save_checkpoint(), which needs no copies of what is trained"
            )
        copy = torch.empty(held.param.shape, dtype=held.param.dtype, device="cpu")
        self._fill(opened.engine, held, copy)
        let_pages_go(copy)  # streamed_init() may have put it into a file
        return copy

    def _require_exact(self, call: str) -> None:
        """Errors: InvalidArgument while a unit is there with rounded values."""
        for unit in self.units:
            self.require_exact(call, unit)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Lets detach() copy what is away, and tables that are read by rows: into files in the state's
        directory if the copies would take more than half of the memory that is free, or the table is in
        one. Tied parameters share a copy."""
        self._require_exact("state_dict()")
        before, folder = self._copies, self._copies_folder
        tables: dict[torch.Tensor, Held] = {}
        if before is None and self._opened is not None:
            by_rows = (held for unit in self.units if unit.unit.by_rows for held in unit.all_held)
            tables = {held.param: held for held in by_rows if held.param not in held.unit.unit.in_files}
        if before is None:
            self._copies = {}
            store = None if self._opened is None else self._opened.store
            self._copies_folder = store if self.size_bytes > free_bytes() / 2 else None
        try:
            # A thread that trains meanwhile would leave some copies from before its step and some from after.
            with self.alone(self.units[0]), TablesCopied(tables, self) if tables else contextlib.nullcontext():
                yield
        finally:
            self._copies, self._copies_folder = before, folder

    @contextlib.contextmanager
    def copying_later(self) -> Iterator[None]:
        """Lets detach() return a tensor that becomes a copy of what is away when it is moved to the
        CPU."""
        self._require_exact("save_pretrained()")
        before, self._copies, self._copies_later = self._copies, {}, True
        try:
            yield
        finally:
            self._copies, self._copies_later = before, False

    @contextlib.contextmanager
    def copying_deeply(self) -> Iterator[None]:
        """Lets deep copies of what is away have its values."""
        self._require_exact("copy.deepcopy()")
        before, self._copying_deeply = self._copying_deeply, True
        try:
            yield
        finally:
            self._copying_deeply = before

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Lets copy_() write what is away."""
        before, self._loading = self._loading, True
        in_files = {param for unit in self.units for param in unit.unit.in_files}
        try:
            with SameStays(in_files):
                yield
        finally:
            self._loading = before

    def _refusal(self, what: str, held: Held) -> InvalidArgument:
        where = f"{what}: parameter '{held.name}' of unit '{held.unit.name}'"
        if self._lost is not None:
            return InvalidArgument(f"{where} is away, and {self._lost}")
        if what in CONVERSIONS:
            return InvalidArgument(
                f"{where} is away, and its type and device stay what they are: call "
                f"model.{what}() before the optimizer opens its engine, which the first forward that "
                "trains does"
            )
        kind = NoAddress if what == "data_ptr" else InvalidArgument
        if held.unit.name == ROOT:
            return kind(
                f"{where} is used outside of the model's forward and backward, which bring it: call the "
                f"model, or use it within `with {self.brings_by}`"
            )
        return kind(
            f"{where} is away, because only the forward and backward of that unit's module bring "
            f"it: use it within `with {self.brings_by}`, or "
            f"{self.keeps_by.format(unit=held.unit.name)}, so that it is there while the model runs"
        )


def streaming_of(param: torch.Tensor) -> tuple[Streaming, Held] | None:
    """Returns what keeps the parameter, or None if it was not offloaded."""
    found = _kept.get(param)
    held = None if found is None else found()
    return None if held is None else (held.unit.streaming, held)


def tiled_of(weight: torch.Tensor) -> Tiled | None:
    """Returns the tiles of a linear layer's weight, if it has some."""
    found = streaming_of(weight)
    if found is None or weight.dim() != 2:
        return None
    return found[0].tiled.get(found[1].unit.index)


def kept_by_engine(param: torch.Tensor) -> tuple[Streaming, Held] | None:
    """Returns what streaming_of() does of a parameter that is not left where it lies."""
    found = streaming_of(param)
    return found if found is not None and found[1].unit.unit.keeps(param) else None


def streaming_around(params: Sequence[torch.Tensor]) -> Streaming | None:
    """Returns what keeps one of `params`, or other parameters of their model: those may be adapters that
    were added after offload(). None if their model was not offloaded."""
    own = next((found[0] for found in map(streaming_of, params) if found is not None), None)
    if own is not None:
        return own
    return next((one for one in list(_all) if one.has_around(params)), None)


def is_away(tensor: torch.Tensor) -> bool:
    """Returns whether it is a parameter of an offloaded model that is not there."""
    return isinstance(tensor, Released)


def values_of(tensor: torch.Tensor, folder: str | None = None) -> torch.Tensor:
    """Returns the tensor's present values: its own memory, or a copy if it is away, in a file in `folder`
    if that is given."""
    found = streaming_of(tensor) if is_away(tensor) else None
    return tensor.detach() if found is None else found[0].copy_of(found[1], folder)


def _is_called_by(code: CodeType) -> bool:
    """Returns whether `code` has called what uses a parameter now."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_BETWEEN):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _used(func: Any, what: str, param: torch.Tensor, args: Any, kwargs: Any) -> Any:
    found = streaming_of(param)
    if found is None:
        raise InvalidArgument(f"{what}: the parameter is away, and nothing keeps it any more")
    return found[0].used(func, what, found[1], args, kwargs)


Released.used = staticmethod(_used)


def _leave_engines() -> None:
    for streaming in list(_all):
        streaming.leave_engine()


os.register_at_fork(after_in_child=_leave_engines)
