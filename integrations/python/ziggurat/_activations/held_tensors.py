# SPDX-License-Identifier: Apache-2.0
"""Knows which tensors backward needs that are still where PyTorch has them, in the order in which they were saved.

Backward needs the oldest last, so they leave memory first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

from ziggurat._activations.saved import InMemory
from ziggurat._activations.watch import Watch
from ziggurat._pytorch.spans import is_spread, span_of
from ziggurat._pytorch.torch_private import without_modes

if TYPE_CHECKING:
    import torch

    from ziggurat._activations.host_stash import HostItem
    from ziggurat._activations.stash import Item

__all__ = ["HeldTensors", "Whole"]


class View(Protocol):
    """A saved tensor that is a part of a whole."""

    in_memory: InMemory | None


class Whole:
    """A tensor of which views are saved: where PyTorch has it, or an item in the stash."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with without_modes():
            self.tensor: torch.Tensor | None = tensor.detach()  #: None once it is in the stash
        self._version = tensor._version
        self.span, self.is_packed = span_of(tensor), is_spread(tensor)
        self.size_bytes = tensor.nbytes if self.is_packed else self.span.size_bytes
        self.item: Item | HostItem | None = None  #: in the stash
        self.views: list[weakref.ref[View]] = []

    @property
    def is_as_saved(self) -> bool:
        """Returns whether nobody has written it since, after which backward refuses it."""
        return self.tensor is None or self.tensor._version == self._version

    def leave(self, item: Item | HostItem) -> None:
        """Lets PyTorch's memory go for what is in the stash by now."""
        self.item = item  # before the rest, since another thread may read a view meanwhile
        for weak in list(self.views):
            view = weak()
            if view is not None:
                view.in_memory = None
        self.tensor = None


class HeldTensors:
    """Counts the bytes of wholes that are where PyTorch has them. Any thread may call it."""

    def __init__(self) -> None:
        self._watches: OrderedDict[int, _Watch] = OrderedDict()
        self._gone: deque[_Watch] = deque()
        self._size_bytes, self._last, self._using = 0, 0, threading.Lock()

    def add(self, whole: Whole) -> None:
        with self._using:
            self._last += 1
            watch = _Watch(whole, self._gone)
            watch.number, watch.size_bytes = self._last, whole.size_bytes
            self._watches[watch.number] = watch
            self._size_bytes += whole.size_bytes

    def oldest_beyond(self, limit_bytes: int) -> Whole | None:
        """Takes the oldest one out if all together are more than that."""
        with self._using:
            self._forget_gone()
            while self._watches and self._size_bytes > limit_bytes:
                _, watch = self._watches.popitem(last=False)
                self._size_bytes -= watch.size_bytes
                whole: Whole | None = watch()
                if whole is not None:
                    return whole
        return None

    def put_back(self, whole: Whole) -> None:
        """Lets it be the oldest one again."""
        self.add(whole)
        with self._using:
            self._watches.move_to_end(next(reversed(self._watches)), last=False)

    def recount(self) -> None:
        """Counts anew, which an interrupt may have got wrong."""
        with self._using:
            self._forget_gone()
            self._size_bytes = sum(watch.size_bytes for watch in self._watches.values())

    def _forget_gone(self) -> None:
        while self._gone:
            watch = self._watches.pop(self._gone.popleft().number, None)
            if watch is not None:
                self._size_bytes -= watch.size_bytes


class _Watch(Watch):
    """Notes that a whole is gone."""

    __slots__ = ("number", "size_bytes")
    number: int
    size_bytes: int
