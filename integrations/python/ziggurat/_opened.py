# SPDX-License-Identifier: Apache-2.0
"""The engine of an optimizer's parameters, from the optimizer's first step on."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ziggurat._device import Staged, check_device, check_layout, places_of, scales_to_host
from ziggurat._gradient import GradientHooks, in_place
from ziggurat._gradient_content import count_writes
from ziggurat._native import (
    Engine,
    GroupStep,
    InvalidArgument,
    Param,
    Runtime,
    Unimplemented,
    ZigguratError,
)
from ziggurat._parts import Nothing, Part
from ziggurat._words import in_arguments

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _as_fp32(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` as the engine rounds masters: bf16 to nearest, ties away from zero."""
    if dtype != torch.bfloat16 or values.dtype != torch.float32:
        return values.to(dtype)
    nearest = (values.contiguous().view(torch.int32) + 0x8000) >> 16
    return nearest.to(torch.int16).view(torch.bfloat16)


def _draws_noise(settings: Mapping[str, Any]) -> bool:
    """Whether the engine may round anything stochastically."""
    words = {name: settings.get(name) for name in ("rounding", "state_rounding", "param_rounding")}
    kept = settings.get("state_format") in ("bf16", "bf16-moments")
    of_state = words["state_rounding"] or words["rounding"] or "stochastic"  # as a new store's is
    return "stochastic" in words.values() or (kept and of_state == "stochastic")


def _require_runs(parts: Sequence[Part], names: Sequence[str]) -> None:
    """Errors: where noise would depend on how ranks divide a parameter; the same on every rank."""
    for part, name in zip(parts, names, strict=True):
        if not part.is_run():
            placed = getattr(part.param, "placements", "")
            raise Unimplemented(
                f"parameter '{name}' is placed as {placed}: the elements of a rank's part do not "
                "follow one another in the whole, so stochastic rounding would have other bits on "
                "another number of ranks: shard it in dimension 0, as fully_shard() does without "
                'shard_placement_fn, or give state_rounding="nearest" and param_rounding="nearest"'
            )


def rounds_to(master: torch.Tensor, param: torch.Tensor, stochastic: bool = False) -> bool:
    """`param` is what the engine rounds `master` to; `stochastic`: either of its neighbours."""
    if stochastic and param.dtype == torch.bfloat16:
        bits = _as_fp32(master).contiguous().view(torch.int32)
        low = (bits >> 16).to(torch.int16)
        high = ((bits + 0xFFFF) >> 16).to(torch.int16)
        found = param.detach().contiguous().view(torch.int16)
        return bool(((found == low) | (found == high)).all())
    made, param = rounded(_as_fp32(master), param.dtype), param.detach()
    if param.dtype != torch.bfloat16:
        return torch.equal(made, param)
    return torch.equal(made.view(torch.int16), param.view(torch.int16))


_Laid = tuple[torch.Size, tuple[int, ...]]


def _laid(param: torch.Tensor) -> _Laid:
    """Shape and strides: ``p.data = x`` counts no write of `p`, and may leave its address."""
    return param.shape, param.stride()


class _Kind(NamedTuple):
    """What a parameter stays."""

    dtype: str
    shape: tuple[int, ...]  # of what is here
    device: torch.device
    whole: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{self.dtype} of {self.whole}{where}"


def _kind_of(part: Part, param: torch.Tensor, name: str) -> _Kind:
    """`param`: the part's memory. Errors: what the engine cannot take, naming the parameter."""
    check_device(param, name)
    if param.dtype not in DTYPES:
        raise InvalidArgument(f"parameter '{name}' is {param.dtype}, but must be fp32, bf16 or fp16")
    if not param.is_contiguous():
        check_layout(param, name)
    shape = tuple(param.shape)
    whole = shape if part.param is param else tuple(part.param.shape)
    return _Kind(DTYPES[param.dtype], shape, param.device, whole)


_runtimes: weakref.WeakValueDictionary[tuple[int, int], Runtime] = weakref.WeakValueDictionary()


