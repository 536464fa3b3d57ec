# SPDX-License-Identifier: Apache-2.0
"""The engine of an optimizer's parameters, from the optimizer's first step on."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ziggurat._device import Staged, check_device, places_of, scales_to_host, workers_beside
from ziggurat._gradient import GradientHooks
from ziggurat._native import Engine, GroupStep, InvalidArgument, Param, Runtime, ZigguratError

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _as_fp32(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()


def rounds_to(master: torch.Tensor, param: torch.Tensor) -> bool:
    """`param` is what the engine rounds `master` to: bf16 to nearest, ties away from zero."""
    master, param = _as_fp32(master), param.detach()
    if param.dtype != torch.bfloat16:
        return torch.equal(master.to(param.dtype), param)
    nearest = (master.view(torch.int32) + 0x8000) >> 16
    return torch.equal(nearest.to(torch.int16), param.view(torch.int16))


class _Kind(NamedTuple):
    """What a parameter stays."""

    dtype: str
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{self.dtype} of {self.shape}{where}"


def _kind_of(param: torch.Tensor, name: str) -> _Kind:
    """Errors: what the engine cannot take, naming the parameter."""
    check_device(param, name)
    if param.dtype not in _DTYPES:
        raise InvalidArgument(f"parameter '{name}' is {param.dtype}: fp32, bf16 and fp16 are known")
    if not param.is_contiguous():
        raise InvalidArgument(f"parameter '{name}' is not contiguous: call .contiguous() before")
    return _Kind(_DTYPES[param.dtype], tuple(param.shape), param.device)


_runtimes: weakref.WeakValueDictionary[tuple[int, int], Runtime] = weakref.WeakValueDictionary()


def _runtime(threads: int) -> Runtime:
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
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        groups: Sequence[int],
        hooks: GradientHooks,
        threads: int,
        settings: dict[str, Any],
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self._hooks = hooks
        self._group_count = max(groups) + 1
        # The gradients of pending parameters, and the memory that the engine writes, which must not
        # go where another takes its place.
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._expecting = False
        self._arriving = threading.Lock()  # each accelerator's backward has a thread of its own
        self.loaded = False  #: state that goes into the records with the next step
        self.masters: dict[int, torch.Tensor] = {}  #: that were loaded, until the next step
        self._kinds = [_kind_of(*one) for one in zip(self.params, self.names, strict=True)]
        self._places = places_of(self.params)
        self._staged = {place for place in self._places if isinstance(place, Staged)}
        memory = [self._places[i].read(i, param) for i, param in enumerate(self.params)]
        listed = [
            Param(name, kind.shape, kind.dtype, lent.data_ptr(), group)
            for name, kind, lent, group in zip(
                self.names, self._kinds, memory, groups, strict=True
            )
        ]
        for place in self._staged:
            place.finish_reading()
        self.engine = Engine(
            _runtime(threads or workers_beside(self.params)), listed, settings, kept=self._staged
        )
        # As the engine left them: a parameter that differs was written or moved by somebody else.
        if self.engine.resumed:
            for place in self._staged:
                place.begin_writing()
            for index, param in enumerate(self.params):
                self._places[index].write(index, param)
                torch.autograd.graph.increment_version(param)
        self._versions = [param._version for param in self.params]
        self._addresses = [param.data_ptr() for param in self.params]

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

    def gradient_arrived(self, index: int) -> None:
        """In backward: the engine may read ahead what the step will need."""
        with self._arriving:
            if not self._expecting:
                self._expecting = True
                self.engine.expect_gradients()
        if index in self._lent:
            raise ZigguratError(
                f"parameter '{self.names[index]}' has a gradient of a forward that did not wait "
                "for its new value: call optimizer.synchronize() before what uses it outside its "
                "module"
            )
        self._places[index].gradient_arrived(index, self.params[index])

    def step(self, groups: list[GroupStep], blob_follows: bool = False) -> bool:
        """Begins a step of all gradients; False if there is none, and nothing was done."""
        self.wait()
        if self._staged:
            self._hooks.move_scales(self.params, scales_to_host)
        # All are looked at before the first is given: a step that is refused has given nothing.
        gradients = [self._hooks.take(param) for param in self.params]
        if all(gradient is None for gradient in gradients):
            return False
        for place in self._staged:
            place.finish_writing()
        self._look_at_params()
        lent = {
            index: (self._in_host_memory(index, gradient.tensor), self.params[index].detach())
            for index, gradient in enumerate(gradients)
            if gradient is not None
        }
        for place in self._staged:
            place.finish_reading()
        self._give_masters()
        self.engine.discard_gradients()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                tensor, scale = lent[index][0], gradient.scale
                dtype = _DTYPES[tensor.dtype]
                self.engine.lend_gradient(index, dtype, tensor.data_ptr(), tensor.numel(), scale)
        # On the CPU, workers in the next forward would take turns with PyTorch's own threads.
        self.engine.step(
            groups[: self._group_count],
            blob_follows=blob_follows,
            update_at_once=not self._staged,
        )
        self._lent = lent
        self._expecting = self.loaded = False
        for place in self._staged:
            place.begin_writing()
        return True

    def _in_host_memory(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """From finish_reading() on. No gradient: zeros."""
        param = self.params[index]
        if gradient is None:
            return torch.zeros(param.shape, dtype=param.dtype)
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
                self.engine.wait()
            for pending in list(self._lent):
                self._delivered(pending)
        elif index in self._lent:
            self.engine.wait(index)
            self._delivered(index)

    def _delivered(self, index: int) -> None:
        param = self.params[index]
        written = param._version != self._versions[index]
        del self._lent[index]
        self._hooks.consumed(param)
        torch.autograd.graph.increment_version(param)
        if written or param.data_ptr() != self._addresses[index]:
            raise ZigguratError(
                f"parameter '{self.names[index]}' was {'written' if written else 'moved'} while a "
                "step was under way, and has no value to go on with: call "
                "optimizer.synchronize() before"
            )
        self._places[index].write(index, param)
        self._versions[index] = param._version

    def _look_at_params(self) -> None:
        for index, param in enumerate(self.params):
            moved = param.data_ptr() != self._addresses[index]
            if not moved and param._version == self._versions[index]:
                continue
            if moved:
                name, was = self.names[index], self._kinds[index]
                kind = _kind_of(param, name)
                if kind != was:
                    raise InvalidArgument(
                        f"parameter '{name}' is {kind}, and was {was}: make the optimizer after "
                        "what changes the model, as model.to(dtype or device) does"
                    )
                self._addresses[index] = param.data_ptr()
            memory = self._places[index].read(index, param)
            if moved and memory is param:
                self.engine.lend_param(index, was.dtype, param.data_ptr(), param.numel())
            self.engine.param_written(index)
            self._versions[index] = param._version

    def read_state(self, index: int, name: str) -> torch.Tensor:
        """In fp32; of the newest step, or what was written since."""
        values = torch.empty(self.params[index].shape, dtype=torch.float32)
        self.engine.read_state(index, name, values.data_ptr(), values.numel())
        return values

    def write_state(self, index: int, name: str, values: torch.Tensor) -> None:
        given = _as_fp32(values)
        self.engine.write_state(index, name, given.data_ptr(), given.numel())

    def master(self, index: int) -> torch.Tensor:
        loaded = self.masters.get(index)
        return self.read_state(index, "master") if loaded is None else _as_fp32(loaded).clone()

    def _give_masters(self) -> None:
        """At a step: by now the model has its values, loaded before the optimizer's or after."""
        for index, master in self.masters.items():
            if rounds_to(master, self._places[index].values(index, self.params[index])):
                self.write_state(index, "master", master)
            else:
                self.engine.param_written(index)
        self.masters.clear()
