# SPDX-License-Identifier: Apache-2.0
"""All that is asked of an accelerator by way of PyTorch, which a test's double replaces.

It has not yet run on a real accelerator: what is here is read from PyTorch's documentation and source.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument, ResourceExhausted, Unimplemented
from ziggurat._pytorch.torch_private import over


class Accelerator:
    """Wraps what is used of ``torch.get_device_module()``; PyTorch 2.4 has no torch.accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    @property
    def index(self) -> int:
        """Returns CUDA's number of the GPU."""
        return int(self.device.index)

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """Returns the calling thread's stream: in backward, the one that the forward ran on."""
        return self._module.current_stream(self.device)

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Makes `stream`, and the accelerator, this thread's own in the block."""
        context: contextlib.AbstractContextManager[object] = self._module.stream(stream)
        return context

    def draws(self) -> torch.Tensor:
        """Returns the state of the accelerator's generator of random numbers."""
        state: torch.Tensor = self._module.get_rng_state(self.device)
        return state

    def set_draws(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.device)

    def draws_of(self, seed: int) -> torch.Tensor:
        """Returns the state of a generator that begins with `seed`."""
        return torch.Generator(self.device).manual_seed(seed).get_state()

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on `stream`; one of the two tensors is pinned."""
        with torch.no_grad(), self._module.stream(stream):
            target.detach().copy_(source.detach(), non_blocking=True)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between the accelerator and any host memory, after all that the current stream has queued.
        Returns when it is done."""
        with torch.no_grad():
            target.detach().copy_(source.detach())

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of `tensor` from being used again before `stream` has done the work
        queued so far."""
        tensor.record_stream(stream)

    def read(self, scalars: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reads the scalars to the CPU in one copy, after all that the current stream has
        queued."""
        return list(torch.stack(list(scalars)).cpu().unbind())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy on the CPU, after all that the current stream has queued."""
        return tensor.detach().to("cpu", memory_format=torch.contiguous_format)

    def stream_handle(self) -> int:
        """Returns the driver's handle of the calling thread's stream, on which the engine lets units
        be used."""
        return int(self.current_stream().cuda_stream)

    def synchronize(self) -> None:
        """Returns when all that the current stream has queued is done."""
        self.current_stream().synchronize()

    def over(self, address: int, size_bytes: int) -> torch.UntypedStorage:
        """Returns a storage over the accelerator's memory at `address`, which is the engine's."""
        return over(address, size_bytes, self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Returns host memory that the accelerator can copy from and to by itself."""
        if self.device.type != "cuda":
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        # This is a registered mapping of our own, because PyTorch's allocator of pinned memory
        # rounds up to a power of two, at worst to twice the size, and the engine's C interface
        # lends no memory.
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork (DataLoader's workers) that shared these pages, the next write could move
        # this process to new pages while the accelerator still uses the old ones.
        memory.madvise(mmap.MADV_DONTFORK)
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
        address = bytes_.data_ptr()
        portable = 1
        status = int(self._module.cudart().cudaHostRegister(address, size_bytes, portable))
        if status != 0:
            raise ResourceExhausted(
                f"cannot pin {size_bytes} bytes of host memory for {self.device} "
                f"(cudaHostRegister: error {status}): free host memory, or train fewer parameters"
            )
        weakref.finalize(memory, _unpin, self._module, self.device, address, os.getpid())
        return bytes_


def _unpin(module: Any, device: torch.device, address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has neither the accelerator nor this mapping
        module.synchronize(device)
        module.cudart().cudaHostUnregister(address)


def gpu_of(name: str | torch.device) -> Accelerator | None:
    """Returns the GPU that offload() is to bring units to, or None for the CPU. Errors: Unimplemented for
    other devices; InvalidArgument if PyTorch sees no GPU of that name."""
    device = cpu_or_nvidia("offload", name)
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if torch.cuda.is_available() and device.index is None else device.index
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise InvalidArgument(
            f'offload(device="{name}"): PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs: install '
            "NVIDIA's driver and a PyTorch for CUDA, or leave device= out, so that the CPU computes"
        )
    return Accelerator(torch.device("cuda", index))


def cpu_or_nvidia(call: str, name: str | torch.device) -> torch.device:
    """Returns the device that `call` is to bring units to. Errors: Unimplemented for other devices."""
    device = torch.device(name)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip is not None):
        raise Unimplemented(
            f'{call}(device="{name}"): units are brought to an NVIDIA GPU or stay on the CPU: give "cuda:0", '
            "or leave it out"
        )
    return device
