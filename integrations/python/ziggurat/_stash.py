# SPDX-License-Identifier: Apache-2.0
"""Offers the C interface's stash as a Python object: memory that spills to a drive."""

from __future__ import annotations

import ctypes
import json
import os
import weakref

from ziggurat._abi import call
from ziggurat._native import Runtime, close, end_handle
from ziggurat._words import in_arguments

__all__ = ["Item", "Stash"]


class Stash:
    """Keeps items of bytes, in `memory_bytes` of host memory and beyond that in files without names
    in `folder`. It is closed when nobody has it or an item's bytes any more."""

    def __init__(self, folder: str, memory_bytes: int) -> None:
        settings = json.dumps({"store": folder, "memory": memory_bytes}).encode()
        runtime = Runtime(threads=1)
        self.handle: int = call("ziggurat_stash_open", runtime.handle, settings, words=in_arguments)
        self.pid = os.getpid()
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_stash_close", self.handle, self.pid, runtime
        )

    def put(self, address: int, size_bytes: int) -> Item:
        """Copies an item. Waits while memory is full and the drive is behind."""
        ticket = call("ziggurat_stash_put", self.handle, address, size_bytes, words=in_arguments)
        return Item(self, ticket, size_bytes)

    def figures(self) -> dict[str, int | float]:
        its = call("ziggurat_stash_figures", self.handle)
        return {name: getattr(its, name) for name, _ in its._fields_[2:]}

    def close(self) -> None:
        """Waits for transfers, and closes; does nothing the second time."""
        close(self._ended)


class Item:
    """Bytes in a stash, forgotten with this object."""

    def __init__(self, stash: Stash, ticket: int, size_bytes: int) -> None:
        self._stash, self._ticket, self.size_bytes = stash, ticket, size_bytes

    def bring(self) -> ctypes.Array[ctypes.c_char]:
        """Returns the bytes, which nobody may write, as long as the array is there or what was made
        of its buffer."""
        stash, ticket = self._stash, self._ticket
        address = ctypes.c_void_p()
        call("ziggurat_stash_get", stash.handle, ticket, ctypes.byref(address), words=in_arguments)
        its = (ctypes.c_char * self.size_bytes).from_address(address.value or 0)
        weakref.finalize(its, _release, stash, ticket).atexit = False
        return its

    def __del__(self) -> None:
        if os.getpid() == self._stash.pid:
            call("ziggurat_stash_drop", self._stash.handle, self._ticket)


def _release(stash: Stash, ticket: int) -> None:
    if os.getpid() == stash.pid:
        call("ziggurat_stash_release", stash.handle, ticket)
