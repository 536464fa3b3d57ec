# SPDX-License-Identifier: Apache-2.0
"""The C interface (integrations/c/ziggurat.h) as Python objects. Addresses are plain integers."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI_VERSION = 0
DTYPES = {"fp32": (0, 4), "bf16": (1, 2), "fp16": (2, 2)}  # code, bytes of an element
_NESTEROV, _MAXIMIZE = 1, 2  # bits of _Group.flags


class ZigguratError(RuntimeError):
    """What the engine has against a call, in its words."""


class InvalidArgument(ZigguratError, ValueError):
    """Fix the call or the settings."""


class ResourceExhausted(ZigguratError, MemoryError):
    """Free something, or give a larger budget."""


class Unavailable(ZigguratError):
    """The file or device is gone or in use, or the gradients' norm is not finite."""


class DataLoss(ZigguratError):
    """The store is damaged."""


class Unimplemented(ZigguratError, NotImplementedError):
    """Not built yet."""


_ERRORS: dict[int, type[ZigguratError]] = {
    1: InvalidArgument,
    2: ResourceExhausted,
    3: Unavailable,
    5: DataLoss,
    7: Unimplemented,
}


class _Memory(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("address", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
    ]


class _Param(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("dimensions", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("values", _Memory),
    ]


class _Group(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("learning_rate", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("lr_decay", ctypes.c_float),
        ("dampening", ctypes.c_float),
        ("flags", ctypes.c_uint32),
    ]


class _StepOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group_count", ctypes.c_uint32),
        ("groups", ctypes.POINTER(_Group)),
        ("grad_scale", ctypes.c_float),
        ("flags", ctypes.c_uint32),
        ("blob", ctypes.c_char_p),
        ("blob_bytes", ctypes.c_uint64),
    ]


class _StepResult(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("generation", ctypes.c_uint64),
    ]


class _State(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("resumed", ctypes.c_int32),
        ("generation", ctypes.c_uint64),
        ("durable_generation", ctypes.c_uint64),
        ("blob_bytes", ctypes.c_uint64),
    ]


_HANDLE = _INDEX = ctypes.c_uint64
_ALL_PARAMS = 2**64 - 1
_BLOB_FOLLOWS, _UPDATE_AT_ONCE = 1, 2  # bits of _StepOptions.flags
_SIGNATURES: dict[str, list[Any]] = {
    "ziggurat_runtime_create": [ctypes.c_char_p, ctypes.POINTER(_HANDLE)],
    "ziggurat_runtime_destroy": [_HANDLE],
    "ziggurat_engine_open": [
        _HANDLE,
        ctypes.POINTER(_Param),
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.POINTER(_HANDLE),
    ],
    "ziggurat_engine_close": [_HANDLE],
    "ziggurat_lend_gradient": [_HANDLE, _INDEX, ctypes.POINTER(_Memory), ctypes.c_float],
    "ziggurat_add_gradient": [_HANDLE, _INDEX, ctypes.POINTER(_Memory), ctypes.c_float],
    "ziggurat_discard_gradients": [_HANDLE],
    "ziggurat_gradient_norm": [_HANDLE, ctypes.POINTER(ctypes.c_double)],
    "ziggurat_expect_gradients": [_HANDLE],
    "ziggurat_lend_param": [_HANDLE, _INDEX, ctypes.POINTER(_Memory)],
    "ziggurat_param_written": [_HANDLE, _INDEX],
    "ziggurat_step": [_HANDLE, ctypes.POINTER(_StepOptions), ctypes.POINTER(_StepResult)],
    "ziggurat_wait": [_HANDLE, _INDEX],
    "ziggurat_give_blob": [_HANDLE, ctypes.c_char_p, ctypes.c_uint64],
    "ziggurat_param_steps": [_HANDLE, _INDEX, ctypes.POINTER(ctypes.c_uint64)],
    "ziggurat_state_names": [
        _HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_read_state": [_HANDLE, _INDEX, ctypes.c_char_p, ctypes.POINTER(_Memory)],
    "ziggurat_write_state": [_HANDLE, _INDEX, ctypes.c_char_p, ctypes.POINTER(_Memory)],
    "ziggurat_set_param_steps": [_HANDLE, _INDEX, ctypes.c_uint64],
    "ziggurat_make_durable": [_HANDLE],
    "ziggurat_engine_state": [_HANDLE, ctypes.POINTER(_State)],
    "ziggurat_read_blob": [_HANDLE, ctypes.c_void_p, ctypes.c_uint64],
    "ziggurat_describe": [
        _HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_figures": [
        _HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
}


def _library_path() -> str:
    """ZIGGURAT_LIBRARY, or the one that came with this package."""
    named = os.environ.get("ZIGGURAT_LIBRARY")
    if named:
        return named
    return str(Path(__file__).parent / "lib" / f"libziggurat.so.{ABI_VERSION}")


@functools.cache
def library() -> ctypes.CDLL:
    """The engine. Errors: ImportError naming the path, and what would help."""
    path = _library_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load the engine from {path}: {error}; install the wheel (scripts/build-wheel "
            "makes it), or set ZIGGURAT_LIBRARY to a build's: build/dev/lib/libziggurat.so"
        ) from error
    abi = loaded.ziggurat_abi_version()
    if abi != ABI_VERSION:
        raise ImportError(f"{path} has ABI {abi}, and this package needs {ABI_VERSION}")
    loaded.ziggurat_last_error.restype = ctypes.c_char_p
    loaded.ziggurat_version.restype = ctypes.c_char_p
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int32
    return loaded


def version() -> str:
    """The engine's version."""
    return library().ziggurat_version().decode()


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status != 0:
        words = library().ziggurat_last_error().decode(errors="replace")
        raise _ERRORS.get(status, ZigguratError)(words)


def _sized(structure: type[ctypes.Structure], **fields: Any) -> Any:
    return structure(struct_size=ctypes.sizeof(structure), **fields)


def _memory(dtype: str, address: int, count: int) -> _Memory:
    code, element_bytes = DTYPES[dtype]
    return _sized(_Memory, dtype=code, address=address, size_bytes=count * element_bytes)


@dataclass(frozen=True)
class Param:
    """A parameter, and where it is: its memory is lent to the engine."""

    name: str
    shape: Sequence[int]
    dtype: str  #: "fp32", "bf16" or "fp16"
    address: int
    group: int = 0

    @property
    def count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class GroupStep:
    """What a step does to the parameters of one group."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0  #: a parameter's step t has lr / (1 + (t - 1) * lr_decay)
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


class Runtime:
    """Workers, and the thread that decides; engines share them. Closed with the object."""

    def __init__(self, threads: int = 0) -> None:
        handle = _HANDLE()
        settings = json.dumps({"threads": threads}).encode()
        _call("ziggurat_runtime_create", settings, ctypes.byref(handle))
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, _end, "ziggurat_runtime_destroy", handle.value, os.getpid()
        )

    def close(self) -> None:
        """Does nothing the second time."""
        _close(self._ended)


def _close(ended: weakref.finalize[..., Any]) -> None:
    # Not by calling it: one that was called is dead, though the call was refused.
    peeked = ended.peek()
    if peeked is not None:
        _, call, arguments, _ = peeked
        call(*arguments)
        ended.detach()


def _end(call: str, handle: int, owner: int, *kept: object) -> None:
    # What is `kept` stays until this was called. A forked child has no threads that would answer.
    if os.getpid() == owner:
        _call(call, handle)


class Engine:
    """The state of a list of parameters: masters and moments, updated step by step."""

    def __init__(
        self,
        runtime: Runtime,
        params: Sequence[Param],
        settings: Mapping[str, Any],
        kept: object = None,
    ) -> None:
        """`kept` has memory that is lent, and stays until the engine is closed."""
        self._params = list(params)
        array = (_Param * len(self._params))()
        for given, param in zip(array, self._params, strict=True):
            given.struct_size = ctypes.sizeof(_Param)
            given.group = param.group
            given.name = param.name.encode()
            given.shape = (ctypes.c_int64 * len(param.shape))(*param.shape)
            given.dimensions = len(param.shape)
            given.values = _memory(param.dtype, param.address, param.count)
        handle = _HANDLE()
        text = json.dumps(dict(settings)).encode()
        _call(
            "ziggurat_engine_open", runtime.handle, array, len(array), text, ctypes.byref(handle)
        )
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, _end, "ziggurat_engine_close", handle.value, os.getpid(), runtime, kept
        )

    def lend_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """The gradient of parameter `index` in the step to come, times `scale`; it must stay as it is
        until wait(index) after the step."""
        _call("ziggurat_lend_gradient", self.handle, index, _memory(dtype, address, count), scale)

    def add_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """Adds to it in memory of the engine's; the memory is free again on return."""
        _call("ziggurat_add_gradient", self.handle, index, _memory(dtype, address, count), scale)

    def discard_gradients(self) -> None:
        """No parameter has a gradient in the step to come."""
        _call("ziggurat_discard_gradients", self.handle)

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the step to come."""
        norm = ctypes.c_double()
        _call("ziggurat_gradient_norm", self.handle, ctypes.byref(norm))
        return norm.value

    def expect_gradients(self) -> None:
        """Gradients are being computed: records may be read meanwhile."""
        _call("ziggurat_expect_gradients", self.handle)

    def lend_param(self, index: int, dtype: str, address: int, count: int) -> None:
        """The parameter was moved there."""
        _call("ziggurat_lend_param", self.handle, index, _memory(dtype, address, count))

    def param_written(self, index: int) -> None:
        """Before the next step its master is taken anew from the parameter."""
        _call("ziggurat_param_written", self.handle, index)

    def step(
        self,
        groups: Sequence[GroupStep],
        grad_scale: float = 1.0,
        blob: bytes = b"",
        blob_follows: bool = False,
        update_at_once: bool = False,
    ) -> int:
        """Begins the step, and returns its generation: parameters are written until wait().

        `update_at_once`: those whose state is in memory are updated when this returns.
        """
        array = (_Group * len(groups))(
            *(
                _sized(
                    _Group,
                    learning_rate=group.lr,
                    beta1=group.betas[0],
                    beta2=group.betas[1],
                    eps=group.eps,
                    weight_decay=group.weight_decay,
                    lr_decay=group.lr_decay,
                    dampening=group.dampening,
                    flags=_NESTEROV * group.nesterov + _MAXIMIZE * group.maximize,
                )
                for group in groups
            )
        )
        options = _sized(
            _StepOptions,
            group_count=len(groups),
            groups=array,
            grad_scale=grad_scale,
            flags=_BLOB_FOLLOWS * blob_follows + _UPDATE_AT_ONCE * update_at_once,
            blob=blob or None,
            blob_bytes=len(blob),
        )
        result = _sized(_StepResult)
        _call("ziggurat_step", self.handle, ctypes.byref(options), ctypes.byref(result))
        return int(result.generation)

    def give_blob(self, blob: bytes) -> None:
        """That of the newest step, which was made with blob_follows."""
        _call("ziggurat_give_blob", self.handle, blob or None, len(blob))

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every one, is that of the newest step."""
        _call("ziggurat_wait", self.handle, _ALL_PARAMS if index is None else index)

    def steps_of(self, index: int) -> int:
        """Steps that the parameter has made."""
        steps = ctypes.c_uint64()
        _call("ziggurat_param_steps", self.handle, index, ctypes.byref(steps))
        return steps.value

    def state_names(self) -> list[str]:
        """What the optimizer keeps of a parameter: "master", and torch.optim's names of moments."""
        return self._text("ziggurat_state_names").split()

    def read_state(self, index: int, name: str, address: int, count: int) -> None:
        """Copies the parameter's array `name` of the newest step there, in fp32."""
        values = _memory("fp32", address, count)
        _call("ziggurat_read_state", self.handle, index, name.encode(), values)

    def write_state(self, index: int, name: str, address: int, count: int) -> None:
        """The next step goes on from what is there, copied; durable with it."""
        values = _memory("fp32", address, count)
        _call("ziggurat_write_state", self.handle, index, name.encode(), values)

    def set_steps(self, index: int, steps: int) -> None:
        """The parameter has made as many."""
        _call("ziggurat_set_param_steps", self.handle, index, steps)

    def make_durable(self) -> None:
        """Returns when every finished step would survive a crash."""
        _call("ziggurat_make_durable", self.handle)

    def _state(self) -> _State:
        state = _sized(_State)
        _call("ziggurat_engine_state", self.handle, ctypes.byref(state))
        return state

    @property
    def resumed(self) -> bool:
        return bool(self._state().resumed)

    @property
    def generation(self) -> int:
        return int(self._state().generation)

    @property
    def durable_generation(self) -> int:
        return int(self._state().durable_generation)

    @property
    def blob(self) -> bytes:
        """What the step that this engine resumed at was given."""
        size = self._state().blob_bytes
        memory = ctypes.create_string_buffer(size)
        _call("ziggurat_read_blob", self.handle, memory, size)
        return memory.raw[:size]

    def describe(self) -> str:
        """What was chosen and found when the engine opened."""
        return self._text("ziggurat_describe")

    def figures(self) -> dict[str, int]:
        """What was moved and waited for so far, by all engines of the runtime."""
        figures: dict[str, int] = json.loads(self._text("ziggurat_figures"))
        return figures

    def _text(self, call: str) -> str:
        needed = ctypes.c_uint64()
        _call(call, self.handle, None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        _call(call, self.handle, text, needed.value, None)
        return text.value.decode()

    def close(self) -> None:
        """Does nothing the second time. What is not durable is lost: make_durable() comes first."""
        _close(self._ended)
