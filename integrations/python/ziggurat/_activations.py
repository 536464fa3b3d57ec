# SPDX-License-Identifier: Apache-2.0
"""Keeps what backward needs of a forward, beyond a budget of memory, on a drive.

A saved tensor is copied once, however many views of it are saved, and its memory given back to
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
from ziggurat._native import InvalidArgument, ResourceExhausted
from ziggurat._saved import saving
from ziggurat._spans import Span, is_spread, span_of
from ziggurat._standard_error import stderr
from ziggurat._stash import Item, Stash
from ziggurat._storage import identity
from ziggurat._torch_private import address_of

if TYPE_CHECKING:
    from ziggurat._streaming import Streaming

__all__ = ["Activations", "activations_of"]

_SMALL_BYTES = 1 << 16  # what is smaller stays in PyTorch's memory
_LARGEST_PART = 8  # how many times a tensor's bytes a storage may have that no graph has made
_PAGE = 4096  # of which the stash gives whole ones
_ALIGNMENT = 64  # of PyTorch's memory


class _View(NamedTuple):
    """A saved tensor: a view of what is in the stash."""

    item: Item
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int  #: its address, but for multiples of _ALIGNMENT
    begin: int  #: the first of its bytes in the item
    span_bytes: int  #: from its first element to the last
    is_packed: bool  #: whether the item has its elements alone, one after the other

    def tensor(self) -> torch.Tensor:
        """Returns it in memory of its own, with strides and alignment as they were, by which some kernels
        choose their order."""
        memory = torch.empty(self.shift + self.span_bytes, dtype=torch.uint8, device="cpu")
        count_freed(memory.nbytes)  # soon, when backward has no use for it any more
        made: Any = torch.empty(0, dtype=self.dtype, device="cpu")
        first = self.shift // self.dtype.itemsize
        its: torch.Tensor = made.set_(memory.untyped_storage(), first, self.shape, self.strides)
        if self.is_packed:
            packed = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.item.read(packed.data_ptr(), 0, packed.nbytes)
            return its.copy_(packed)
        self.item.read(memory.data_ptr() + self.shift, self.begin, self.span_bytes)
        return its


class _Known(NamedTuple):
    """A tensor that was put, with all views of it, while it has the same bytes at the same place.

    It is known as an object, since a version counts writes through one tensor and its views alone: others of
    its storage, as unsafe_chunk() and `.data` make, have counters of their own.
    """

    whole: weakref.ref[torch.Tensor]
    storage: StorageWeakRef
    state: tuple[object, ...]
    item: weakref.ref[Item]

    def serves(self, whole: torch.Tensor) -> bool:
        its = address_of(whole.untyped_storage())
        return self.whole() is whole and self.storage.cdata == its and self.state == _state_of(whole)


class Activations:
    """What the forwards of one model save for backward."""

    def __init__(
        self, folder: Callable[[], str | None], memory_bytes: int | None, owned: Callable[[], set[int]]
    ) -> None:
        """`folder` and `owned`, the storages that stay where they are, are asked at the first
        forward. `folder` returns None while there is none, and nothing is kept. `memory_bytes`: None
        takes an eighth of the memory that is free then."""
        self._folder, self._memory_bytes, self._owned = folder, memory_bytes, owned
        self._stash: Stash | None = None
        self._opening = threading.Lock()
        self._past: dict[str, int | float] = {}  # figures of those that were closed
        self._stays: set[int] = set()
        self._inside: set[int] = set()  # the threads whose forwards run
        self._said = False

    @property
    def memory_bytes(self) -> int:
        """Returns the memory that is or will be taken, as far as that is known."""
        return self._memory_bytes or max(free_bytes() // 8, _SMALL_BYTES)

    def _open(self) -> Stash | None:
        """Returns the stash, if there is a folder for it. Errors: ResourceExhausted."""
        with self._opening:
            folder = self._folder() if self._stash is None else None
            if folder is None:
                return self._stash
            free = free_bytes()
            self._memory_bytes = self.memory_bytes
            if self._memory_bytes > free:
                raise ResourceExhausted(
                    f"offload(activation_memory=): {size_text(self._memory_bytes)} are more than the "
                    f"{size_text(free)} of memory that are free: give less"
                )
            self._stays = self._owned()
            self._stash = Stash(folder, self._memory_bytes)
            return self._stash

    def close(self) -> None:
        """Gives memory and files back when backward needs none of them any more. A forward that trains
        takes them again."""
        if self._stash is not None and self._stash.is_own:
            self._past = self.figures()
        self._stash = None

    def figures(self) -> dict[str, int | float]:
        """Returns what was moved and waited for."""
        stash = self._stash
        if stash is None:
            return self._past
        now = stash.figures()
        sums = {name: value + self._past.get(name, 0) for name, value in now.items()}
        peak = "memory_peak_bytes"
        return sums | {peak: max(now[peak], self._past.get(peak, 0))}

    def counters(self) -> dict[str, int]:
        """Returns what was moved and waited for, as an optimizer's figures() counts it."""
        its = self.figures()
        waited = its.get("waited_to_put_s", 0.0) + its.get("waited_to_read_s", 0.0)
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
        if stash is None:
            yield
            return
        known: dict[int, _Known] = {}  # by the whole tensor's id()
        try:
            self._inside.add(thread)
            with saving(lambda tensor: self._put(stash, known, tensor)):
                yield
        finally:
            self._inside.discard(thread)

    def _put(self, stash: Stash, known: dict[int, _Known], tensor: torch.Tensor) -> _View | None:
        """Returns the tensor as it is in the stash; None if it stays where it is."""
        if not _is_plain(tensor) or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALL_BYTES or address_of(storage) in self._stays:
            return None
        base = tensor if tensor._base is None else tensor._base
        # A small part of what is large, such as a batch of the data, frees nothing when it goes.
        if base.is_leaf and (base.requires_grad or storage.nbytes() > _LARGEST_PART * tensor.nbytes):
            return None
        whole = base if _has_view(base, tensor) else tensor
        span, is_packed = span_of(whole), is_spread(whole)
        size_bytes = whole.nbytes if is_packed else span.size_bytes
        if size_bytes < _SMALL_BYTES:
            return None
        found = known.get(id(whole))
        item = None if found is None or not found.serves(whole) else found.item()
        if item is None:
            if -(-size_bytes // _PAGE) > (self._memory_bytes or 0) // _PAGE:
                self._say_too_large(size_bytes)
                return None
            item = _copied(stash, whole, span, is_packed)
            count_freed(size_bytes)  # soon, when the forward has no use for it any more
            known[id(whole)] = _Known(
                weakref.ref(whole), StorageWeakRef(storage), _state_of(whole), weakref.ref(item)
            )
        its = span_of(tensor)
        return _View(
            item,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            shift=tensor.data_ptr() % _ALIGNMENT // tensor.itemsize * tensor.itemsize,
            begin=its.begin - span.begin,
            span_bytes=its.size_bytes,
            is_packed=is_packed,
        )

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
    tier, _, path = placement.partition(":") if isinstance(placement, str) else ("", "", "")
    if tier == "host":
        raise InvalidArgument(
            'offload(activations="host"): on the CPU activations are in host memory anyway: give '
            '"nvme", or leave it out'
        )
    if tier != "nvme" or (not path and placement != "nvme"):
        raise InvalidArgument(
            f'offload(activations={placement!r}): give "nvme" for the directory of the optimizer\'s '
            'state, or "nvme:/path"'
        )
    size_bytes = None if memory is None else bytes_of("activation_memory", memory)
    if size_bytes is not None and size_bytes < _SMALL_BYTES:
        raise InvalidArgument(
            f"offload(activation_memory={memory!r}): give at least {size_text(_SMALL_BYTES)}, since what is "
            "smaller stays in PyTorch's memory"
        )

    def folder() -> str | None:
        if path or streaming.opened is None or streaming.store is not None:
            return path or streaming.store
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
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_inference()  # which has no version
        and not tensor._is_zerotensor()
    )


def _has_view(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Returns whether a copy of the base's bytes has those of `tensor`, which has the same version."""
    if base is tensor:
        return True
    if not _is_plain(base) or base.numel() == 0 or is_spread(base):
        return False
    # as_strided() reaches beyond its base, and `.data` may have given one of the two another storage.
    one, other = base.untyped_storage(), tensor.untyped_storage()
    return address_of(one) == address_of(other) and span_of(base).covers(span_of(tensor))


def _state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns what is another one if the tensor's bytes are, or are elsewhere in its storage."""
    return tensor._version, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _copied(stash: Stash, tensor: torch.Tensor, span: Span, is_packed: bool) -> Item:
    if is_packed:
        packed = tensor.detach().clone(memory_format=torch.contiguous_format)
        return stash.put(packed.data_ptr(), packed.nbytes)
    return stash.put(tensor.untyped_storage().data_ptr() + span.begin, span.size_bytes)
