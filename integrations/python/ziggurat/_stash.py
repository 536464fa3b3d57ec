# SPDX-License-Identifier: Apache-2.0
"""Offers the C interface's stash as a Python object: memory that spills to a drive.

An interrupt (Ctrl-C) comes between any two steps of Python, also in what runs when an object goes, where
it is lost. So an item is known before it is put, a read is one call, and an item that goes is only noted,
by one step in C: the next call tells the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import weakref
from collections import deque
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
        self._living: set[_Watch] = set()  # a weak reference that is gone calls nothing
        self._gone: deque[_Watch] = deque()

    def put(self, address: int, size_bytes: int) -> Item:
        """Copies an item. Waits while memory is full and the drive is behind."""
        self._begin()
        item = Item(self)
        self._living.add(_Watch(item, self._gone))
        self._call("ziggurat_stash_put", self._handle, address, size_bytes, ctypes.byref(item.ticket))
        return item

    def read(self, item: Item, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies what was put, from `offset_bytes` on, to an address."""
        self._begin()
        self._call("ziggurat_stash_read", self._handle, item.ticket, address, offset_bytes, size_bytes)

    def figures(self) -> dict[str, int | float]:
        self._begin()
        its = self._call("ziggurat_stash_figures", self._handle)
        return {name: getattr(its, name) for name, _ in its._fields_[2:]}

    @property
    def is_own(self) -> bool:
        """Returns whether this process has made it; a forked one has its object alone."""
        return os.getpid() == self._pid

    def _begin(self) -> None:
        if not self.is_own:
            raise InvalidArgument(
                "this process was forked, and has no activations of its parent's: make forwards and "
                "backwards of an offloaded model in the process that made it"
            )
        # Another thread, or this one after an interrupt, may drop an item again, which changes nothing.
        while (watch := self._first_gone()) is not None:
            self._call("ziggurat_stash_drop", self._handle, watch.ticket)
            self._living.discard(watch)
            with contextlib.suppress(ValueError):
                self._gone.remove(watch)

    def _first_gone(self) -> _Watch | None:
        try:
            return self._gone[0]
        except IndexError:
            return None

    @staticmethod
    def _call(name: str, *arguments: object) -> Any:
        return call(name, *arguments, words=_in_arguments)


class Item:
    """Bytes in a stash, forgotten with this object."""

    def __init__(self, stash: Stash) -> None:
        self._stash, self.ticket = stash, ctypes.c_uint64()  #: 0 until it is put

    def read(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies bytes from `offset_bytes` on to an address."""
        self._stash.read(self, address, offset_bytes, size_bytes)


class _Watch(weakref.ref[Item]):
    """Notes that an item is gone."""

    __slots__ = ("ticket",)
    ticket: ctypes.c_uint64

    def __new__(cls, item: Item, gone: deque[_Watch]) -> _Watch:
        made = super().__new__(cls, item, gone.append)
        made.ticket = item.ticket
        return made

    def __init__(self, item: Item, gone: deque[_Watch]) -> None:
        super().__init__(item, gone.append)


def _in_arguments(text: str) -> str:
    """Says what offload() calls the stash's memory."""
    return in_arguments(text).replace("the stash's memory", "activation_memory")
