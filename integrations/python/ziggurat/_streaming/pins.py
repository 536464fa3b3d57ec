# SPDX-License-Identifier: Apache-2.0
"""Brings the units of a model from the engine, and lets them go.

A unit is *away*, or *pinned*: acquired in the engine, with the engine's memory behind its
parameters. Pins are counted. One thread at a time may use the model, and others are refused meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ziggurat._library.native import InvalidArgument, Places, ResourceExhausted, ZigguratError
from ziggurat._memory.frozen_files import FileRange, FrozenFiles
from ziggurat._pytorch import storages
from ziggurat._pytorch.torch_private import in_functional_transform, uncompiled
from ziggurat._streaming import exports
from ziggurat._streaming.one_thread import OneThread
from ziggurat._streaming.prints import Prints
from ziggurat._streaming.released import Released
from ziggurat._units.units import Unit

if TYPE_CHECKING:
    from ziggurat._library.native import Engine
    from ziggurat._offload.turns import Turns
    from ziggurat._optimizer.opened import Opened
    from ziggurat._pytorch.accelerator import Accelerator
    from ziggurat._streaming.streaming import Streaming

_COMPARED = 1 / 32  # of the times that a unit is brought: each reads it four times


class Held:
    """A parameter, and its memory in the engine while its unit is pinned."""

    storage: torch.UntypedStorage  #: the parameter's, for as long as the engine keeps it

    def __init__(
        self,
        name: str,
        param: torch.nn.Parameter,
        unit: PinnedUnit,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.name, self.param, self.unit, self.accelerator = name, param, unit, accelerator
        self.index = -1  #: in the engine, by which it is found, read and written
        self.own: int | None = None  #: of what is trained or stored of it here: itself, or a slice
        # What is not in the parameter's storage now: the guard while the unit is pinned, else the
        # engine's memory at `_address`, which may be anybody's by then.
        self._other: torch.UntypedStorage | None = None
        self.is_lost = False  #: whether there are aliases that are larger than the memory
        self.keeps_memory = False  #: whether PyTorch's stays, since an array may still read it
        self._kept: torch.UntypedStorage | None = None  # that memory, while the engine has the values
        # What the parameter was, with a guard in its storage, while it is one of an accelerator.
        self._home: torch.Tensor | None = None
        self._address = self._begins = 0  # the same in the engine's words and in PyTorch's
        self._version = 0
        # Noted when it leaves, because a parameter that is away is slow to ask.
        self._size_bytes = self._identity = 0

    @property
    def size_bytes(self) -> int:
        return self.param.numel() * self.param.element_size()

    def leave(self, index: int) -> None:
        """Takes the parameter its values, which the engine has. PyTorch's memory with them stays
        until forget(). Does nothing the second time."""
        self.storage = self.param.untyped_storage()
        self.index = index
        self._size_bytes = self.size_bytes
        if storages.has_memory(self.storage):
            self._other = storages.guard(self._size_bytes, self.storage.device)
            storages.swap(self.storage, self._other)
            self._kept = self._other if self.keeps_memory else None
            if self.accelerator is not None:
                self._home = self.param.data
                self.param.data = storages.guarded(self._home, self.accelerator.device)
                self.storage = self.param.untyped_storage()
        self._identity = storages.identity(self.param)
        self._set_away(True)

    def _come_home(self) -> None:
        """Makes the parameter, which is away, what it was before leave(), with a guard in its storage."""
        if self._home is not None:
            self._set_away(False)
            self.param.data = self._home
            self.storage, self._home = self._home.untyped_storage(), None

    def forget(self) -> None:
        """Frees what is not in the parameter's storage."""
        self._other, self._address, self._begins = None, 0, 0

    def return_to(self, values: Callable[[], torch.UntypedStorage]) -> None:
        """Undoes leave(), however far it came: with the memory that was there, or with `values()` if
        that was freed."""
        self.storage = self.param.untyped_storage()
        if self._address:
            if self.is_in():
                self.take_out()
            self._other, self._address = None, 0  # the engine's memory, which goes with the engine
        self._come_home()
        if not self.is_in():
            if self._other is None or not storages.has_memory(self._other):
                self._other = storages.on_device(values(), self.storage.device)
            storages.swap(self.storage, self._other)
        self._set_away(False)
        self.forget()

    def put_in(self, address: int) -> None:
        """Puts the engine's memory at `address` behind the parameter."""
        if self.is_lost:
            raise _other_memory(self.name)
        if address != self._address:
            over = storages.over_engine if self.accelerator is None else self.accelerator.over
            self._other = over(address, self._size_bytes)
            self._address, self._begins = address, self._other.data_ptr()
        assert self._other is not None
        storages.swap(self.storage, self._other)
        self._set_away(False)
        self._version = self.param._version

    def take_out(self) -> None:
        """Takes the engine's memory away."""
        assert self._other is not None
        address = self.storage.data_ptr()
        moved = address != self._begins  # as share_memory_() does, and with it a queue of processes
        if self.storage.nbytes() != self._size_bytes:  # by resize_()
            self.is_lost = self.storage.nbytes() > self._size_bytes
            self.storage.resize_(self._size_bytes)  # else it cannot be exchanged
        elif moved and self.accelerator is None:
            ctypes.memmove(self._begins, address, self._size_bytes)
        elif moved:
            self.is_lost = True
        storages.swap(self.storage, self._other)
        if moved:
            self.forget()
        self._set_away(True)

    def is_in(self) -> bool:
        """Returns whether there is memory behind the parameter."""
        return storages.has_memory(self.storage)

    def give_back(self, values: torch.UntypedStorage) -> None:
        """Puts memory of PyTorch's, which has the values, behind the parameter for good."""
        self._come_home()
        self._other, self._kept = storages.on_device(values, self.storage.device), None
        storages.swap(self.storage, self._other)
        self._set_away(False)
        self.forget()

    def show(self) -> None:
        """Gives a parameter that is away its ordinary class: it can be looked at, but not read."""
        self.param.__class__ = torch.nn.Parameter

    def hide(self) -> None:
        """Ends show(), if the parameter is still away."""
        if not self.is_in():
            self._set_away(True)

    @property
    def is_away(self) -> bool:
        return isinstance(self.param, Released)

    def _set_away(self, is_away: bool) -> None:
        self.param.__class__ = Released if is_away else torch.nn.Parameter
        self.storage.__class__ = storages.Away if is_away else torch.UntypedStorage

    def was_written(self) -> bool:
        """Returns whether somebody has written the parameter since it was put in."""
        return self.param._version != self._version

    def has_moved(self) -> bool:
        """Returns whether the parameter got other memory, as from `p.data = x`, or a resize_()."""
        if self.storage.nbytes() != self._size_bytes:
            return True
        return storages.identity(self.param) != self._identity


