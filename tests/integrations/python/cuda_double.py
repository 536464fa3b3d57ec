# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: PyTorch's CPU computes with the memory of the CUDA runtime's double, which the
library under test is linked with (tests/cuda_double, cuda_double_calls.cc).

PyTorch's operations are work of the current stream. Those between two calls of the engine are one section: time goes
on until the stream has come to it, and then the CPU sees the memory of the units that are there, at a second
address. The section ends where the package asks for the stream, which it does before each call of the engine; from
then on an access to that memory ends the process. Importing this chooses the library, which is beside the build's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIBRARY = Path(os.environ.get("ZIGGURAT_LIBRARY", "")).with_name("libziggurat_double.so")
if not _LIBRARY.exists():
    raise ImportError(f"there is no {_LIBRARY}: the build has no CUDA")
os.environ["ZIGGURAT_LIBRARY"] = str(_LIBRARY)

import torch
import ziggurat._offload.offload
import ziggurat._offload.turns
import ziggurat._streaming.prints
from torch.utils._python_dispatch import TorchDispatchMode
from ziggurat._library.native import library
from ziggurat._pytorch.torch_private import over
from ziggurat._streaming.streaming import Streaming, streaming_of

MISCHIEF = {"none": 0, "no waits": 1, "stale source": 2}
_TEXT_BYTES = 1 << 16


def _function(name: str, result: Any = ctypes.c_int) -> Any:
    function = getattr(library(), f"ziggurat_double_{name}")
    function.restype = result
    return function


def _checked(status: int) -> None:
    assert status == 0, f"the double answered with CUDA's error {status}"


class Immediate:
    """The stream that computes, as copies of PyTorch's own tensors use it: each operation is done when it is called.
    device_double.py has streams whose copies are late."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Immediate)

    def wait_stream(self, other: Immediate) -> None:
        pass


class Gpu(TorchDispatchMode):
    """In the place of ziggurat._pytorch.accelerator.Accelerator, and while entered the machine that has it."""

    device = torch.device("cpu")  #: PyTorch's words for where units are
    index = 0

    def __init__(
        self, seed: int, mischief: str = "none", memory_bytes: int = 64 << 20, driver_version: int = 13000
    ) -> None:
        super().__init__()
        self._begin = (ctypes.c_uint64(seed), ctypes.c_uint64(memory_bytes), driver_version, MISCHIEF[mischief])
        self._has_driver = driver_version >= 12000
        self._streaming: Streaming | None = None
        self._section: int | None = None  # the stream that is in one
        self._writes = False  # whether the section does
        self.sections = 0
        self.findings: list[str] = []

    # -- the machine

    def __enter__(self) -> Gpu:
        _function("reset", None)(*self._begin)
        self.stream = self.new_stream() if self._has_driver else 0
        self._replaced = contextlib.ExitStack()
        for module, name, double in (
            (ziggurat._offload.offload, "gpu_of", lambda device: self if str(device).startswith("cuda") else None),
            # What compares values computes on the GPU too.
            (ziggurat._streaming.prints, "without_modes", contextlib.nullcontext),
            # Nor is it a mode of the script's, which threads of micro-batches would lack.
            (ziggurat._offload.turns, "dispatch_modes", list),
        ):
            self._replaced.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, double)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()
        self.end_section()
        if self._has_driver:
            self.destroy_stream(self.stream)
        self.findings += self.taken_findings(at_end=error[0] is None)

    def taken_findings(self, at_end: bool = False) -> list[str]:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        _function("report", None)(int(at_end), text, ctypes.c_uint64(_TEXT_BYTES))
        return text.value.decode().splitlines()

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        _checked(_function("new_stream")(ctypes.byref(stream)))
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        _function("destroy_stream")(ctypes.c_void_p(stream))

    def computes(self, model: torch.nn.Module) -> None:
        """Says whose units sections use."""
        found = streaming_of(next(model.parameters()))
        assert found is not None
        self._streaming = found[0]

    # -- what the package asks of it

    def stream_handle(self) -> int:
        self.end_section()
        return self.stream

    def synchronize(self) -> None:
        self.end_section()
        _checked(_function("synchronize")(ctypes.c_void_p(self.stream)))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def current_stream(self) -> Immediate:
        return Immediate()

    def on_stream(self, stream: Immediate) -> contextlib.AbstractContextManager[object]:
        return _InThread(self)  # PyTorch knows a mode in one thread only

    def draws(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_draws(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def draws_of(self, seed: int) -> torch.Tensor:
        return torch.Generator().manual_seed(seed).get_state()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, stream: Immediate, target: torch.Tensor, source: torch.Tensor) -> None:
        target.detach().copy_(source.detach())

    def keep(self, tensor: torch.Tensor, stream: Immediate) -> None:
        pass

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.detach().copy_(source.detach())

    def over(self, address: int, size_bytes: int) -> torch.UntypedStorage:
        size = ctypes.c_uint64(size_bytes)
        view = _function("view", ctypes.c_uint64)(ctypes.c_uint64(address), size)
        return over(view, size_bytes)

    # -- sections

    def end_section(self) -> None:
        if self._section is not None:
            _function("end_section", None)(ctypes.c_void_p(self._section))
            self._section = None

    def _begin_section(self, writes: bool) -> None:
        if self._section is not None and writes <= self._writes:
            return
        self.end_section()
        memory = list(self._memory())
        if not memory:
            return
        addresses, sizes = (list(one) for one in zip(*memory, strict=True))
        array = ctypes.c_uint64 * len(memory)
        _checked(
            _function("begin_section")(
                ctypes.c_void_p(self.stream),
                ctypes.c_uint64(len(memory)),
                array(*addresses),
                array(*sizes),
                int(writes),
            )
        )
        self._section, self._writes = self.stream, writes
        self.sections += 1

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Yields the engine's addresses of all parameters that are there, and their sizes."""
        for unit in () if self._streaming is None else self._streaming.units:
            for held in unit.held:
                if held._address and not held.is_away:
                    yield held._address, held._size_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self._begin_section(writes=func._schema.is_mutable and self._is_ours(args[0] if args else None))
        return func(*args, **(kwargs or {}))

    def _is_ours(self, tensor: Any) -> bool:
        """Returns whether it is a parameter that is there, or a view of one."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or self._streaming is None:
            return False
        ours = (held for unit in self._streaming.units for held in unit.held if held._address)
        return any(held.storage is tensor.untyped_storage() for held in ours)


class _InThread(TorchDispatchMode):
    """The GPU in a further thread, one at a time."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._gpu.__torch_dispatch__(func, types, args, kwargs)
