# SPDX-License-Identifier: Apache-2.0
"""Declares the C interface (integrations/c/ziggurat.h) for ctypes: structs, signatures, errors."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ziggurat._words import in_settings

Words = Callable[[str], str]  # turns an error's text into the caller's words

ABI_VERSION = 0
# each type's code, and the bytes of one element
DTYPES = {"fp32": (0, 4), "bf16": (1, 2), "fp16": (2, 2)}
NESTEROV, MAXIMIZE = 1, 2  # bits of GroupStruct.flags


class ZigguratError(RuntimeError):
    """An error that the engine reports. All other errors of this package derive from it."""


class InvalidArgument(ZigguratError, ValueError):
    """The call or the settings are wrong: fix them."""


class ResourceExhausted(ZigguratError, MemoryError):
    """Memory or space has run out: free something, or give a larger budget."""


class Unavailable(ZigguratError):
    """The file or device is gone or in use."""


class NotFinite(Unavailable):
    """The gradients' norm is not finite: skip the step. Derives from Unavailable, which older
    scripts catch."""


class DataLoss(ZigguratError):
    """The store is damaged."""


class Unimplemented(ZigguratError, NotImplementedError):
    """The engine does not support this yet."""


_ERRORS: dict[int, type[ZigguratError]] = {
    1: InvalidArgument,
    2: ResourceExhausted,
    3: Unavailable,
    5: DataLoss,
    7: Unimplemented,
    9: NotFinite,
}
for _error in (ZigguratError, *_ERRORS.values()):
    _error.__module__ = "ziggurat"  # lets a traceback name the class as a script imports it


class DeviceMemory(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("address", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
    ]


class Memory(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("address", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
    ]


FROZEN = 1  # bit of ParamStruct.flags


class ParamStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("dimensions", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
        ("values", Memory),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class GroupStruct(ctypes.Structure):
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


class StepOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("group_count", ctypes.c_uint32),
        ("groups", ctypes.POINTER(GroupStruct)),
        ("grad_scale", ctypes.c_float),
        ("flags", ctypes.c_uint32),
        ("blob", ctypes.c_char_p),
        ("blob_bytes", ctypes.c_uint64),
    ]


class StepResult(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("generation", ctypes.c_uint64),
    ]


class StateStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("resumed", ctypes.c_int32),
        ("generation", ctypes.c_uint64),
        ("durable_generation", ctypes.c_uint64),
        ("blob_bytes", ctypes.c_uint64),
        ("blob_ranks", ctypes.c_uint64),
    ]


class SaveOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("engine_count", ctypes.c_uint32),
        ("engines", ctypes.POINTER(ctypes.c_uint64)),
        ("values", ctypes.POINTER(Memory)),
        ("value_count", ctypes.c_uint64),
        ("blob", ctypes.c_char_p),
        ("blob_bytes", ctypes.c_uint64),
    ]


HANDLE = INDEX = ctypes.c_uint64
ALL_PARAMS = 2**64 - 1
BLOB_FOLLOWS, UPDATE_AT_ONCE = 1, 2  # bits of StepOptions.flags
_SIGNATURES: dict[str, list[Any]] = {
    "ziggurat_runtime_create": [ctypes.c_char_p, ctypes.POINTER(HANDLE)],
    "ziggurat_runtime_destroy": [HANDLE],
    "ziggurat_engine_open": [
        HANDLE,
        ctypes.POINTER(ParamStruct),
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.POINTER(HANDLE),
    ],
    "ziggurat_stored_params": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_engine_close": [HANDLE],
    "ziggurat_exchange_open": [HANDLE, ctypes.c_char_p, ctypes.POINTER(HANDLE)],
    "ziggurat_exchange_close": [HANDLE],
    "ziggurat_begin_all_to_all": [
        HANDLE,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_begin_all_gather": [
        HANDLE,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_begin_all_reduce_doubles": [
        HANDLE,
        ctypes.POINTER(ctypes.c_double),
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_begin_barrier": [HANDLE, ctypes.POINTER(ctypes.c_uint64)],
    "ziggurat_finish": [HANDLE, ctypes.c_uint64],
    "ziggurat_lend_gradient": [HANDLE, INDEX, ctypes.POINTER(Memory), ctypes.c_float],
    "ziggurat_lend_gradients": [
        HANDLE,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ],
    "ziggurat_add_gradient": [HANDLE, INDEX, ctypes.POINTER(Memory), ctypes.c_float],
    "ziggurat_discard_gradients": [HANDLE],
    "ziggurat_gradient_norm": [HANDLE, ctypes.POINTER(ctypes.c_double)],
    "ziggurat_expect_gradients": [HANDLE],
    "ziggurat_lend_param": [HANDLE, INDEX, ctypes.POINTER(Memory)],
    "ziggurat_param_written": [HANDLE, INDEX],
    "ziggurat_acquire": [HANDLE, ctypes.c_uint32, ctypes.c_void_p],
    "ziggurat_release": [HANDLE, ctypes.c_uint32, ctypes.c_void_p],
    "ziggurat_device_open": [HANDLE, ctypes.POINTER(DeviceMemory), ctypes.POINTER(HANDLE)],
    "ziggurat_device_close": [HANDLE],
    "ziggurat_expect_units": [HANDLE, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint64],
    "ziggurat_param_memory": [HANDLE, INDEX, ctypes.POINTER(Memory)],
    "ziggurat_read_param": [HANDLE, INDEX, ctypes.POINTER(Memory)],
    "ziggurat_write_param": [HANDLE, INDEX, ctypes.POINTER(Memory)],
    "ziggurat_read_gradient": [
        HANDLE,
        INDEX,
        ctypes.POINTER(Memory),
        ctypes.POINTER(ctypes.c_int32),
    ],
    "ziggurat_step": [HANDLE, ctypes.POINTER(StepOptions), ctypes.POINTER(StepResult)],
    "ziggurat_wait": [HANDLE, INDEX],
    "ziggurat_give_blob": [HANDLE, ctypes.c_char_p, ctypes.c_uint64],
    "ziggurat_param_steps": [HANDLE, INDEX, ctypes.POINTER(ctypes.c_uint64)],
    "ziggurat_state_names": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_read_state": [HANDLE, INDEX, ctypes.c_char_p, ctypes.POINTER(Memory)],
    "ziggurat_write_state": [HANDLE, INDEX, ctypes.c_char_p, ctypes.POINTER(Memory)],
    "ziggurat_pieces_of": [
        HANDLE,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_read_state_of": [
        HANDLE,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(Memory),
    ],
    "ziggurat_set_param_steps": [HANDLE, INDEX, ctypes.c_uint64],
    "ziggurat_save_checkpoint": [HANDLE, ctypes.POINTER(SaveOptions), ctypes.c_char_p],
    "ziggurat_save_begin": [
        HANDLE,
        ctypes.POINTER(SaveOptions),
        ctypes.c_char_p,
        ctypes.POINTER(HANDLE),
    ],
    "ziggurat_save_under_way": [HANDLE, ctypes.POINTER(ctypes.c_int32)],
    "ziggurat_save_wait": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_save_close": [HANDLE],
    "ziggurat_checkpoint_open": [HANDLE, ctypes.c_char_p, ctypes.POINTER(HANDLE)],
    "ziggurat_checkpoint_close": [HANDLE],
    "ziggurat_checkpoint_content": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_checkpoint_blob": [HANDLE, ctypes.c_void_p, ctypes.c_uint64],
    "ziggurat_checkpoint_read": [HANDLE, INDEX, ctypes.c_uint64, ctypes.POINTER(Memory)],
    "ziggurat_engine_load": [
        HANDLE,
        ctypes.POINTER(ParamStruct),
        ctypes.c_uint64,
        ctypes.c_char_p,
        HANDLE,
        ctypes.c_char_p,
        ctypes.POINTER(HANDLE),
    ],
    "ziggurat_make_durable": [HANDLE],
    "ziggurat_engine_state": [HANDLE, ctypes.POINTER(StateStruct)],
    "ziggurat_read_blob": [HANDLE, ctypes.c_void_p, ctypes.c_uint64],
    "ziggurat_describe": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
    "ziggurat_figures": [
        HANDLE,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    ],
}


def _library_path() -> str:
    """Returns ZIGGURAT_LIBRARY, or the path of the library that came with this package."""
    named = os.environ.get("ZIGGURAT_LIBRARY")
    if named:
        return named
    return str(Path(__file__).parent / "lib" / f"libziggurat.so.{ABI_VERSION}")


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the engine's library. Errors: ImportError, which names the path and the fix."""
    path = _library_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load the engine from {path}: {error}. Install the wheel, which "
            "scripts/build-wheel makes, or set ZIGGURAT_LIBRARY to the library of a build, such as "
            "build/dev/lib/libziggurat.so"
        ) from error
    abi = loaded.ziggurat_abi_version()
    if abi != ABI_VERSION:
        raise ImportError(
            f"{path} has ABI {abi}, but this package needs {ABI_VERSION}: install "
            "the library and the package of one version"
        )
    # in the words of C; call() uses the next one
    loaded.ziggurat_last_error.restype = ctypes.c_char_p
    loaded.ziggurat_last_error_in_settings.restype = ctypes.c_char_p
    loaded.ziggurat_version.restype = ctypes.c_char_p
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int32
    return loaded


def version() -> str:
    """The engine's version."""
    return library().ziggurat_version().decode()


def call(name: str, *arguments: Any, words: Words = in_settings) -> None:
    """Calls function `name` of the library. Errors: the engine's, with its advice in the caller's
    `words`."""
    status = getattr(library(), name)(*arguments)
    if status != 0:
        text = library().ziggurat_last_error_in_settings().decode(errors="replace")
        raise _ERRORS.get(status, ZigguratError)(words(text))


def sized(structure: type[ctypes.Structure], **fields: Any) -> Any:
    return structure(struct_size=ctypes.sizeof(structure), **fields)


def memory(dtype: str, address: int, count: int) -> Memory:
    code, element_bytes = DTYPES[dtype]
    return sized(Memory, dtype=code, address=address, size_bytes=count * element_bytes)
