# SPDX-License-Identifier: Apache-2.0
"""Where the engine finds parameters and gradients: in place, or in host copies of an accelerator's
memory.

The engine reads and writes host memory. Parameters and gradients of an accelerator therefore have
pinned copies in host memory, made once. Two streams for each accelerator and engine, one down and
one up, copy beside the computation.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Container, Mapping, Sequence

import torch

from ziggurat._gradients.gradient import LentGradient
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._pytorch.accelerator import Accelerator
from ziggurat._pytorch.torch_private import elements_overlap

_LINE_BYTES = 64  # keeps two parameters out of one cache line


@functools.cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """Returns the accelerator that holds the tensor, or None if it is on the CPU."""
    return None if tensor.device.type == "cpu" else _accelerator(tensor.device)


def workers_beside(params: Sequence[torch.Tensor], brought_to: Accelerator | None = None) -> int:
    """Returns how many worker threads the engine uses: as many as PyTorch computes with. If
    parameters are on an accelerator, or `brought_to` one, PyTorch leaves the cores idle: then all of
    this process's share but one core, which runs the training loop."""
    if brought_to is None and all(accelerator_of(param) is None for param in params):
        return torch.get_num_threads()
    # number of processes on this machine, which torchrun sets
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes - 1)


def scales_to_host(scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns each scale on the CPU; the scales of one accelerator take one copy."""
    there: dict[Accelerator, list[int]] = {}
    for at, scale in enumerate(scales):
        accelerator = accelerator_of(scale)
        if accelerator is not None:
            there.setdefault(accelerator, []).append(at)
    found = list(scales)
    for accelerator, places in there.items():
        for at, value in zip(places, accelerator.read([scales[at] for at in places]), strict=True):
            found[at] = value
    return found


class InPlace:
    """Parameters on the CPU, which the engine reads and writes where they are, in the order of
    their indices. A parameter whose memory has another order (channels_last, transposed) gets a
    contiguous copy, so that neither the bits nor what is saved depend on its layout."""

    down_bytes = up_bytes = 0

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def copies_back(self) -> bool:
        """Whether write() has anything to do for some parameter."""
        return bool(self._copies)

    def read(self, index: int, param: torch.Tensor) -> torch.Tensor:
        """Returns the memory that the engine uses for `param`; it has the values once
        finish_reading() has returned."""
        if param.is_contiguous():
            self._copies.pop(index, None)
            return param
        copy = self._copies.get(index)
        if copy is None:
            copy = torch.empty(param.shape, dtype=param.dtype, device="cpu")
            self._copies[index] = copy
        return copy.copy_(param.detach())

    def values(self, index: int, param: torch.Tensor) -> torch.Tensor:
        return self._copies.get(index, param)

    def gradient_arrived(self, index: int, param: torch.Tensor) -> None:
        """Tells in backward that a gradient has arrived, perhaps not for the last time before the
        step."""

    def gradient(self, index: int, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Returns host memory that holds `part` from finish_reading() on, until the engine has read
        it."""
        return part

    def finish_reading(self) -> None:
        """Returns when all reads that were asked for are done."""

    def begin_writing(self) -> None:
        """Called at a step, when all work that uses the old parameters is queued."""

    def write(self, index: int, param: torch.Tensor) -> None:
        """Called when the engine has written; work that the current stream gets from now on uses
        the new values."""
        copy = self._copies.get(index)
        if copy is not None:
            with torch.no_grad():
                param.detach().copy_(copy)

    def finish_writing(self) -> None:
        """Returns when the engine may write again."""


class Staged(InPlace):
    """The parameters that one engine has on one accelerator, by their indices."""

    def __init__(self, accelerator: Accelerator, params: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.down_bytes = self.up_bytes = 0
        self._accelerator = accelerator
        self._down, self._up = accelerator.new_stream(), accelerator.new_stream()
        self._shapes = {index: param.shape for index, param in params.items()}
        self._dtypes = {index: param.dtype for index, param in params.items()}
        self._values = self._pinned(self._dtypes)
        # Sums of gradients, grouped by the types of parameter and gradient, because a sum of 16-bit
        # gradients is in fp32.
        self._gradients: dict[tuple[torch.dtype, torch.dtype], dict[int, torch.Tensor]] = {}
        # The number of times that each gradient arrived in the last step. As many are expected in
        # this step, so the copy can begin with the last of them.
        self._awaited: dict[int, int] = {}
        self._early: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @property
    def copies_back(self) -> bool:
        return True

    def _pinned(self, dtypes: Mapping[int, torch.dtype]) -> dict[int, torch.Tensor]:
        """Returns pinned memory for the parameters' elements as `dtypes`: one piece, because
        pinning is slow."""
        places, size_bytes = {}, 0
        for index, dtype in dtypes.items():
            own_bytes = self._shapes[index].numel() * dtype.itemsize
            places[index] = slice(size_bytes, size_bytes + own_bytes)
            size_bytes += -(-own_bytes // _LINE_BYTES) * _LINE_BYTES
        memory = self._accelerator.pinned(max(size_bytes, 1))
        return {
            index: memory[places[index]].view(dtype).view(self._shapes[index])
            for index, dtype in dtypes.items()
        }

    def _copy_down(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self._down.wait_stream(self._accelerator.current_stream())
        self._accelerator.keep(source, self._down)
        self._accelerator.copy(self._down, host, source)
        self.down_bytes += host.nbytes

    def read(self, index: int, param: torch.Tensor) -> torch.Tensor:
        self._copy_down(self._values[index], param)
        return self._values[index]

    def values(self, index: int, param: torch.Tensor) -> torch.Tensor:
        return self._values[index]

    def _memory_of_gradient(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        kind = (self._dtypes[index], dtype)
        if kind not in self._gradients:
            alike = [i for i, own in self._dtypes.items() if own == kind[0]]
            self._gradients[kind] = self._pinned(dict.fromkeys(alike, dtype))
        return self._gradients[kind][index]

    def gradient_arrived(self, index: int, param: torch.Tensor) -> None:
        grad = param.grad
        if not isinstance(grad, LentGradient) or grad.arrivals != self._awaited.get(index):
            return
        part = grad.part
        if part is not None and part.is_contiguous():
            self._copy_down(self._memory_of_gradient(index, part.dtype), part)
            self._early[index] = (weakref.ref(part), part._version)

    def gradient(self, index: int, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if isinstance(param.grad, LentGradient):
            self._awaited[index] = param.grad.arrivals
        if accelerator_of(part) is None:  # as among ranks that sum in host memory
            return part
        host = self._memory_of_gradient(index, part.dtype)
        copied, version = self._early.get(index, (None, -1))
        if copied is None or copied() is not part or part._version != version:
            self._copy_down(host, part)
        return host

    def finish_reading(self) -> None:
        self._down.synchronize()

    def begin_writing(self) -> None:
        self._early.clear()
        # Waits here, not when a parameter is written: by then a forward may be queued that the copy
        # is to run beside.
        self._up.wait_stream(self._accelerator.current_stream())

    def write(self, index: int, param: torch.Tensor) -> None:
        self._accelerator.copy(self._up, param, self._values[index])
        self._accelerator.current_stream().wait_stream(self._up)
        self.up_bytes += self._values[index].nbytes

    def finish_writing(self) -> None:
        self._up.synchronize()


def places_of(
    params: Sequence[torch.Tensor], kept: Container[int], keeper: InPlace
) -> list[InPlace]:
    """Returns the place of each parameter: `keeper` of those with the indices `kept`. The others of one
    accelerator share one."""
    on_cpu = InPlace()
    there: dict[Accelerator, dict[int, torch.Tensor]] = {}
    for index, param in enumerate(params):
        accelerator = None if index in kept else accelerator_of(param)
        if accelerator is not None:
            there.setdefault(accelerator, {})[index] = param
    places = [keeper if index in kept else on_cpu for index in range(len(params))]
    for accelerator, own in there.items():
        staged = Staged(accelerator, own)
        for index in own:
            places[index] = staged
    return places


def check_layout(param: torch.Tensor, name: str) -> None:
    """Errors: InvalidArgument, which names the parameter, if two elements share memory."""
    if not elements_overlap(param):
        return
    raise InvalidArgument(
        f"parameter '{name}' is expanded: several of its elements share memory, so a step cannot "
        "write them. Make the parameter from its .clone()"
    )


def check_device(param: torch.Tensor, name: str) -> None:
    """Errors: if the parameter's device cannot be copied from; the error names the parameter."""
    if param.device.type == "cpu":
        return
    if param.is_meta:
        raise InvalidArgument(
            f"parameter '{name}' is on the meta device, so it has no values: call "
            "model.to_empty(device=...) and load_state_dict() before the first step"
        )
    if not hasattr(torch.get_device_module(param.device), "Stream"):
        raise Unimplemented(
            f"parameter '{name}' is on {param.device}, for which PyTorch has no streams: train it "
            "on the CPU, or on an accelerator with streams"
        )
