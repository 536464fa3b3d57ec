# SPDX-License-Identifier: Apache-2.0
"""Opens the engine of an optimizer's parameters at the optimizer's first step, and works with
it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

from ziggurat._exchange.parts import Nothing, Part
from ziggurat._gradients.engine_content import EngineSums, HandedOver, content_of
from ziggurat._gradients.gradient import GradientHooks, in_place
from ziggurat._gradients.gradient_content import count_writes
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import (
    Device,
    Engine,
    GroupStep,
    InvalidArgument,
    Param,
    Runtime,
    ZigguratError,
)
from ziggurat._library.packing import TILE
from ziggurat._library.waited import Beside, Waited
from ziggurat._library.words import in_arguments
from ziggurat._optimizer.device import Staged, places_of, scales_to_host
from ziggurat._optimizer.engine_params import kind_of, lacking_in, listed, settings_of_places
from ziggurat._optimizer.kept import AtEngine, Kept, KeptSlice
from ziggurat._optimizer.last_seen import LastSeen
from ziggurat._optimizer.rounding import as_fp32, draws_params, rounds_to
from ziggurat._pytorch.accelerator import Accelerator
from ziggurat._pytorch.torch_private import as_plain_tensors, in_backward
from ziggurat._streaming.streaming import Streaming, Whole


# Stands for a gradient that was not lent, because the engine had it.
_AT_ENGINE = torch.empty(0)
_WHOLE = Part, Kept  #: whose gradients are as backward has made them

_all: weakref.WeakSet[Opened] = weakref.WeakSet()


def is_lent(param: torch.Tensor) -> bool:
    """Returns whether an engine has the parameter."""
    return any(opened.index(param) is not None for opened in _all)


_runtimes: weakref.WeakValueDictionary[tuple[int, int], Runtime] = weakref.WeakValueDictionary()


def runtime_of(threads: int) -> Runtime:
    """Returns this process's runtime, which all its engines share; a forked child has its own."""
    key = (os.getpid(), threads)
    runtime = _runtimes.get(key)
    if runtime is None:
        runtime = _runtimes[key] = Runtime(threads)
    return runtime


