# SPDX-License-Identifier: Apache-2.0
"""Offers the C interface's stash as a Python object: memory that spills to a drive."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from typing import Any

from ziggurat._abi import call
from ziggurat._native import InvalidArgument, Runtime, end_handle
from ziggurat._words import in_arguments

__all__ = ["Item", "Stash"]


class Stash:
    """Keeps items of bytes, in `memory_bytes` of host memory and beyond that in files without names
    in `folder`. It is closed when nobody has it or an item any more."""

    def __init__(self, folder: str, memory_bytes: int) -> None:
        settings = json.dumps({"store": folder, "memory": memory_bytes}).encode()
        runtime = Runtime(threads=1)
        self._handle: int = self._call("ziggurat_stash_open", runtime.handle, settings)
        self._pid = os.getpid()
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_stash_close", self._handle, self._pid, runtime
        )

    def put(self, address: int, size_bytes: int) -> Item:
        """Copies an item. Waits while memory is full and the drive is behind."""
        self._require_own_process()
        return Item(self, self._call("ziggurat_stash_put", self._handle, address, size_bytes), size_bytes)

    def read(self, ticket: int, address: int, size_bytes: int) -> None:
        """Copies what was put to an address."""
        self._require_own_process()
        place = ctypes.c_void_p()
        self._call("ziggurat_stash_get", self._handle, ticket, ctypes.byref(place))
        ctypes.memmove(address, place, size_bytes)
        self._call("ziggurat_stash_release", self._handle, ticket)

    def drop(self, ticket: int) -> None:
        if os.getpid() == self._pid and self._ended.alive:
            self._call("ziggurat_stash_drop", self._handle, ticket)

    def figures(self) -> dict[str, int | float]:
        its = self._call("ziggurat_stash_figures", self._handle)
        return {name: getattr(its, name) for name, _ in its._fields_[2:]}

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(
                "this process was forked, and has no activations of its parent's: make forwards and "
                "backwards of an offloaded model in the process that made it"
            )

    @staticmethod
    def _call(name: str, *arguments: object) -> Any:
        return call(name, *arguments, words=_in_arguments)


class Item:
    """Bytes in a stash, forgotten with this object."""

    def __init__(self, stash: Stash, ticket: int, size_bytes: int) -> None:
        self._stash, self._ticket, self.size_bytes = stash, ticket, size_bytes
        weakref.finalize(self, stash.drop, ticket).atexit = False

    def read(self, address: int) -> None:
        """Copies the bytes to an address."""
        self._stash.read(self._ticket, address, self.size_bytes)


def _in_arguments(text: str) -> str:
    """Says what offload() calls the stash's memory."""
    return in_arguments(text).replace("the stash's memory", "activation_memory")