class PinnedUnit:
    """A unit, and how often it is pinned."""

    def __init__(
        self, unit: Unit, streaming: Streaming, accelerator: Accelerator | None = None
    ) -> None:
        self.streaming = streaming
        self.unit, self.name, self.index = unit, unit.name, unit.index
        self.all_held = [Held(name, param, self, accelerator) for name, param in unit.params]
        self.held = self.all_held  #: once an engine is opened: those that do not stay in files
        self.places = Places([])  #: of `held`, in the engine
        #: whether it is pinned with values that are rounded, as a forward and a backward have them
        self.is_rounded = False
        self.kept_bytes = 0  #: what `held` take where the engine keeps them
        self.pins = self.brings = 0
        self.backwards = 0  #: of the brings, those where its backward began, if something of it came
        self.draws = random.Random(unit.index)  #: the same in each run
        self.prints: Prints | None = None  #: of `held` when they were brought, if they are compared
        # How many forwards of the unit are under way, and how many of them with gradients. What
        # they call need not pin.
        self.forwards = self.trained_forwards = 0

    @property
    def comes(self) -> bool:
        """Returns whether something of it is brought."""
        return bool(self.held) or self.index in self.streaming.files


class Pins:
    """The units of one model, and which of them are there. Until an engine is opened all are, and
    pins are only counted."""

    def __init__(
        self, units: list[PinnedUnit], memory_bytes: int, accelerator: Accelerator | None = None
    ) -> None:
        self.units = units
        self.memory_bytes = memory_bytes
        self.accelerator = accelerator  #: that units are brought to; None: they are brought to the CPU
        self.files = FrozenFiles()
        #: where the tables are that are read by rows and lie in files, by the unit's index
        self.tables_in_files: dict[int, FileRange] = {}
        #: those of them that there is no room for
        self.tables: dict[int, FileRange] = {}
        self.room_by = "give offload() more memory"  #: how units get more room
        self.or_else = ", or smaller units"  #: what helps beside that
        self._opened: Opened | None = None
        self._lost: str | None = None  # if nothing here has the values: why, and what to do
        self._until_step: list[PinnedUnit] = []
        self.turns: Turns | None = None  #: while micro-batches take turns
        self._thread = OneThread()  # which has all pins
        #: how often units were brought from the engine or their own files: experts, and others
        self.units_brought = self.experts_brought = 0
        self.calls = 0  #: of the model, or of modules around units, that are under way
        self.brought_bytes = 0  #: of what the engine keeps

    def wait_for_turn(self, stage: str | None, units: Sequence[PinnedUnit]) -> None:
        """Lets other micro-batches come to the `stage` too before this one brings its units. Returns
        at once where there is no other, and of what is no stage."""
        if self.turns is not None and stage is not None:
            self.turns.arrive(stage, units)

    def forwards(self) -> list[tuple[int, int]]:
        """Returns the units' numbers of forwards that are under way, and of those with gradients."""
        return [(unit.forwards, unit.trained_forwards) for unit in self.units]

    def set_forwards(self, counts: Sequence[tuple[int, int]]) -> None:
        """Sets the numbers to those that forwards() has returned."""
        for unit, (forwards, trained) in zip(self.units, counts, strict=True):
            unit.forwards, unit.trained_forwards = forwards, trained

    def pin(
        self, units: Sequence[PinnedUnit], done: list[PinnedUnit] | None = None, exact: bool = True
    ) -> None:
        """Brings the units and keeps them until unpin(). `done` gets each one at once, so that a
        caller whom a signal strikes knows what to unpin. Without `exact` they come as a forward and a
        backward may have them: rounded, where ranks send them in 8 bits. Errors: those of
        require_exact()."""
        done = [] if done is None else done
        self._thread.enter(units[0].name if units and self._has_one_thread() else None)
        try:
            for unit in units:
                if exact:
                    self.require_exact("gathered()", unit)
                if unit.pins == 0 and (self._opened is not None or self._lost is not None):
                    self._bring(unit, exact)
                self._thread.enter(None)
                unit.pins += 1
                done.append(unit)
        except BaseException:
            pinned = list(done)
            done.clear()
            self.unpin(pinned)
            raise
        finally:
            self._thread.leave()

    def require_exact(self, call: str, unit: PinnedUnit) -> None:
        """Errors: InvalidArgument if the unit is there with rounded values, which would be taken for the
        parameters."""
        if unit.pins and unit.is_rounded:
            raise InvalidArgument(
                f"{call} was called while a forward or backward uses unit '{unit.name}', which has its values rounded "
                f"to 8 bits (quantized_weights): call it outside of them{', and after the step' if self._until_step else ''}"
            )

    def require_thread(self, units: Sequence[PinnedUnit]) -> None:
        """Errors: InvalidArgument if another thread uses the model than this one, which needs `units`."""
        if units and self._has_one_thread():
            self._thread.require(units[0].name)

    @contextlib.contextmanager
    def alone(self, unit: PinnedUnit) -> Iterator[None]:
        """Lets no other thread use the model within. Errors: InvalidArgument if one does, where this one needs
        `unit`."""
        if not self._has_one_thread():
            yield
            return
        thread = self._thread
        thread.enter(unit.name)
        try:
            yield
        finally:
            thread.leave()

    def _has_one_thread(self) -> bool:
        return self._opened is not None and self.turns is None

    def unpin(self, units: Iterable[PinnedUnit]) -> None:
        """Ends a pin of each of the units. Errors: the first, when all are ended."""
        failed: BaseException | None = None
        for unit in units:
            unit.pins -= 1
            if unit.pins == 0 and self._opened is not None:
                try:
                    self._let_go(unit, self._opened)
                except BaseException as error:
                    failed = failed or error
                unit.is_rounded = False
            self._thread.leave()  # only now may others bring it
        if failed is not None:
            raise failed

    def pin_for_backward(self, units: Sequence[PinnedUnit]) -> None:
        """Does what pin() does, where the units' backward begins."""
        before = [unit.brings for unit in units]
        self.pin(units, exact=False)
        for unit, earlier in zip(units, before, strict=True):
            if unit.comes:
                unit.backwards += unit.brings - earlier

    @property
    def brought_backward(self) -> int:
        """Returns how often units were brought where their backward began, without experts."""
        return sum(unit.backwards for unit in self.units if not unit.unit.is_expert)

    @uncompiled
    def passes(self, trains: bool) -> None:
        """Called where a call of the model, within no other, or a backward begins."""
        if self._opened is not None:
            if trains:
                self._opened.beside.end()
            else:
                self._opened.beside.begin()

    def until_step(self, units: Iterable[PinnedUnit]) -> None:
        """Keeps units that are pinned until the next step."""
        for unit in units:
            if self._opened is not None and unit not in self._until_step:
                unit.pins += 1
                self._thread.enter(None)
                self._until_step.append(unit)

    def let_kept_go(self) -> None:
        """Ends what until_step() began."""
        while self._until_step:
            self.unpin([self._until_step.pop()])

    def in_use(self) -> PinnedUnit | None:
        """Returns a unit that is pinned, if there is one."""
        return next((unit for unit in self.units if unit.pins), None)

    def leave_engine(self) -> None:
        """Called in a forked process, which has neither the engine nor its memory: takes the memory
        out of parameters that the parent has pinned."""
        if self._opened is None:
            return
        self._opened = None
        self._thread = OneThread()
        self._lost = (
            "a forked process has no engine: use an offloaded model only in the process that called "
            "offload()"
        )
        for unit in self.units:
            for held in unit.held if unit.pins else ():
                held.take_out()

    def _bring(self, unit: PinnedUnit, exact: bool = True) -> None:
        opened = self._opened
        if opened is None:
            raise InvalidArgument(f"unit '{unit.name}' is needed, but {self._lost}")
        unit.is_rounded = False
        if unit.held:
            aside = exact and self.rounds(unit)
            with opened.waited.units:
                self._acquire(unit, opened.engine.acquire_aside if aside else opened.engine.acquire, opened.engine)
            unit.is_rounded = not aside and self.rounds(unit)
            self.brought_bytes += unit.kept_bytes
        if unit.comes:
            self.units_brought += not unit.unit.is_expert
            self.experts_brought += unit.unit.is_expert
        try:
            if opened.pending:
                with opened.waited.units:
                    opened.wait_for(held.own for held in unit.held if held.own is not None)
            if unit.held:
                opened.engine.find(unit.places)
            for held, address in zip(unit.held, unit.places.addresses, strict=True):
                held.put_in(address)
            if unit.index in self.files:
                with opened.waited.units:
                    self.files.bring(unit.index)
            unit.brings += 1
            # What writes in a way that PyTorch does not count mostly does so from the first time on: 1, 2 and
            # 3, 4 and 5, 8 and 9 are a forward and a backward. What begins later is found by a draw.
            is_compared = (unit.brings >> 1).bit_count() <= 1 or unit.draws.random() < _COMPARED
            unit.prints = Prints(unit.held) if is_compared else None
        except BaseException:
            self._take_out(unit, opened.engine)
            raise

    def rounds(self, unit: PinnedUnit) -> bool:
        """Returns whether the unit comes rounded for a forward or backward."""
        return False

    def begin_writing(self, changed: Sequence[Held]) -> None:
        """Waits among several ranks for those that write the parameters too, and does so after it: no rank
        reads a part that another one has written already, or not yet. Errors: InvalidArgument if they have
        other values."""

    def end_writing(self, changed: Sequence[Held]) -> None:
        """Ends what begin_writing() began."""

    def forget_written(self, opened: Opened) -> None:
        """Lets nobody find what was written in the engine's memory, and is not to stay."""

    def expect_rows(self, units: Iterable[PinnedUnit], tensors: Iterable[torch.Tensor]) -> None:
        """Reads what a forward with the arguments `tensors` reads of tables in files. Errors: DataLoss."""
        if in_functional_transform():  # their values are not known
            return
        for unit in units:
            place = self.tables_in_files.get(unit.index)
            if place is not None:
                held = unit.all_held[0]
                for rows in tensors:
                    place.read_rows(held.name, rows, held.param.nbytes // held.param.shape[0])

    def _in_one_thread(self, call: Callable[..., object], unit: PinnedUnit) -> None:
        """Makes a call of the engine for the unit, on the stream of this thread if it is on an accelerator."""
        its = () if self.accelerator is None else (self.accelerator.stream_handle(),)
        if self.turns is None:
            call(unit.unit.number, *its)
        else:
            self.turns.served.call(call, unit.unit.number, *its)

    def _acquire(self, unit: PinnedUnit, acquire: Callable[..., object], engine: Engine) -> None:
        try:
            self._in_one_thread(acquire, unit)
        except ResourceExhausted as error:
            if not str(error).startswith("acquire("):  # a drive that is full, say
                raise
            raise self._no_room(unit) from error
        except ZigguratError:
            raise
        except BaseException:  # a signal's, most likely when the unit was acquired
            with contextlib.suppress(InvalidArgument):
                self._in_one_thread(engine.release, unit)
            raise

    def _no_room(self, unit: PinnedUnit) -> ResourceExhausted:
        in_use = ", ".join(f"'{one.name}'" for one in self.units if one.pins)
        if self._until_step:
            why = ", since a backward with create_graph keeps all units that it uses until the step"
        else:
            why = self.or_else
        return ResourceExhausted(
            f"unit '{unit.name}' takes {unit.unit.size_bytes} bytes, and beside the units in use "
            f"({in_use or 'none'}) memory={self.memory_bytes} has no room for them: {self.room_by}{why}"
        )

    def _let_go(self, unit: PinnedUnit, opened: Opened) -> None:
        moved = []
        exported = [held for held in unit.held if storages.was_exported(held.storage)]
        try:
            prints, unit.prints = unit.prints, None
            unseen = [] if prints is None else prints.written()
            changed = [held for held in unit.held if held.was_written()]
            if changed and unit.is_rounded:
                raise _rounded_value_written(changed[0].name, unit.name)
            self.begin_writing(changed)
            if changed and self.accelerator is not None:
                self.accelerator.synchronize()  # the engine is told when it is written
            for held in unit.held:
                if held.has_moved():
                    moved.append(held.name)
                if held in exported:
                    storages.begin_exports(held.storage)
                held.take_out()
                if held in changed:  # and the engine's memory has it
                    opened.kept_was_written(held.index, held.own)
            self.end_writing(changed)
            if unit.held:
                self._in_one_thread(opened.engine.release, unit)
            if unit.index in self.files:
                self.files.let_go(unit.index)
            if unit.index in self.tables:
                self.tables[unit.index].let_go()
        except BaseException:
            with contextlib.suppress(InvalidArgument):  # a signal's may come behind the release
                self._take_out(unit, opened.engine)
            with contextlib.suppress(ZigguratError):  # what has failed is what is told
                self.forget_written(opened)
            raise
        if moved:
            raise _other_memory(moved[0])
        if unseen:
            raise InvalidArgument(
                f"parameter '{unseen[0].name}' was written while unit '{unit.name}' was in use, and PyTorch "
                "counts no such write, as p.data.mul_(2), so the engine does not have it: write under "
                "torch.no_grad() instead, as p.mul_(2)"
            )
        if sys.exc_info()[1] is None:  # else what has failed may have the array
            exports.require_no_arrays(exported)

    def _take_out(self, unit: PinnedUnit, engine: Engine) -> None:
        """Releases a unit after an error, wherever that came."""
        for held in unit.held:
            if held.is_in():
                held.take_out()
        if unit.held:
            self._in_one_thread(engine.release, unit)


def _rounded_value_written(name: str, unit: str) -> InvalidArgument:
    return InvalidArgument(
        f"parameter '{name}' was written in a forward or backward of unit '{unit}', which has its values rounded to 8 "
        "bits (quantized_weights), so the others would stay rounded: write it within "
        "ziggurat.torch.gathered([param]), outside of the model's forward and backward"
    )


def _other_memory(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"parameter '{name}' of an offloaded model was given other memory (p.data = x), which the engine does not "
        "have: write into it instead, as p.copy_(x) does"
    )
