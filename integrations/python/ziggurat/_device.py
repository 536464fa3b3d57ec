# SPDX-License-Identifier: Apache-2.0
"""Where the engine finds parameters and gradients: in place, or copies of an accelerator's.

The engine reads and writes host memory. An accelerator's parameters and gradients therefore have
pinned copies there, made once, which PyTorch's own streams fill and empty beside the computation:
one down, one up, for each accelerator and engine. All that is asked of an accelerator is in
``Accelerator``, which a test's double replaces. Not yet run on a real one.
"""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ziggurat._gradient import LentGradient
from ziggurat._native import InvalidArgument, ResourceExhausted, Unimplemented

_LINE_BYTES = 64  # two parameters share no line of a cache


class Accelerator:
    """What is asked of ``torch.get_device_module()``; PyTorch 2.4 has no torch.accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """Of the calling thread: in backward, the one that the forward ran on."""
        return self._module.current_stream(self.device)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues it; one of both is pinned."""
        with torch.no_grad(), self._module.stream(stream):
            target.detach().copy_(source.detach(), non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Let go, its memory goes to nobody before `stream` has done what was queued by then."""
        tensor.record_stream(stream)

    def read(self, scalars: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """On the CPU: one copy, after all that the current stream has queued."""
        return list(torch.stack(list(scalars)).cpu().unbind())

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Bytes that the accelerator copies from and to by itself."""
        if self.device.type != "cuda":
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        # A mapping of our own, registered: PyTorch's allocator of pinned memory rounds up to a
        # power of two, at worst to twice the size, and the engine's C interface lends no memory.
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork (DataLoader's workers) that shared its pages could leave this process new ones at
        # the next write, and the accelerator the old ones.
        memory.madvise(mmap.MADV_DONTFORK)
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
        address = bytes_.data_ptr()
        portable = 1
        status = int(self._module.cudart().cudaHostRegister(address, size_bytes, portable))
        if status != 0:
            raise ResourceExhausted(
                f"cannot pin {size_bytes} bytes of host memory for the parameters on {self.device} "
                f"(cudaHostRegister: error {status}): free host memory, or train fewer of them"
            )
        weakref.finalize(memory, _unpin, self._module, self.device, address, os.getpid())
        return bytes_


def _unpin(module: Any, device: torch.device, address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has no accelerator, and not this mapping
        module.synchronize(device)
        module.cudart().cudaHostUnregister(address)


@functools.cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """None: on the CPU."""
    return None if tensor.device.type == "cpu" else _accelerator(tensor.device)


def workers_beside(params: Sequence[torch.Tensor]) -> int:
    """As many as PyTorch computes with; with parameters on an accelerator, which leave the cores
    idle, all of this process's share but one for the loop that feeds it."""
    if all(accelerator_of(param) is None for param in params):
        return torch.get_num_threads()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's, on this machine
    return max(1, len(os.sched_getaffinity(0)) // processes - 1)


def scales_to_host(scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each as it is, on the CPU: those of an accelerator in one copy."""
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
    """Parameters on the CPU: the engine reads and writes them where they are, in the order of their
    indices. Of one that lies in another order (channels_last, transposed) it has a copy that does
    not, so that neither bits nor what is saved depend on how it lies."""

    down_bytes = up_bytes = 0

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def copies_back(self) -> bool:
        """Whether write() has anything to do for some parameter."""
        return bool(self._copies)

    def read(self, index: int, param: torch.Tensor) -> torch.Tensor:
        """The memory that the engine has of it, which has its values from finish_reading() on."""
        if param.is_contiguous():
            self._copies.pop(index, None)
            return param
        copy = self._copies.get(index)
        if copy is None:
            copy = torch.empty(param.shape, dtype=param.dtype)
            self._copies[index] = copy
        return copy.copy_(param.detach())

    def values(self, index: int, param: torch.Tensor) -> torch.Tensor:
        return self._copies.get(index, param)

    def gradient_arrived(self, index: int, param: torch.Tensor) -> None:
        """In backward, perhaps not for the last time before the step."""

    def gradient(self, index: int, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Host memory that has `part`, from finish_reading() on until the engine has read it."""
        return part

    def finish_reading(self) -> None:
        """Returns when all that was asked for is there."""

    def begin_writing(self) -> None:
        """At a step: what uses the old parameters is queued."""

    def write(self, index: int, param: torch.Tensor) -> None:
        """The engine has written; what the current stream does from now on uses the new values."""
        copy = self._copies.get(index)
        if copy is not None:
            with torch.no_grad():
                param.detach().copy_(copy)

    def finish_writing(self) -> None:
        """Returns when the engine may write again."""


class Staged(InPlace):
    """The parameters of one engine that are on one accelerator, by their indices."""

    def __init__(self, accelerator: Accelerator, params: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.down_bytes = self.up_bytes = 0
        self._accelerator = accelerator
        self._down, self._up = accelerator.new_stream(), accelerator.new_stream()
        self._shapes = {index: param.shape for index, param in params.items()}
        self._dtypes = {index: param.dtype for index, param in params.items()}
        self._values = self._pinned(self._dtypes)
        # By the types of parameter and gradient, since a sum of 16-bit gradients has 32.
        self._gradients: dict[tuple[torch.dtype, torch.dtype], dict[int, torch.Tensor]] = {}
        # The last of a step's backwards is taken to be that which was the last of the step before.
        self._awaited: dict[int, int] = {}
        self._early: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @property
    def copies_back(self) -> bool:
        return True

    def _pinned(self, dtypes: Mapping[int, torch.dtype]) -> dict[int, torch.Tensor]:
        """Memory for parameters' elements as `dtypes`: one piece, since to pin it takes long."""
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
        host = self._memory_of_gradient(index, part.dtype)
        copied, version = self._early.get(index, (None, -1))
        if copied is None or copied() is not part or part._version != version:
            self._copy_down(host, part)
        return host

    def finish_reading(self) -> None:
        self._down.synchronize()

    def begin_writing(self) -> None:
        self._early.clear()
        # Not when a parameter is written: by then a forward may be queued that the copy is to run
        # beside.
        self._up.wait_stream(self._accelerator.current_stream())

    def write(self, index: int, param: torch.Tensor) -> None:
        self._accelerator.copy(self._up, param, self._values[index])
        self._accelerator.current_stream().wait_stream(self._up)
        self.up_bytes += self._values[index].nbytes

    def finish_writing(self) -> None:
        self._up.synchronize()


def places_of(params: Sequence[torch.Tensor]) -> list[InPlace]:
    """Of each parameter; those of one accelerator share theirs."""
    on_cpu = InPlace()
    there: dict[Accelerator, dict[int, torch.Tensor]] = {}
    for index, param in enumerate(params):
        accelerator = accelerator_of(param)
        if accelerator is not None:
            there.setdefault(accelerator, {})[index] = param
    places = [on_cpu] * len(params)
    for accelerator, own in there.items():
        staged = Staged(accelerator, own)
        for index in own:
            places[index] = staged
    return places


def check_layout(param: torch.Tensor, name: str) -> None:
    """Errors: where two elements are one in memory, naming the parameter."""
    if torch._debug_has_internal_overlap(param) != 1:
        return
    raise InvalidArgument(
        f"parameter '{name}' is expanded: several of its elements are one in memory, which no "
        "step can write. Make it from its .clone()"
    )


def check_device(param: torch.Tensor, name: str) -> None:
    """Errors: where a parameter cannot be copied from, naming it."""
    if param.device.type == "cpu":
        return
    if param.is_meta:
        raise InvalidArgument(
            f"parameter '{name}' is on the meta device, so it has no values: give it some, by "
            "model.to_empty(device=...) and load_state_dict(), before the first step"
        )
    if not hasattr(torch.get_device_module(param.device), "Stream"):
        raise Unimplemented(
            f"parameter '{name}' is on {param.device}, for which PyTorch has no streams: train it "
            "on the CPU, or on an accelerator that has them"
        )
