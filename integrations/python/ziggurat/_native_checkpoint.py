# SPDX-License-Identifier: Apache-2.0
"""The C interface's checkpoints as Python objects: written by engines, read by name."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ziggurat._abi import HANDLE, Memory, SaveOptions, call, memory, sized
from ziggurat._native import Engine, Runtime, close, end_handle, text_of
from ziggurat._words import in_arguments


class Values(NamedTuple):
    """Elements in memory."""

    dtype: str
    address: int
    count: int


def save_checkpoint(
    runtime: Runtime,
    engines: Sequence[Engine],
    values: Sequence[Values],
    blob: bytes,
    content: Mapping[str, Any] | str,
) -> None:
    """ziggurat_save_checkpoint(): a call of all ranks. `content` is described there; as its JSON,
    nothing of it can fail here on one rank alone."""
    text = content if isinstance(content, str) else json.dumps(content)
    handles = (HANDLE * len(engines))(*(engine.handle for engine in engines))
    given = (Memory * len(values))(*(memory(*one) for one in values))
    options = sized(
        SaveOptions,
        engine_count=len(engines),
        engines=handles,
        values=given,
        value_count=len(values),
        blob=blob or None,
        blob_bytes=len(blob),
    )
    call("ziggurat_save_checkpoint", runtime.handle, options, text.encode(), words=in_arguments)


class SavedTensor(NamedTuple):
    """An array of a checkpoint."""

    name: str
    owner: str  #: the parameter; of scales, the unit
    array: str  #: "master", "exp_avg", ..
    type: str  #: as safetensors calls it
    shape: tuple[int, ...]


class Checkpoint:
    """A checkpoint that is read: every byte is compared with its hash."""

    def __init__(self, runtime: Runtime, path: str) -> None:
        """The checkpoint `path`, or the newest whole one in that folder."""
        handle = HANDLE()
        call("ziggurat_checkpoint_open", runtime.handle, path.encode(), ctypes.byref(handle), words=in_arguments)
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_checkpoint_close", handle.value, os.getpid(), runtime
        )
        content = json.loads(text_of("ziggurat_checkpoint_content", self.handle))
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
        """Elements [first, first + count), widened to fp32."""
        values = memory("fp32", address, count)
        call("ziggurat_checkpoint_read", self.handle, tensor, first, values, words=in_arguments)

    def close(self) -> None:
        """Does nothing the second time."""
        close(self._ended)
