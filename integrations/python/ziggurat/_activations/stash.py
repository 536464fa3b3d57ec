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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ziggurat._activations.watch import Watch
from ziggurat._library.abi import call
from ziggurat._library.native import InvalidArgument, Runtime, end_handle
from ziggurat._library.words import in_arguments

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator

__all__ = ["Item", "Loan", "Stash"]


class Stash:
    """Keeps items of bytes, in `memory_bytes` of host memory and beyond that in files without names
    in `folder`. It is closed when nobody has it or an item any more."""

    def __init__(self, folder: str, memory_bytes: int, accelerator: Accelerator | None = None) -> None:
        """`accelerator`: which has what is put and read."""
        self.accelerator = accelerator
        settings = json.dumps({"store": folder, "memory": memory_bytes}).encode()
        runtime = Runtime(threads=1)
        self._handle: int = self._call("ziggurat_stash_open", runtime.handle, settings)
        self._pid = os.getpid()
        self._living: set[_Watch] = set()  # a weak reference that is gone calls nothing
        self._ended = weakref.finalize(self, _end, self._handle, self._pid, runtime, self._living)
        self._gone: deque[_Watch] = deque()

    def put(self, size_bytes: int, fill: Callable[[int], None]) -> Item | None:
        """Gives an item's memory to `fill`, by its address. Waits while memory is full and the drive is behind.
        Returns None, and fills nothing, if only the end of a loan would make room."""
        self._begin()
        item, address = Item(self), ctypes.c_void_p()
        self._living.add(_Watch(item, self._gone))
        numbers = ctypes.byref(item.ticket), ctypes.byref(address)
        self._call("ziggurat_stash_take", self._handle, size_bytes, *numbers)
        if address.value is None:
            return None
        try:
            fill(address.value)
        except BaseException:
            # At once, since what keeps the error keeps the item, and others would wait for its memory.
            self._call("ziggurat_stash_drop", self._handle, item.ticket)
            raise
        self._call("ziggurat_stash_filled", self._handle, item.ticket)
        return item

    def lend(self, item: Item) -> Loan | None:
        """Lends an item's memory. Returns None if that cannot be now: read() it."""
        self._begin()
        item.was_lent = True
        loan = Loan(item)
        self._living.add(_Watch(loan, self._gone))
        numbers = ctypes.byref(loan.number), ctypes.byref(loan.address)
        self._call("ziggurat_stash_lend", self._handle, item.ticket, *numbers)
        return None if loan.address.value is None else loan

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
        # Another thread, or this one after an interrupt, may end the same again, which changes nothing.
        while (watch := self._first_gone()) is not None:
            self._call(watch.end, self._handle, watch.number)
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

    end = "ziggurat_stash_drop"

    def __init__(self, stash: Stash) -> None:
        self._stash, self.ticket = stash, ctypes.c_uint64()  #: 0 until it is put
        self.was_lent = False  #: whether somebody may have written it

    @property
    def number(self) -> ctypes.c_uint64:
        return self.ticket

    def read(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies bytes from `offset_bytes` on to an address."""
        self._stash.read(self, address, offset_bytes, size_bytes)

    def fill(self, target: torch.Tensor, offset_bytes: int) -> None:
        """Copies bytes from `offset_bytes` on to `target`, which may be the accelerator's."""
        accelerator = self._stash.accelerator
        host = target if accelerator is None else torch.empty(target.nbytes, dtype=torch.uint8, device="cpu")
        self.read(host.data_ptr(), offset_bytes, target.nbytes)
        if accelerator is not None:
            accelerator.copy_now(target, host)

    def lent(self) -> Loan | None:
        """See Stash.lend()."""
        return self._stash.lend(self)


class Loan:
    """An item's memory, lent as long as this object is."""

    end = "ziggurat_stash_give_back"

    def __init__(self, item: Item) -> None:
        self._item = item  # and so the stash
        self.number, self.address = ctypes.c_uint64(), ctypes.c_void_p()  #: 0 until it is lent

    def memory(self, offset_bytes: int, size_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Returns a part of it, which keeps it lent."""
        its = (ctypes.c_uint8 * size_bytes).from_address((self.address.value or 0) + offset_bytes)
        its.loan = self  # type: ignore[attr-defined]
        return its


class _Watch(Watch):
    """Notes that an item or a loan is gone."""

    __slots__ = ("end", "number")
    end: str
    number: ctypes.c_uint64

    def __new__(cls, its: Item | Loan, gone: deque[_Watch]) -> _Watch:
        made = super().__new__(cls, its, gone)
        made.end, made.number = its.end, its.number
        return made


def _end(handle: int, owner: int, runtime: Runtime, living: set[_Watch]) -> None:
    """Closes a stash, and then lets its runtime go. What is lent keeps it, but not beyond the interpreter's exit,
    where others may yet read a gradient: then all stays until the process ends."""
    if any(isinstance(watch(), Loan) for watch in list(living)):
        runtime.stay()
    else:
        end_handle("ziggurat_stash_close", handle, owner)


def _in_arguments(text: str) -> str:
    """Says what offload() calls the stash's memory."""
    return in_arguments(text).replace("the stash's memory", "activation_memory")