class Opened:
    """Lends parameters and gradients to an engine.

    Between ``step()`` and ``wait()`` a parameter is *pending*: the engine may be writing it, and
    reads the gradient that was lent for it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        names: Sequence[str],
        groups: Sequence[int],
        hooks: GradientHooks,
        runtime: Callable[[], Runtime],
        settings: dict[str, Any],
        load: Callable[[Sequence[Part]], tuple[int, dict[str, Any]]] | None = None,
        streaming: Streaming | None = None,
        model_has_values: bool = False,
    ) -> None:
        """`load` returns, for these parts, what Engine takes from a checkpoint. `streaming` is what
        brings the parts that the engine keeps. `model_has_values`: the model's values of these, not
        those of a store that is there, are the masters of the next step."""
        own_groups = self._take_parts(parts, names, groups)
        self.store: str | None = settings.get("store")  #: the state's directory on a drive
        self._hooks = hooks
        self._params_drawn = draws_params(settings)
        # The gradients of pending parameters. They stay alive until the engine has read them, even
        # if another gradient takes their place.
        self._lent: dict[int, torch.Tensor] = {}
        self.waited = Waited()  #: how long the script has waited for the engine, by cause
        self.beside = Beside(self.figures)  #: what was counted in evaluation
        self._in_memory = "optimizer=host" in settings.get("placement", "")
        self._streaming = streaming
        # whether the newest step is written, so that nothing waits for the engine
        self._all_written = False
        self._expecting = False
        # a lock, because each accelerator's backward has a thread of its own
        self._arriving = threading.Lock()
        #: whether loaded state waits for the next step to write it into the records
        self.loaded = False
        self.masters: dict[torch.Tensor, torch.Tensor] = {}  #: loaded masters, until the next step
        # The indices of the parameters that the next step makes the masters, as the engine was
        # told. Until then its records have the old masters.
        self._become_masters: set[int] = set()
        # The parameters of which this rank was given state since the newest step or settle();
        # other ranks may not have theirs yet.
        self._given: set[torch.Tensor] = set()
        held = [part.memory() for part in self.parts]
        accelerator = None if streaming is None else streaming.accelerator
        kept_place = AtEngine(accelerator)
        kept = {index for index, part in enumerate(self.parts) if isinstance(part, Kept)}
        self._places = places_of(held, kept, kept_place)
        self._every_place = set(self._places)
        self._staged = {place for place in self._places if isinstance(place, Staged)}
        # Whether an accelerator computes, so that the cores may update beside it.
        self._is_beside = bool(self._staged) or accelerator is not None
        memory = [self._places[i].read(i, param) for i, param in enumerate(held)]
        self._lent_at = [None if i in kept else lent.data_ptr() for i, lent in enumerate(memory)]
        loaded = None if load is None else load(self.parts)
        # held until the engine has read it
        lacking = {} if loaded is None else lacking_in(loaded[1], self.parts, kept)
        given = listed(self.parts, self.names, self._kinds, self._lent_at, own_groups, lacking)
        self._open_engine(given, settings, runtime(), accelerator, loaded)
        kept_place.engine = self.engine
        #: what large gradients are handed to in backward, if they are summed in files
        self.sums: EngineSums | None = None
        in_files = "grads=nvme" in settings.get("placement", "")
        if in_files or self.device is not None:
            self.sums = EngineSums(self.engine, self.waited, in_files, accelerator)
        self._begins_in_store = self.engine.resumed or loaded is not None
        if self._begins_in_store:
            for place in self._staged:
                place.begin_writing()
            for index, param in enumerate(held):
                self._places[index].write(index, param)
                torch.autograd.graph.increment_version(param)
        self._seen = LastSeen(held, kept)
        if streaming is not None:
            there = range(len(self.parts) if self._begins_in_store and not model_has_values else 0)
            streaming.take(self, there)
            if self._begins_in_store and model_has_values:  # and the records have others
                self._become_masters.update(kept)
        _all.add(self)

    def _take_parts(self, parts: Sequence[Part], names: Sequence[str], groups: Sequence[int]) -> list[int]:
        """Notes which parameters this rank has parts of; returns the groups of these."""
        #: all parameters; this rank may have no part of some
        self.members = [part.param for part in parts]
        # Checks the parameters of other ranks too, so that every rank refuses the same ones.
        kinds = [
            kind_of(part, part.memory(), name) for part, name in zip(parts, names, strict=True)
        ]
        here = [i for i, part in enumerate(parts) if part.memory().numel() > 0]
        self.parts = [parts[i] for i in here] or [Nothing()]
        self.params = [part.param for part in self.parts]
        self.names = [names[i] for i in here] or ["(none)"]
        self._names_of = dict(zip(self.members, names, strict=True))
        # The steps of parameters that only other ranks have; the engine counts the steps of all
        # others.
        self._elsewhere = dict.fromkeys(set(self.members) - set(self.params), 0)
        shapes = {part.param: kind.shape for part, kind in zip(parts, kinds, strict=True)}
        self._shapes_elsewhere = {param: shapes[param] for param in self._elsewhere}
        self._versions_elsewhere = {param: param._version for param in self._elsewhere}
        self._indices = {param: i for i, param in enumerate(self.params)}
        own_groups = [groups[i] for i in here] or [0]
        self._group_count = max(own_groups) + 1  # other ranks may have parts of more groups
        self._kinds = [kinds[i] for i in here] or [kind_of(self.parts[0], self.parts[0].memory(), "(none)")]
        return own_groups

    def _open_engine(
        self,
        given: list[Param],
        settings: dict[str, Any],
        runtime: Runtime,
        accelerator: Accelerator | None,
        loaded: tuple[int, dict[str, Any]] | None,
    ) -> None:
        settings = dict(settings)
        wholes: list[Whole] = []
        if self._streaming is not None:
            given = given + self._streaming.frozen(self.members, self.names)
            wholes = self._streaming.number(self._indices, self.members, len(given))
        if wholes:
            settings["wholes"] = [asdict(one) for one in wholes]
        for place in self._staged:
            place.finish_reading()
        settings |= settings_of_places(self.parts, self.names, len(given), self.store is not None)
        #: memory of the GPU that units are brought to, if the engine has some
        self.device: Device | None = None
        if accelerator is not None and "device_memory" in settings:
            self.device = Device(runtime, accelerator.index, settings.pop("device_memory"))
            settings["device"] = self.device.handle
        self.engine = Engine(
            runtime,
            given,
            settings,
            kept=(self._staged, self.device),
            load=loaded,
            words=in_arguments,
            wholes=[Param(one.name, (one.count,), one.dtype, None) for one in wholes],
        )

    def _is_kept(self, index: int) -> bool:
        return isinstance(self._places[index], AtEngine)

    def index(self, param: torch.Tensor) -> int | None:
        """Returns the parameter's index in `params`, or None if this rank has no part of it."""
        return self._indices.get(param)

    @property
    def is_stored(self) -> bool:
        """Returns whether the store has a state already, which another engine would resume."""
        return self._begins_in_store or self.engine.durable_generation > 0

    def give_back(self) -> None:
        """Gives the model the values that the engine keeps, before the engine is closed."""
        if self._streaming is not None:
            self._streaming.give_back()

    def close(self) -> None:
        self.give_back()
        if self.sums is not None:
            self.sums.close()
        _all.discard(self)
        self.engine.close()
        if self.device is not None:
            self.device.close()
        for place in self._staged:
            place.finish_reading()
            place.finish_writing()

    def end(self) -> None:
        """Closes the engine of an optimizer that is no more, as its close() does."""
        self.wait()
        if self.store is not None:
            self.engine.make_durable()
        self.close()
        self._hooks.detach()

    @property
    def keeps(self) -> bool:
        """Returns whether the engine keeps parameters, which wait when their units are brought."""
        return self._streaming is not None

    @property
    def is_staged(self) -> bool:
        """Returns whether a parameter is on an accelerator."""
        return bool(self._staged)

    def figures(self) -> dict[str, int]:
        """Returns the engine's counters, and since this was opened the bytes copied from and to
        accelerators, the time that the script has waited, how often units were brought and what was read
        of frozen parameters in their own files."""
        streaming = self._streaming
        moved = {
            "device_down_bytes": sum(place.down_bytes for place in self._staged),
            "device_up_bytes": sum(place.up_bytes for place in self._staged),
            "brought_units": 0 if streaming is None else streaming.units_brought,
            "brought_experts": 0 if streaming is None else streaming.experts_brought,
            "brought_backward": 0 if streaming is None else streaming.brought_backward,
            "brought_bytes": 0 if streaming is None else streaming.brought_bytes,
            "frozen_read_bytes": 0 if streaming is None else streaming.files.read_bytes,
            "tiles_read_bytes": 0 if streaming is None else streaming.tiles_read_bytes,
        }
        kept = None if streaming is None else streaming.activations
        moved |= {} if kept is None else kept.counters()
        return self.engine.figures() | moved | self.waited.figures()

    @property
    def pending(self) -> bool:
        return bool(self._lent)

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """Called in backward when a gradient has arrived. The engine may then read ahead for the
        step."""
        with self._arriving:
            if not self._expecting:
                self._expecting = True
                self.engine.expect_gradients()
        index = self.index(param)
        if index is None:
            return
        if index in self._lent:
            raise ZigguratError(
                f"parameter '{self.names[index]}' has a gradient from a forward that did not wait "
                "for the parameter's new value: call optimizer.synchronize() before you use the "
                "parameter outside its module"
            )
        self._places[index].gradient_arrived(index, param)

    def hands_over(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Returns whether backward hands a parameter's gradient to the engine. Small parameters share records,
        so that a sum in a file would write others' too. Where an accelerator computes, what it is not brought
        stays as it is."""
        if self.sums is None or not in_backward():
            return False
        if self.sums_in_files:
            return grad.numel() >= TILE
        index = self.index(param)
        return index is not None and self._is_kept(index)

    @property
    def sums_in_files(self) -> bool:
        return self.sums is not None and self.sums.in_files

    def sums_of(self, param: torch.Tensor) -> tuple[EngineSums, int] | None:
        """Returns what sums this rank's slice of a gradient in files, and the parameter's index there, if there
        are both."""
        index = self.index(param)
        return None if self.sums is None or not self.sums_in_files or index is None else (self.sums, index)

    def wait_written(self, param: torch.Tensor) -> None:
        """Returns when the engine has written this rank's part of `param`. Any thread may call
        it."""
        index = self.index(param)
        if index is not None and not self._all_written:
            self.engine.wait(index)

    def has_gradient(self) -> bool:
        """Returns whether any parameter has a gradient on this rank, even one of which this rank
        has no part."""
        return any(param.grad is not None for param in self.members)

    def step(self, groups: list[GroupStep], blob_follows: bool = False) -> None:
        """Begins a step with all gradients."""
        self.beside.end()
        self.wait()
        if self._streaming is None:
            self._step(groups, blob_follows)
            return
        self._streaming.require_unused("step()")
        with self._streaming.alone(self._streaming.units[0]):
            self._step(groups, blob_follows)

    def _step(self, groups: list[GroupStep], blob_follows: bool) -> None:
        if self._is_beside:
            self._hooks.move_scales(self.params, scales_to_host)
        # All gradients are taken before the first is lent, so that a step that is refused has lent
        # none.
        summed = self._handed_over()
        taken, scales = self._taken(without=summed)
        for place in self._staged:
            place.finish_writing()
        self._look_at_params()
        if self._is_beside or any(own is None for own in taken.values()):
            taken = {index: self._in_host_memory(index, own) for index, own in taken.items()}
        lent = cast(dict[int, torch.Tensor], taken)
        for place in self._staged:
            place.finish_reading()
        self._give_masters()
        if self.sums is not None:
            self.sums.let_others_go(summed)
        if summed:
            for index in set(range(len(self.parts))).difference(lent, summed):
                self.engine.discard_gradient(index)
        else:
            self.engine.discard_gradients()
        self.engine.lend_gradients(
            list(lent),
            [DTYPES[tensor.dtype] for tensor in lent.values()],
            [tensor.data_ptr() for tensor in lent.values()],
            scales,
        )
        # Updates at once on the CPU, where workers that ran beside the next forward would take
        # turns with PyTorch's own threads.
        with self._scaled(summed):
            generation = self.engine.step(
                groups[: self._group_count],
                blob_follows=blob_follows,
                update_at_once=not self._is_beside,
            )
        self._become_masters.clear()
        self._given.clear()
        self._all_written = not self._is_beside and self._in_memory
        if self._all_written:  # the parameters are already updated when step() returns
            self.engine.wait()
        if generation == 1:
            # A new store's records are made from all parameters, those without a gradient too, and
            # nobody waits for these.
            self.engine.wait()
        self._lent = lent | dict.fromkeys(summed, _AT_ENGINE)
        for param in self._elsewhere:
            self._elsewhere[param] += param.grad is not None
        self._expecting = self.loaded = False
        for place in self._staged:
            place.begin_writing()

    def _handed_over(self) -> dict[int, HandedOver]:
        """Returns by index the gradients whose values the engine has. Errors: InvalidArgument for one
        that an earlier step has consumed."""
        found: dict[int, HandedOver] = {}
        if self.sums is None:
            return found
        for index, part in enumerate(self.parts):
            content = content_of(part.param.grad)
            if content is None:
                continue
            content.check_for_step()
            # One that the script has moved to another parameter is lent from memory.
            if content.at_engine and content.sums is self.sums and content.index == index:
                found[index] = content
        return found

    @contextlib.contextmanager
    def _scaled(self, contents: dict[int, HandedOver]) -> Iterator[None]:
        """Makes a step within, for which the engine multiplies gradients that it has. If the step is
        refused, they are as before."""
        if not contents:
            yield
            return
        before = self.engine.generation
        for index, content in contents.items():
            self.engine.scale_gradient(index, content.factor)
        try:
            yield
        finally:
            made = True  # unless the engine says otherwise
            with contextlib.suppress(ZigguratError):  # it may have ended
                made = self.engine.generation > before
                for index in () if made else contents:
                    self.engine.scale_gradient(index, 1.0)
            if made and self.sums is not None:
                self.sums.used()

    def _taken(self, without: Container[int]) -> tuple[dict[int, torch.Tensor | None], list[float]]:
        """Returns, by index, the gradient of each part that has one, and the factor for each
        gradient; not of those in `without`."""
        taken: dict[int, torch.Tensor | None] = {}
        scales = []
        hooks = self._hooks
        for index, part in enumerate(self.parts):
            if index in without:
                continue
            # Most gradients are whole and as backward made them.
            content = in_place(part.param.grad) if type(part) in _WHOLE else None
            if content is not None:
                content.taken = True
                taken[index] = content.part
                scales.append(1.0)
            elif (gradient := part.take(hooks)) is not None:
                taken[index] = gradient.tensor
                scales.append(gradient.scale)
        return taken, scales

    def _in_host_memory(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Returns a gradient's host memory, which holds the values from finish_reading() on; zeros
        if there is no gradient."""
        param = self.params[index]
        if gradient is None:
            return torch.zeros(self._kinds[index].shape, dtype=param.dtype, device="cpu")
        return self._places[index].gradient(index, param, gradient)

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every parameter, has the value of the newest step."""
        if index is None:
            if not self._lent:
                return
            with torch.profiler.record_function("ziggurat.wait"):
                if self._staged:
                    # The first parameters are copied while the engine works on the rest.
                    for pending in list(self._lent):
                        self.wait(pending)
                if not self._all_written:
                    self.engine.wait()
            self._deliver(list(self._lent))
        else:
            self.wait_for([index])

    def wait_for(self, indices: Iterable[int]) -> None:
        """Returns when these parameters have the value of the newest step."""
        pending = [index for index in indices if index in self._lent]
        if not pending:
            return
        if not self._all_written:
            for index in pending:
                self.engine.wait(index)
        self._deliver(pending)

    def wait_but_for_kept(self) -> None:
        """Returns when the parameters that the engine does not keep have the value of the newest
        step."""
        self.wait_for(index for index in list(self._lent) if not self._is_kept(index))

    def _deliver(self, pending: Sequence[int]) -> None:
        """Called when the engine has written the `pending` parameters: gives them back to the
        model."""
        held = [self.parts[index].memory() for index in pending]
        with as_plain_tensors():  # what is away would be asked for each look
            done = ((index, self._seen.what_was_done(index, param)) for index, param in zip(pending, held, strict=True))
            faults = {index: what for index, what in done if what is not None}
            count_writes([*held, *self._wholes_of(pending)])
            for index, param in zip(pending, held, strict=True):
                if index not in faults:
                    self._seen.saw_version(index, param)
        if self._streaming is not None:
            self._streaming.let_tiles_go()
        copying = {place for place in self._every_place if place.copies_back}
        for index, param in zip(pending, held, strict=True):
            del self._lent[index]
            part = self.parts[index]
            content = in_place(part.param.grad) if type(part) in _WHOLE else None
            if content is None:
                part.consumed(self._hooks)
            elif content.taken:
                content.consumed_by_step(keep=True)
            if index in faults:
                continue
            if copying and self._places[index] in copying:
                self._places[index].write(index, param)
                self._seen.saw_version(index, param)
        for index, fault in faults.items():
            raise ZigguratError(
                f"parameter '{self.names[index]}' was {fault} during a step, so training cannot go "
                "on with it: call optimizer.synchronize() before you change it"
            )

    def _wholes_of(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Returns the parameters of which the engine keeps slices, which are other tensors."""
        parts = (self.parts[index] for index in indices)
        return [part.param for part in parts if isinstance(part, KeptSlice)]

    def _look_at_params(self) -> None:
        """Finds the parameters that somebody has written since the last step. The next step makes
        their masters from them."""
        for param in self._elsewhere:
            self._versions_elsewhere[param] = param._version
        for index, part in enumerate(self.parts):
            param = part.memory()
            if not self._seen.is_written(index, param):
                continue
            if self._seen.was_moved(index, param):
                name, was = self.names[index], self._kinds[index]
                kind = kind_of(part, param, name)
                if kind != was:
                    raise InvalidArgument(
                        f"parameter '{name}' is {kind} now, but was {was}: make the optimizer "
                        "after all calls that change the model, such as model.to(dtype or device)"
                    )
                self._seen.saw_place(index, param)
            memory = self._places[index].read(index, param)
            if memory.data_ptr() != self._lent_at[index]:
                self.engine.lend_param(
                    index, self._kinds[index].dtype, memory.data_ptr(), memory.numel()
                )
                self._lent_at[index] = memory.data_ptr()
            self._becomes_master(index)
            self._seen.saw_version(index, param)

    def kept_was_written(self, number: int, own: int | None) -> None:
        """Tells that somebody has written a parameter that the engine keeps, while its unit is
        acquired. `own` is this rank's part of it, if it has one."""
        self.engine.param_written(number)
        if own is None or own >= len(self.parts):  # another rank's, or frozen, so it has no master
            return
        self._seen.saw_version(own, self.parts[own].memory())
        self._become_masters.add(own)

    def _becomes_master(self, index: int) -> None:
        if self._is_kept(index):  # and away, as a rule
            values = self._places[index].values(index, self.parts[index].memory())
            self.engine.write_param(index, values.data_ptr())
        else:
            self.engine.param_written(index)
        self._become_masters.add(index)

    def becomes_master(self, param: torch.Tensor) -> None:
        """Lets the next step make the parameter's master from the parameter."""
        index = self.index(param)
        if index is not None:
            self._becomes_master(index)

    def unsettled(self) -> list[str]:
        """Returns the names of the parameters of which the next step replaces something: those that
        somebody has written, and those with loaded state. Changes nothing. No step is in
        progress."""
        return self.loaded_names() + [self._names_of[param] for param in self.written()]

    def written(self) -> list[torch.Tensor]:
        """Returns the parameters that somebody has written since the newest step, on this rank, of
        which it may have no part. No step is in progress."""
        here = [
            part.param
            for index, part in enumerate(self.parts)
            if index in self._become_masters or self._seen.is_written(index, part.memory())
        ]
        return here + [
            param
            for param, version in self._versions_elsewhere.items()
            if param._version != version
        ]

    def loaded_names(self) -> list[str]:
        """Returns the names of the parameters with loaded state, which the next step takes over."""
        return [self._names_of[param] for param in (*self.masters, *self._given)]

    def name_of(self, param: torch.Tensor) -> str:
        return self._names_of[param]

    def rounds_to(self, master: torch.Tensor, values: torch.Tensor) -> bool:
        """Returns whether a step makes `values`, and nothing else, of `master`."""
        if master.numel() != values.numel():
            return False
        if self._params_drawn and values.dtype == torch.bfloat16:
            return False  # the store would draw the parameter again: maybe the other neighbour
        return rounds_to(master.view(values.shape), values.cpu(), stochastic=False)

    def params_written(self) -> None:
        """Lets the next step make the masters of the parameters that somebody has written from
        their present values, unless write_state() changes those masters later. No step is in
        progress."""
        for place in self._staged:
            place.finish_writing()
        self._look_at_params()
        for place in self._staged:
            place.finish_reading()

    def settle(self) -> None:
        """Writes into the engine's state all that a step would take over first. All ranks call
        this. No step is in progress."""
        self.params_written()
        self._give_masters()
        begins = self.engine.generation == 0
        for index in sorted(self._become_masters):
            if begins and self._is_kept(index):  # and is its own master already
                self._become_masters.discard(index)
                continue
            values = self._places[index].values(index, self.parts[index].memory())
            self._write_state(index, "master", values)
            self.loaded = True
        self._given.clear()

    def steps_of(self, param: torch.Tensor) -> int:
        """Returns how many steps the parameter has made, whichever rank has its state."""
        index = self.index(param)
        return self._elsewhere[param] if index is None else self.engine.steps_of(index)

    def set_steps(self, param: torch.Tensor, steps: int) -> None:
        index = self.index(param)
        if index is None:
            self._elsewhere[param] = steps
        else:
            self.engine.set_steps(index, steps)

    def read_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns this rank's part of the array, in fp32, as of the newest step or as written
        since."""
        index = self.index(param)
        if index is None:
            return torch.empty(self._shapes_elsewhere[param], dtype=torch.float32, device="cpu")
        values = torch.empty(self._kinds[index].shape, dtype=torch.float32, device="cpu")
        self.engine.read_state(index, name, values.data_ptr(), values.numel())
        return values

    def read_state_of(
        self, rank: int, param: torch.Tensor, name: str, values: torch.Tensor
    ) -> None:
        """Reads into `values` (fp32) what `rank` has of the parameter. That rank need not do
        anything."""
        self.engine.read_state_of(
            rank, self._names_of[param], name, values.data_ptr(), values.numel()
        )

    def write_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Writes this rank's part of `values`, which are the whole parameter's."""
        self._given.add(param)
        index = self.index(param)
        if index is not None:
            self._write_state(index, name, self.parts[index].of_whole(values))

    def _write_state(self, index: int, name: str, values: torch.Tensor) -> None:
        given = as_fp32(values)
        self.engine.write_state(index, name, given.data_ptr(), given.numel())
        if name == "master":
            self._become_masters.discard(index)

    def _give_masters(self) -> None:
        """Gives loaded masters to the engine at a step. By then the model has its values too,
        whichever of the two was loaded first."""
        for param, master in self.masters.items():
            index = self.index(param)
            if index is None:
                continue
            part = self.parts[index]
            values = self._places[index].values(index, part.memory())
            if rounds_to(part.of_whole(master), values, self._params_drawn):
                self.write_state(param, "master", master)
            else:
                self._becomes_master(index)
        self.masters.clear()
