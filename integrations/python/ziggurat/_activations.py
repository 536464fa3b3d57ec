# SPDX-License-Identifier: Apache-2.0
"""Keeps what backward needs of a forward, beyond a budget of memory, on a drive.

A saved tensor's storage is copied once, however many views of it are saved, and given back to
PyTorch. Backward copies it back, since it may keep or write what it is given: the newest are still in
memory, and those before come back while backward computes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ziggurat._memory import bytes_of, count_freed, free_bytes, size_text
from ziggurat._native import InvalidArgument
from ziggurat._saved import saving
from ziggurat._standard_error import stderr
from ziggurat._stash import Item, Stash
from ziggurat._storage import identity
from ziggurat._torch_private import address_of

if TYPE_CHECKING:
    from ziggurat._streaming import Streaming

__all__ = ["Activations", "activations_of"]

_SMALL_BYTES = 1 << 16  # what is smaller stays in PyTorch's memory
_LARGEST_PART = 8  # how many times a tensor's bytes its storage may have
_PAGE = 4096  # of which the stash gives whole ones


class _View(NamedTuple):
    """A saved tensor: a view of a storage that is in the stash."""

    storage: Item
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        memory = torch.empty(self.storage.size_bytes, dtype=torch.uint8, device="cpu")
        self.storage.read(memory.data_ptr())
        count_freed(memory.nbytes)  # soon, when backward has no use for it any more
        made: Any = torch.empty(0, dtype=self.dtype, device="cpu")
        its: torch.Tensor = made.set_(memory.untyped_storage(), self.offset, self.shape, self.strides)
        return its


class _Known(NamedTuple):
    """A storage that was put, while it is alive, at a version of what is in it."""

    storage: StorageWeakRef
    version: int
    item: weakref.ref[Item]


class Activations:
    """What the forwards of one model save for backward."""

    def __init__(
        self, folder: Callable[[], str], memory_bytes: int | None, owned: Callable[[], set[int]]
    ) -> None:
        """`folder` and `owned`, the storages that stay where they are, are asked at the first
        forward. `memory_bytes`: None takes an eighth of the memory that is free then."""
        self._folder, self._memory_bytes, self._owned = folder, memory_bytes, owned
        self._stash: Stash | None = None
        self._past: dict[str, int | float] = {}  # figures of those that were closed
        self._stays: set[int] = set()
        self._known: dict[int, _Known] = {}  # by the storage's address in PyTorch
        self._inside: set[int] = set()  # the threads whose forwards run
        self._said = False

    def _open(self) -> Stash:
        if self._stash is None:
            if self._memory_bytes is None:
                self._memory_bytes = max(free_bytes() // 8, _SMALL_BYTES)
            self._stash = Stash(self._folder(), self._memory_bytes)
            self._stays = self._owned()
        return self._stash

    def close(self) -> None:
        """Gives memory and files back when backward needs none of them any more. A forward that trains
        takes them again."""
        self._past = self.figures()
        self._stash = None

    def figures(self) -> dict[str, int | float]:
        """Returns what was moved and waited for."""
        if self._stash is None:
            return self._past
        now = self._stash.figures()
        sums = {name: value + self._past.get(name, 0) for name, value in now.items()}
        peak = "memory_peak_bytes"
        return sums | {peak: max(now[peak], self._past.get(peak, 0))}

    def counters(self) -> dict[str, int]:
        """Returns what was moved and waited for, as an optimizer's figures() counts it."""
        its = self.figures()
        waited = its.get("waited_to_put_s", 0.0) + its.get("waited_to_get_s", 0.0)
        moved = {f"activations_{name}": int(its.get(name, 0)) for name in ("put_bytes", "written_bytes", "read_bytes")}
        return moved | {"activations_wait_ns": round(1e9 * waited)}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what the block's graph saves."""
        thread = threading.get_ident()  # which has hooks of its own
        if thread in self._inside:  # a module around has begun already
            yield
            return
        stash = self._open()

        def keep(tensor: torch.Tensor) -> _View | None:
            item = self._put(stash, tensor)
            if item is None:
                return None
            return _View(
                item, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            )

        self._inside.add(thread)
        try:
            with saving(keep):
                yield
        finally:
            self._inside.discard(thread)
            self._known.clear()

    def _put(self, stash: Stash, tensor: torch.Tensor) -> Item | None:
        """Returns the tensor's storage in the stash; None if it stays where it is."""
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        # A small part of what is large, such as a batch of the data, frees nothing when it goes.
        if size_bytes < _SMALL_BYTES or size_bytes > _LARGEST_PART * tensor.nbytes:
            return None
        if address_of(storage) in self._stays:
            return None
        known = self._known.get(address_of(storage))
        if known is not None and not known.storage.expired() and known.version == tensor._version:
            item = known.item()
            if item is not None:
                return item
        if -(-size_bytes // _PAGE) > (self._memory_bytes or 0) // _PAGE:
            self._say_too_large(size_bytes)
            return None
        item = stash.put(storage.data_ptr(), size_bytes)
        count_freed(size_bytes)  # soon, when the forward has no use for it any more
        self._known[address_of(storage)] = _Known(
            StorageWeakRef(storage), tensor._version, weakref.ref(item)
        )
        return item

    def _say_too_large(self, size_bytes: int) -> None:
        if not self._said:
            self._said = True
            print(
                f"ziggurat: a tensor of {size_text(size_bytes)} that backward needs stays in memory, since "
                f"activation_memory={size_text(self._memory_bytes or 0)} has no room for it: give more "
                "to keep it on the drive",
                file=stderr(),
            )


def activations_of(
    streaming: Streaming, model: torch.nn.Module, placement: str | None, memory: int | str | None
) -> Activations | None:
    """Reads the arguments of offload(). Errors: InvalidArgument."""
    if placement is None:
        if memory is not None:
            raise InvalidArgument(
                f'offload(activation_memory={memory!r}): give activations="nvme" too, or neither'
            )
        return None
    tier, _, path = placement.partition(":")
    if tier == "host":
        raise InvalidArgument(
            'offload(activations="host"): on the CPU activations are in host memory anyway: give '
            '"nvme", or leave it out'
        )
    if tier != "nvme" or (not path and placement != "nvme"):
        raise InvalidArgument(
            f'offload(activations="{placement}"): give "nvme" for the directory of the optimizer\'s '
            'state, or "nvme:/path"'
        )
    size_bytes = None if memory is None else bytes_of("activation_memory", memory)
    if size_bytes is not None and size_bytes < _SMALL_BYTES:
        raise InvalidArgument(
            f"offload(activation_memory={memory!r}): give at least {size_text(_SMALL_BYTES)}, since what is "
            "smaller stays in PyTorch's memory"
        )

    def folder() -> str:
        store = streaming.store
        if path or store is not None:
            return path or str(store)
        raise InvalidArgument(
            'offload(activations="nvme") means the directory of the optimizer\'s state, and there is '
            'none: give activations="nvme:/path", or the optimizer placement="nvme:/path"'
        )

    def owned() -> set[int]:
        tensors = (*model.parameters(), *model.buffers())
        return {identity(tensor) for tensor in tensors}

    return Activations(folder, size_bytes, owned)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is its storage's bytes, and may be another tensor of the same."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_leaf and tensor.requires_grad)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
    )
