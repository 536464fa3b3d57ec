# SPDX-License-Identifier: Apache-2.0
"""Calls the C interface (integrations/c/ziggurat.h): what it declares is read from the header."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ziggurat._library import header
from ziggurat._library.words import in_settings

Words = Callable[[str], str]  # turns an error's text into the caller's words

HANDLE = ctypes.c_uint64
_TEXT_BYTES = 4096  # for which there is room in the first call


@functools.cache
def _declared() -> header.Header:
    """Returns what the header declares, which takes too long for who only imports this package."""
    return header.read(header.path())


def constant(name: str) -> int:
    """Returns ZIGGURAT_NAME."""
    return _declared().constants[f"ZIGGURAT_{name}"]


@functools.cache
def element_types() -> dict[str, tuple[int, int]]:
    """Returns each type's code, and the bytes of one element."""
    return {"fp32": (constant("FP32"), 4), "bf16": (constant("BF16"), 2), "fp16": (constant("FP16"), 2)}


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


_ERRORS: dict[str, type[ZigguratError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "DATA_LOSS": DataLoss,
    "UNIMPLEMENTED": Unimplemented,
    "NOT_FINITE": NotFinite,
}
for _error in (ZigguratError, *_ERRORS.values()):
    _error.__module__ = "ziggurat"  # lets a traceback name the class as a script imports it


def sized(structure: str, **fields: Any) -> Any:
    """Returns a struct of the interface with its size and these fields; the others are zero."""
    its = _declared().structs[structure]
    return its(struct_size=ctypes.sizeof(its), **fields)


def array_of(structure: str, count: int) -> Any:
    """Returns `count` structs of the interface, all of whose fields are zero."""
    return (_declared().structs[structure] * count)()


def _library_path() -> str:
    """Returns ZIGGURAT_LIBRARY, or the path of the library that came with this package."""
    named = os.environ.get("ZIGGURAT_LIBRARY")
    if named:
        return named
    return str(Path(__file__).parents[1] / "lib" / f"libziggurat.so.{constant('ABI_VERSION')}")


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
    if abi != constant("ABI_VERSION"):
        raise ImportError(
            f"{path} has ABI {abi}, but this package needs {constant('ABI_VERSION')}: install "
            "the library and the package of one version"
        )
    for name, declared in _declared().functions.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise ImportError(
                f"{path} has no {name}(), which this package needs: install the library and the "
                "package of one version"
            )
        function.argtypes = [one.type for one in declared.parameters]
        function.restype = declared.result
    return loaded


def version() -> str:
    """The engine's version."""
    return library().ziggurat_version().decode()


def call(name: str, *arguments: Any, words: Words = in_settings) -> Any:
    """Calls function `name` of the library, and returns what it gives: the value, struct or text of
    its last parameters, if `arguments` leave these out. Errors: the engine's, with its advice in the
    caller's `words`."""
    left = _declared().functions[name].parameters[len(arguments) :]
    if not left:
        return _checked(name, arguments, words)
    if len(left) == 3 and _declared().functions[name].gives_text:
        return _text(name, arguments, words)
    if len(left) > 1 or left[0].gives is None:
        raise TypeError(f"{name}() needs {', '.join(one.name for one in left)}, too")
    its = left[0].gives()
    is_struct = isinstance(its, ctypes.Structure)
    if is_struct:
        its.struct_size = ctypes.sizeof(its)
    _checked(name, (*arguments, ctypes.byref(its)), words)
    return its if is_struct else its.value


def _text(name: str, arguments: Sequence[Any], words: Words) -> str:
    """Returns the text of a function, which is called again if the text is long."""
    needed = ctypes.c_uint64(_TEXT_BYTES)
    text = ctypes.create_string_buffer(0)
    while len(text) < needed.value:
        text = ctypes.create_string_buffer(needed.value)
        _checked(name, (*arguments, text, len(text), ctypes.byref(needed)), words)
    return text.value.decode()


def _checked(name: str, arguments: Sequence[Any], words: Words) -> None:
    status = getattr(library(), name)(*arguments)
    if status != 0:
        text = library().ziggurat_last_error_in_settings().decode(errors="replace")
        kinds = [kind for name, kind in _ERRORS.items() if constant(name) == status]
        raise (kinds[0] if kinds else ZigguratError)(words(text))


def memory(dtype: str, address: int, count: int) -> Any:
    code, element_bytes = element_types()[dtype]
    return sized("ziggurat_memory", dtype=code, address=address, size_bytes=count * element_bytes)
