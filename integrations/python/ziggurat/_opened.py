# SPDX-License-Identifier: Apache-2.0
"""The engine of an optimizer's parameters, from the optimizer's first step on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ziggurat._gradient import GradientHooks
from ziggurat._native import (
    Engine,
    GroupStep,
    InvalidArgument,
    Param,
    Runtime,
    Unimplemented,
    ZigguratError,
)

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


def described(param: torch.Tensor, name: str, group: int) -> Param:
    """As the engine is to know it. Errors: what it cannot take, naming the parameter."""
    if param.device.type != "cpu":
        raise Unimplemented(f"parameter '{name}' is on {param.device}: not built yet")
    if param.dtype not in _DTYPES:
        raise InvalidArgument(f"parameter '{name}' is {param.dtype}: fp32, bf16 and fp16 are known")
    if not param.is_contiguous():
        raise InvalidArgument(f"parameter '{name}' is not contiguous: call .contiguous() before")
    return Param(name, tuple(param.shape), _DTYPES[param.dtype], param.data_ptr(), group)


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
        self.loaded = False  #: state that goes into the records with the next step
        self.masters: dict[int, torch.Tensor] = {}  #: that were loaded, until the next step
        listed = [described(*one) for one in zip(self.params, self.names, groups, strict=True)]
        self.engine = Engine(_runtime(threads), listed, settings)
        # As the engine left them: a parameter that differs was written or moved by somebody else.
        if self.engine.resumed:
            for param in self.params:
                torch.autograd.graph.increment_version(param)
        self._versions = [param._version for param in self.params]
        self._addresses = [param.data_ptr() for param in self.params]
        self._kinds = [(one.dtype, one.shape) for one in listed]

    def close(self) -> None:
        self.engine.close()

    @property
    def pending(self) -> bool:
        return bool(self._lent)

    def is_pending(self, index: int) -> bool:
        return index in self._lent

    def gradient_arrived(self) -> None:
        """In backward: the engine may read ahead what the step will need."""
        if not self._expecting:
            self._expecting = True
            self.engine.expect_gradients()

    def step(self, groups: list[GroupStep], blob_follows: bool = False) -> bool:
        """Begins a step of all gradients; False if there is none, and nothing was done."""
        self.wait()
        # All are looked at before the first is given: a step that is refused has given nothing.
        gradients = [self._hooks.take(param) for param in self.params]
        if all(gradient is None for gradient in gradients):
            return False
        self._look_at_params()
        self._give_masters()
        self.engine.discard_gradients()
        lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            tensor = gradient.tensor
            if tensor is None:
                tensor = torch.zeros_like(self.params[index], requires_grad=False)
            self.engine.lend_gradient(
                index, _DTYPES[tensor.dtype], tensor.data_ptr(), tensor.numel(), gradient.scale
            )
            lent[index] = (tensor, self.params[index].detach())
        # Workers in the next forward would take turns with PyTorch's own threads.
        self.engine.step(groups[: self._group_count], blob_follows=blob_follows, update_at_once=True)
        self._lent = lent
        self._expecting = self.loaded = False
        return True

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every one, is that of the newest step."""
        if index is None:
            if not self._lent:
                return
            with torch.profiler.record_function("ziggurat.wait"):
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
        self._versions[index] = param._version

    def _look_at_params(self) -> None:
        for index, param in enumerate(self.params):
            address = param.data_ptr()
            if address != self._addresses[index]:
                moved = described(param, self.names[index], 0)
                if (moved.dtype, moved.shape) != self._kinds[index]:
                    dtype, shape = self._kinds[index]
                    raise InvalidArgument(
                        f"parameter '{moved.name}' is {moved.dtype} of {moved.shape}, and was "
                        f"{dtype} of {shape}: make the optimizer after what changes the model, as "
                        "model.to(dtype) does"
                    )
                self.engine.lend_param(index, moved.dtype, address, moved.count)
                self._addresses[index] = address
            elif param._version == self._versions[index]:
                continue
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
            if rounds_to(master, self.params[index]):
                self.write_state(index, "master", master)
            else:
                self.engine.param_written(index)
        self.masters.clear()