def runtime_of(threads: int) -> Runtime:
    """The process's, which all its engines share; a forked child has its own."""
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
    ) -> None:
        """`load`: of these parts, what Engine takes of a checkpoint."""
        if _draws_noise(settings):
            _require_runs(parts, names)
        self.members = [part.param for part in parts]  #: of some, nothing may be on this rank
        # Those of other ranks too, so that every rank refuses the same.
        kinds = [
            _kind_of(part, part.memory(), name) for part, name in zip(parts, names, strict=True)
        ]
        self.store: str | None = settings.get("store")  #: the directory of a state on a drive
        here = [i for i, part in enumerate(parts) if part.memory().numel() > 0]
        self.parts = [parts[i] for i in here] or [Nothing()]
        self.params = [part.param for part in self.parts]
        self.names = [names[i] for i in here] or ["(none)"]
        self._names_of = dict(zip(self.members, names, strict=True))
        # Steps of what is on other ranks alone: of all else the engine knows them.
        self._elsewhere = dict.fromkeys(set(self.members) - set(self.params), 0)
        self._hooks = hooks
        self._params_drawn = "stochastic" in (
            settings.get("rounding"), settings.get("param_rounding")
        )
        # The gradients of pending parameters, which must not go where another takes their place.
        self._lent: dict[int, torch.Tensor] = {}
        self._in_memory = settings.get("placement") == "optimizer=host"
        self._all_written = False  # of the newest step, and nothing waits for the engine
        self._expecting = False
        self._arriving = threading.Lock()  # each accelerator's backward has a thread of its own
        self.loaded = False  #: state that goes into the records with the next step
        self.masters: dict[torch.Tensor, torch.Tensor] = {}  #: loaded, until the next step
        self._indices = {param: i for i, param in enumerate(self.params)}
        own_groups = [groups[i] for i in here] or [0]
        self._group_count = max(own_groups) + 1  # other ranks may have parts of more groups
        held = [part.memory() for part in self.parts]
        self._kinds = [kinds[i] for i in here] or [_kind_of(self.parts[0], held[0], "(none)")]
        self._places = places_of(held)
        self._every_place = set(self._places)
        self._staged = {place for place in self._places if isinstance(place, Staged)}
        memory = [self._places[i].read(i, param) for i, param in enumerate(held)]
        listed = [
            Param(name, kind.shape, kind.dtype, lent.data_ptr(), group)
            for name, kind, lent, group in zip(
                self.names, self._kinds, memory, own_groups, strict=True
            )
        ]
        for place in self._staged:
            place.finish_reading()
        loaded = None if load is None else load(self.parts)
        # Rounded alike on whatever rank it is, where the settings, the store or the checkpoint say
        # stochastically.
        firsts = [part.first_element() if part.is_run() else 0 for part in self.parts]
        if any(firsts):
            settings = {**settings, "first_elements": firsts}
        self.engine = Engine(
            runtime(), listed, settings, kept=self._staged, load=loaded, words=in_arguments
        )
        # As the engine left them: a parameter that differs was written or moved by somebody else.
        if self.engine.resumed or loaded is not None:
            for place in self._staged:
                place.begin_writing()
            for index, param in enumerate(held):
                self._places[index].write(index, param)
                torch.autograd.graph.increment_version(param)
        self._versions = [param._version for param in held]
        self._addresses = [param.data_ptr() for param in held]
        # Many alike share one object, since the garbage collector walks each.
        known: dict[_Laid, _Laid] = {}
        self._laid = [known.setdefault(laid, laid) for laid in map(_laid, held)]
        self._memory = [param.detach() for param in held]  # which stays as long as it is lent
        self._lent_at = [lent.data_ptr() for lent in memory]  # what the engine has

    def index(self, param: torch.Tensor) -> int | None:
        """In `params`; None: nothing of it is here."""
        return self._indices.get(param)

    def close(self) -> None:
        self.engine.close()
        for place in self._staged:
            place.finish_reading()
            place.finish_writing()

    @property
    def is_staged(self) -> bool:
        """Whether a parameter is on an accelerator."""
        return bool(self._staged)

    def figures(self) -> dict[str, int]:
        """The engine's, and what was copied from and to accelerators since this was opened."""
        moved = {
            "device_down_bytes": sum(place.down_bytes for place in self._staged),
            "device_up_bytes": sum(place.up_bytes for place in self._staged),
        }
        return self.engine.figures() | moved

    @property
    def pending(self) -> bool:
        return bool(self._lent)

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """In backward: the engine may read ahead what the step will need."""
        with self._arriving:
            if not self._expecting:
                self._expecting = True
                self.engine.expect_gradients()
        index = self.index(param)
        if index is None:
            return
        if index in self._lent:
            raise ZigguratError(
                f"parameter '{self.names[index]}' has a gradient of a forward that did not wait "
                "for its new value: call optimizer.synchronize() before what uses it outside its "
                "module"
            )
        self._places[index].gradient_arrived(index, param)

    def wait_written(self, param: torch.Tensor) -> None:
        """Returns when the engine has written what is here of `param`; any thread's."""
        index = self.index(param)
        if index is not None and not self._all_written:
            self.engine.wait(index)

    def has_gradient(self) -> bool:
        """Whether a step has something to do, on some rank at least."""
        return any(param.grad is not None for param in self.members)

    def step(self, groups: list[GroupStep], blob_follows: bool = False) -> None:
        """Begins a step of all gradients."""
        self.wait()
        if self._staged:
            self._hooks.move_scales(self.params, scales_to_host)
        # All are looked at before the first is given: a step that is refused has given nothing.
        taken, scales = self._taken()
        for place in self._staged:
            place.finish_writing()
        self._look_at_params()
        if self._staged or any(own is None for own in taken.values()):
            taken = {index: self._in_host_memory(index, own) for index, own in taken.items()}
        lent = cast(dict[int, torch.Tensor], taken)
        for place in self._staged:
            place.finish_reading()
        self._give_masters()
        self.engine.discard_gradients()
        self.engine.lend_gradients(
            list(lent),
            [DTYPES[tensor.dtype] for tensor in lent.values()],
            [tensor.data_ptr() for tensor in lent.values()],
            scales,
        )
        # On the CPU, workers in the next forward would take turns with PyTorch's own threads.
        self.engine.step(
            groups[: self._group_count],
            blob_follows=blob_follows,
            update_at_once=not self._staged,
        )
        self._all_written = not self._staged and self._in_memory
        if self._all_written:  # when step() has returned
            self.engine.wait()
        self._lent = lent
        for param in self._elsewhere:
            self._elsewhere[param] += param.grad is not None
        self._expecting = self.loaded = False
        for place in self._staged:
            place.begin_writing()

    def _taken(self) -> tuple[dict[int, torch.Tensor | None], list[float]]:
        """What each part's gradient is of those that have one, and what it is to be multiplied by."""
        taken: dict[int, torch.Tensor | None] = {}
        scales = []
        hooks = self._hooks
        for index, part in enumerate(self.parts):
            # Most are that of a whole parameter, as backward made it.
            content = in_place(part.param.grad) if type(part) is Part else None
            if content is not None:
                content.taken = True
                taken[index] = content.part
                scales.append(1.0)
            elif (gradient := part.take(hooks)) is not None:
                taken[index] = gradient.tensor
                scales.append(gradient.scale)
        return taken, scales

    def _in_host_memory(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """From finish_reading() on. No gradient: zeros."""
        param = self.params[index]
        if gradient is None:
            return torch.zeros(self._kinds[index].shape, dtype=param.dtype)
        return self._places[index].gradient(index, param, gradient)

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every one, is that of the newest step."""
        if index is None:
            if not self._lent:
                return
            with torch.profiler.record_function("ziggurat.wait"):
                if self._staged:
                    # The first are copied while the engine is at the others.
                    for pending in list(self._lent):
                        self.wait(pending)
                if not self._all_written:
                    self.engine.wait()
            self._deliver(list(self._lent))
        elif index in self._lent:
            if not self._all_written:
                self.engine.wait(index)
            self._deliver([index])

    def _deliver(self, pending: Sequence[int]) -> None:
        """The engine has written them."""
        held = [self.parts[index].memory() for index in pending]
        faults = {
            index: "moved" if param._version == self._versions[index] else "written"
            for index, param in zip(pending, held, strict=True)
            if param._version != self._versions[index] or self._moved(index, param)
        }
        count_writes(held)
        copying = {place for place in self._every_place if place.copies_back}
        for index, param in zip(pending, held, strict=True):
            del self._lent[index]
            part = self.parts[index]
            content = in_place(part.param.grad) if type(part) is Part else None
            if content is None:
                part.consumed(self._hooks)
            elif content.taken:
                content.consumed_by_step(keep=True)
            if index in faults:
                continue
            if copying and self._places[index] in copying:
                self._places[index].write(index, param)
            self._versions[index] = param._version
        for index, fault in faults.items():
            raise ZigguratError(
                f"parameter '{self.names[index]}' was {fault} while a step was under way, and has "
                "no value to go on with: call optimizer.synchronize() before"
            )

    def _moved(self, index: int, param: torch.Tensor) -> bool:
        """Whether it lies otherwise than before."""
        if param.data_ptr() != self._addresses[index]:
            return True
        shape, strides = self._laid[index]
        return param.shape != shape or param.stride() != strides

    def _is_written(self, index: int, param: torch.Tensor) -> bool:
        """Since the engine wrote it, or took it last."""
        return param._version != self._versions[index] or self._moved(index, param)

    def _look_at_params(self) -> list[int]:
        """Those that were written since: their masters are taken anew at the step."""
        written = []
        for index, part in enumerate(self.parts):
            param = part.memory()
            if not self._is_written(index, param):
                continue
            if self._moved(index, param):
                name, was = self.names[index], self._kinds[index]
                kind = _kind_of(part, param, name)
                if kind != was:
                    raise InvalidArgument(
                        f"parameter '{name}' is {kind} now, but was {was}: make the optimizer "
                        "after what changes the model, such as model.to(dtype or device)"
                    )
                self._addresses[index], self._laid[index] = param.data_ptr(), _laid(param)
                self._memory[index] = param.detach()
            memory = self._places[index].read(index, param)
            if memory.data_ptr() != self._lent_at[index]:
                self.engine.lend_param(
                    index, self._kinds[index].dtype, memory.data_ptr(), memory.numel()
                )
                self._lent_at[index] = memory.data_ptr()
            self.engine.param_written(index)
            self._versions[index] = param._version
            written.append(index)
        return written

    def unsettled(self) -> list[str]:
        """Parameters whose masters a step takes anew: written since, or given with a state that was
        loaded. Nothing is taken. No step is under way."""
        written = [
            name
            for index, (name, part) in enumerate(zip(self.names, self.parts, strict=True))
            if self._is_written(index, part.memory())
        ]
        return written + [self._names_of[param] for param in self.masters]

    def params_written(self) -> list[int]:
        """Masters are those of the parameters as they are, but for what write_state() gives from
        here on. No step is under way. Which were written."""
        for place in self._staged:
            place.finish_writing()
        written = self._look_at_params()
        for place in self._staged:
            place.finish_reading()
        return written

    def settle(self) -> None:
        """All that a step would take over first is in the engine's state. None is under way."""
        for index in self.params_written():
            given = _as_fp32(self._places[index].values(index, self.parts[index].memory()))
            self.engine.write_state(index, "master", given.data_ptr(), given.numel())
        self._give_masters()

    def steps_of(self, param: torch.Tensor) -> int:
        """Steps that it has made, wherever its state is."""
        index = self.index(param)
        return self._elsewhere[param] if index is None else self.engine.steps_of(index)

    def set_steps(self, param: torch.Tensor, steps: int) -> None:
        index = self.index(param)
        if index is None:
            self._elsewhere[param] = steps
        else:
            self.engine.set_steps(index, steps)

    def read_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """In fp32, of the part that is here; of the newest step, or what was written since."""
        index = self.index(param)
        if index is None:
            return torch.empty(0, dtype=torch.float32)
        values = torch.empty(self._kinds[index].shape, dtype=torch.float32)
        self.engine.read_state(index, name, values.data_ptr(), values.numel())
        return values

    def read_state_of(
        self, rank: int, param: torch.Tensor, name: str, values: torch.Tensor
    ) -> None:
        """Into `values`, fp32, what `rank` has of it; that rank need not do anything."""
        self.engine.read_state_of(
            rank, self._names_of[param], name, values.data_ptr(), values.numel()
        )

    def write_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """`values`: of the whole parameter."""
        index = self.index(param)
        if index is not None:
            given = _as_fp32(self.parts[index].of_whole(values))
            self.engine.write_state(index, name, given.data_ptr(), given.numel())

    def _give_masters(self) -> None:
        """At a step: by now the model has its values, loaded before the optimizer's or after."""
        for param, master in self.masters.items():
            index = self.index(param)
            if index is None:
                continue
            part = self.parts[index]
            values = self._places[index].values(index, part.memory())
            if rounds_to(part.of_whole(master), values, self._params_drawn):
                self.write_state(param, "master", master)
            else:
                self.engine.param_written(index)
        self.masters.clear()
