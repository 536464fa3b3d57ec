# SPDX-License-Identifier: Apache-2.0
"""Offers the C interface's checkpoints as Python objects: engines write them, and names find what
to read."""

from __future__ import annotations

import ctypes
import json
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ziggurat._library.abi import HANDLE, ZigguratError, array_of, call, memory, sized
from ziggurat._library.native import Engine, Runtime, close, end_handle
from ziggurat._library.words import in_arguments


class Values(NamedTuple):
    """Elements in memory, by type, address and number."""

    dtype: str
    address: int
    count: int


class Save:
    """A checkpoint that is written while training goes on."""

    def __init__(
        self,
        runtime: Runtime,
        engines: Sequence[Engine],
        values: Sequence[Values],
        blob: bytes,
        content: str,
        step: int,
    ) -> None:
        """Calls ziggurat_save_begin(), which describes `content`; all ranks call this. `step` is
        the one in the content."""
        self.step = step
        options = _options(engines, values, blob)
        self._handle: int = call(
            "ziggurat_save_begin", runtime.handle, options, content.encode(), words=in_arguments
        )
        self._owner = os.getpid()
        self._asked = False
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_save_close", self._handle, os.getpid(), runtime
        )
        for engine in engines:
            engine.end_first(self._ended)

    def under_way(self) -> bool:
        return bool(call("ziggurat_save_under_way", self._handle))

    def wait(self) -> str:
        """Returns the checkpoint's directory when it is durable, or raises the save's error."""
        self._asked = True
        return str(call("ziggurat_save_wait", self._handle, words=in_arguments))

    def settle(self) -> None:
        """Waits until the save has ended, and warns if it has failed and nobody has asked."""
        if os.getpid() != self._owner:  # a forked child has no threads that would answer
            return
        asked = self._asked
        try:
            self.wait()
        except ZigguratError as error:
            if not asked:
                warnings.warn(f"the checkpoint of step {self.step} is not saved: {error}", stacklevel=3)


def _options(engines: Sequence[Engine], values: Sequence[Values], blob: bytes) -> Any:
    handles = (HANDLE * len(engines))(*(engine.handle for engine in engines))
    given = array_of("ziggurat_memory", len(values))
    given[:] = [memory(*one) for one in values]
    return sized(
        "ziggurat_save_options",
        engine_count=len(engines),
        engines=handles,
        values=given,
        value_count=len(values),
        blob=ctypes.cast(blob, ctypes.c_void_p),
        blob_bytes=len(blob),
    )


def save_checkpoint(
    runtime: Runtime,
    engines: Sequence[Engine],
    values: Sequence[Values],
    blob: bytes,
    content: Mapping[str, Any] | str,
) -> None:
    """Calls ziggurat_save_checkpoint(), which describes `content`; all ranks call this. Give the
    content as JSON text if it must not fail on one rank alone."""
    text = content if isinstance(content, str) else json.dumps(content)
    options = _options(engines, values, blob)
    call("ziggurat_save_checkpoint", runtime.handle, options, text.encode(), words=in_arguments)


class SavedTensor(NamedTuple):
    """Describes one array of a checkpoint."""

    name: str
    owner: str  #: the parameter, or for scales the unit
    array: str  #: "master", "exp_avg", ..
    type: str  #: a type's name in safetensors
    shape: tuple[int, ...]


class Checkpoint:
    """An open checkpoint. Every byte that is read is compared with its hash."""

    def __init__(self, runtime: Runtime, path: str) -> None:
        """Opens the checkpoint `path`, or the newest whole checkpoint in that folder."""
        self.handle: int = call(
            "ziggurat_checkpoint_open", runtime.handle, path.encode(), words=in_arguments
        )
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_checkpoint_close", self.handle, os.getpid(), runtime
        )
        content = json.loads(call("ziggurat_checkpoint_content", self.handle))
        self.directory: str = content["directory"]
        self.step: int = content["step"]
        self.optimizer: str | None = content["optimizer"]
        self.resume: dict[str, Any] = content["resume"]
        self.tensors = [SavedTensor(*one[:4], tuple(one[4])) for one in content["tensors"]]
        self._blob_bytes: int = content["blob_bytes"]

    @property
    def blob(self) -> bytes:
        room = ctypes.create_string_buffer(self._blob_bytes)
        call("ziggurat_checkpoint_blob", self.handle, room, self._blob_bytes)
        return room.raw[: self._blob_bytes]

    def read(self, tensor: int, first: int, address: int, count: int) -> None:
        """Reads elements [first, first + count), widened to fp32."""
        values = memory("fp32", address, count)
        call("ziggurat_checkpoint_read", self.handle, tensor, first, values, words=in_arguments)

    def close(self) -> None:
        """Closes the checkpoint; does nothing the second time."""
        close(self._ended)
