# SPDX-License-Identifier: Apache-2.0
"""Keeps what an accelerator's backward needs of a forward in host memory.

Copies both ways are work of the stream that computes, in pinned memory: the host waits for none of them, and no
later operation writes what is still read. An item's memory is used again for items of its size, as each step has
them, and freed for others.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ziggurat._activations.watch import Watch
from ziggurat._library.native import InvalidArgument

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator

__all__ = ["HostItem", "HostStash"]

_PAGE = 4096


class _Block(NamedTuple):
    """Pinned memory, and the streams whose work may still use it."""

    memory: torch.Tensor
    streams: list[Any]


class HostStash:
    """Keeps items in `memory_bytes` of pinned host memory, and refuses those that have no room."""

    def __init__(self, accelerator: Accelerator, memory_bytes: int) -> None:
        self._accelerator, self._memory_bytes = accelerator, memory_bytes
        self._pid = os.getpid()
        self._spare: defaultdict[int, list[_Block]] = defaultdict(list)  # by size
        self._living: set[_Watch] = set()  # a weak reference that is gone calls nothing
        self._gone: deque[_Watch] = deque()
        self._used_bytes = self._held_bytes = 0  # by items, and by those and what is spare
        self._put_bytes = self._peak_bytes = 0

    def put(self, source: torch.Tensor) -> HostItem | None:
        """Copies the bytes of `source`, which follow one another. Returns None if there is no room."""
        if not self.is_own:
            raise InvalidArgument(
                "this process was forked, and has no activations of its parent's: make forwards and backwards of an "
                "offloaded model in the process that made it"
            )
        self._take_back()
        size_bytes = -(-source.nbytes // _PAGE) * _PAGE
        if self._used_bytes + size_bytes > self._memory_bytes:
            return None
        block = self._block(size_bytes)
        item = HostItem(self, block, source.nbytes)
        self._living.add(_Watch(item, self._gone))
        self._used_bytes += size_bytes
        self._put_bytes += source.nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        self.queue(block, item.bytes, source.detach().reshape(-1).view(torch.uint8))
        # Nobody else keeps it now, and it may have been made on another stream, where its memory would be used again.
        self._accelerator.keep(source, block.streams[0])
        return item

    def queue(self, block: _Block, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to or from a block on the calling thread's stream, after all that has used the block."""
        stream = self._accelerator.current_stream()
        for other in block.streams:
            if other != stream:
                stream.wait_stream(other)
        block.streams[:] = [stream]
        self._accelerator.copy(stream, target, source)

    def _block(self, size_bytes: int) -> _Block:
        if spare := self._spare[size_bytes]:
            return spare.pop()
        for size, blocks in self._spare.items():
            while blocks and self._held_bytes + size_bytes > self._memory_bytes:
                blocks.pop()
                self._held_bytes -= size
        block = _Block(self._accelerator.pinned(size_bytes), [])
        self._held_bytes += size_bytes
        return block

    def _take_back(self) -> None:
        while self._gone:
            watch = self._gone.popleft()
            self._living.discard(watch)
            size_bytes = watch.block.memory.nbytes
            self._used_bytes -= size_bytes
            self._spare[size_bytes].append(watch.block)

    def figures(self) -> dict[str, int | float]:
        return {"put_bytes": self._put_bytes, "memory_peak_bytes": self._peak_bytes}

    @property
    def is_own(self) -> bool:
        """Returns whether this process has made it; a forked one has its object alone."""
        return os.getpid() == self._pid


class HostItem:
    """Bytes in host memory, forgotten with this object."""

    was_lent = False

    def __init__(self, stash: HostStash, block: _Block, size_bytes: int) -> None:
        self._stash, self.block = stash, block
        self.bytes = block.memory[:size_bytes]

    def fill(self, target: torch.Tensor, offset_bytes: int) -> None:
        """Copies bytes from `offset_bytes` on to the accelerator's `target`."""
        self._stash.queue(self.block, target, self.bytes[offset_bytes : offset_bytes + target.nbytes])


class _Watch(Watch):
    """Notes that an item is gone."""

    __slots__ = ("block",)
    block: _Block

    def __new__(cls, item: HostItem, gone: deque[_Watch]) -> _Watch:
        made = super().__new__(cls, item, gone)
        made.block = item.block
        return made
