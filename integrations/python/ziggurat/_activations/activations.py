# SPDX-License-Identifier: Apache-2.0
"""Keeps what backward needs of a forward, beyond a budget of memory, on a drive; or of an accelerator's forward in
host memory.

A saved tensor stays where PyTorch has it as long as there is room, so that backward finds the newest as if nothing
were kept. The oldest are copied once, however many views of them are saved, to the stash, and their memory is given back to
PyTorch. They come back while backward computes, which is lent the memory where they lie if nobody else needs the same
bytes, as long as it keeps no more than half of the stash's memory. The rest is copied back. What an accelerator has
leaves at once, and comes back to it, so that nothing is lent.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ziggurat._activations.held_tensors import HeldTensors, Whole
from ziggurat._activations.host_stash import HostItem, HostStash
from ziggurat._activations.saved import InMemory, saving
from ziggurat._activations.stash import Item, Stash
from ziggurat._library.native import InvalidArgument, ResourceExhausted
from ziggurat._library.standard_error import stderr
from ziggurat._memory.loose_memory import loose
from ziggurat._memory.memory import bytes_of, free_bytes, size_text
from ziggurat._pytorch.spans import bytes_in, is_spread, span_of
from ziggurat._pytorch.storages import identity
from ziggurat._pytorch.torch_private import address_of, keeps_graph, over, without_modes

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator
    from ziggurat._streaming.streaming import Streaming

__all__ = ["IN_PLACE", "Activations", "activations_of"]

_SMALL_BYTES = 1 << 16  # what is smaller stays in PyTorch's memory
IN_PLACE = 0.75  #: of the memory is for tensors where PyTorch has them; the others pass through the rest, out and back
_LARGEST_PART = 8  # how many times a tensor's bytes a storage may have that no graph has made
_PAGE = 4096  # of which the stash gives whole ones
_ALIGNMENT = 64  # of PyTorch's memory


class _Place(NamedTuple):
    """Where a saved tensor is in an item."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    shift: int  #: its address, but for multiples of _ALIGNMENT
    begin: int  #: the first of its bytes in the item
    span_bytes: int  #: from its first element to the last
    is_packed: bool  #: whether the item has its elements alone, one after the other

    def over(self, memory: torch.Tensor, shift: int) -> torch.Tensor:
        made: Any = torch.empty(0, dtype=self.dtype, device=memory.device)
        first = shift // self.dtype.itemsize
        its: torch.Tensor = made.set_(memory.untyped_storage(), first, self.shape, self.strides)
        return its


class _View:
    """A saved tensor: where PyTorch has it, or a view of what is in the stash."""

    def __init__(self, whole: Whole, tensor: torch.Tensor, place: _Place, lends: bool) -> None:
        self._whole, self._place, self._device, self._lends = whole, place, tensor.device, lends
        self._lent: torch.Tensor | None = None
        whole.views.append(weakref.ref(self))
        self.in_memory = InMemory(tensor, others=1) if whole.item is None else None

    def tensor(self) -> torch.Tensor:
        """Returns it with strides and alignment as they were, by which some kernels choose their order."""
        if (kept := self.in_memory) is not None:
            return kept.tensor()
        item = self._whole.item
        assert item is not None
        if self._lent is None:
            self._lent = self._lend(item)
        return self._own(item) if self._lent is None else self._lent

    def _lend(self, item: Item | HostItem) -> torch.Tensor | None:
        """Returns it where it is in the stash. It may be written then, or become a gradient as it is, which no other
        use may see: neither another view's, nor a second backward's."""
        its = self._place
        if not self._lends or its.is_packed or its.begin % _ALIGNMENT != its.shift or keeps_graph():
            return None
        assert isinstance(item, Item)
        if any(view() not in (None, self) for view in self._whole.views) or (loan := item.lent()) is None:
            return None
        return its.over(torch.frombuffer(loan.memory(its.begin, its.span_bytes), dtype=torch.uint8), 0)

    def _own(self, item: Item | HostItem) -> torch.Tensor:
        place = self._place
        memory = torch.empty(place.shift + place.span_bytes, dtype=torch.uint8, device=self._device)
        if self._lends:
            loose.count_freed(memory.nbytes)  # soon, when backward has no use for it any more
        its = place.over(memory, place.shift)
        if place.is_packed:
            packed = torch.empty(place.shape, dtype=place.dtype, device=self._device)
            item.fill(packed.view(-1).view(torch.uint8), 0)
            return its.copy_(packed)
        item.fill(memory[place.shift :], place.begin)
        return its


class _Known(NamedTuple):
    """A tensor that is kept, with all views of it, while it has the same bytes at the same place.

    It is known as an object, since a version counts writes through one tensor and its views alone: others of
    its storage, as unsafe_chunk() and `.data` make, have counters of their own.
    """

    whole: weakref.ref[torch.Tensor]
    storage: StorageWeakRef
    state: tuple[object, ...]
    its: weakref.ref[Whole]

    def serves(self, whole: torch.Tensor) -> bool:
        its = address_of(whole.untyped_storage())
        return self.whole() is whole and self.storage.cdata == its and self.state == _state_of(whole)


class Activations:
    """What the forwards of one model save for backward."""

    def __init__(
        self,
        made: Callable[[], Callable[[int], Stash | HostStash] | None],
        memory_bytes: int | None,
        owned: Callable[[], set[int]],
        accelerator: Accelerator | None = None,
        share: int = 8,
    ) -> None:
        """`made` and `owned`, the storages that stay where they are, are asked at the first
        forward. `made` returns what makes a stash of so many bytes; None while there can be none, and
        nothing is kept. `memory_bytes`: None takes one in `share` bytes of the memory that is free then.
        `accelerator`: which computes."""
        self._made, self._memory_bytes, self._owned, self._share = made, memory_bytes, owned, share
        self._accelerator = accelerator
        self._device = torch.device("cpu") if accelerator is None else accelerator.device
        self._stash: Stash | HostStash | None = None
        self._window_bytes = 0  # the stash's memory
        self._held = HeldTensors()
        self._opening = threading.Lock()
        self._past: dict[str, int | float] = {}  # figures of stashes that were closed
        self._put_bytes = 0
        self._stays: set[int] = set()
        self._inside: set[int] = set()  # the threads whose forwards run
        self._said = False

    @property
    def memory_bytes(self) -> int:
        """Returns the memory that is or will be taken, as far as that is known."""
        return self._memory_bytes or max(free_bytes() // self._share, _SMALL_BYTES)

    def _open(self, size_bytes: int = 0) -> Stash | HostStash | None:
        """Returns the stash, which has room for an item of a size, if there can be one. A larger one takes the
        place of one that has none, which ends with its last item. Errors: ResourceExhausted."""
        with self._opening:
            size_bytes = -(-size_bytes // _PAGE) * _PAGE
            if self._stash is not None and size_bytes <= self._window_bytes:
                return self._stash
            make = self._made()
            if make is None:
                return None
            memory_bytes = self._memory_bytes = self.memory_bytes
            if self._stash is None:
                self._check_free(memory_bytes)
                self._stays = self._owned()
            passing = memory_bytes if self._accelerator is not None else int(memory_bytes * (1 - IN_PLACE))
            window_bytes = max(min(max(passing, 2 * size_bytes), memory_bytes) // _PAGE, 1) * _PAGE
            made = make(window_bytes)  # which may raise, and then all is as it was
            self._past, self._stash, self._window_bytes = self._moved(), made, window_bytes
            return made

    def _check_free(self, size_bytes: int) -> None:
        free = free_bytes()
        if size_bytes > free:
            raise ResourceExhausted(
                f"offload(activation_memory=): {size_text(size_bytes)} are more than the "
                f"{size_text(free)} of memory that are free: give less"
            )

    def close(self) -> None:
        """Gives memory and files back when backward needs none of them any more. A forward that trains
        takes them again."""
        if self._stash is not None and self._stash.is_own:
            self._past = self._moved()
        self._stash = None

    def figures(self) -> dict[str, int | float]:
        """Returns what was kept, moved and waited for; nothing before the first forward."""
        moved = self._moved()
        return moved | {"put_bytes": self._put_bytes} if moved else moved

    def _moved(self) -> dict[str, int | float]:
        """Returns the figures of all stashes."""
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
        if self._open() is None:
            yield
            return
        self._held.recount()
        known: dict[int, _Known] = {}  # by the whole tensor's id()
        try:
            self._inside.add(thread)
            with saving(lambda tensor: self._put(known, tensor)):
                yield
        finally:
            self._inside.discard(thread)

    def _put(self, known: dict[int, _Known], tensor: torch.Tensor) -> _View | None:
        """Returns the tensor as it is kept; None if it is left to PyTorch."""
        if not _is_plain(tensor, self._device) or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALL_BYTES or address_of(storage) in self._stays:
            return None
        base = tensor if tensor._base is None else tensor._base
        # A small part of what is large, such as a batch of the data, frees nothing when it goes.
        if base.is_leaf and (base.requires_grad or storage.nbytes() > _LARGEST_PART * tensor.nbytes):
            return None
        its = base if _has_view(base, tensor) else tensor
        found = known.get(id(its))
        whole = None if found is None or not found.serves(its) else found.its()
        # What was lent may have been written by a backward within the forward.
        if whole is None or (whole.item is not None and whole.item.was_lent):
            whole = self._new(its)
            if whole is None:
                return None
            known[id(its)] = _Known(weakref.ref(its), StorageWeakRef(storage), _state_of(its), weakref.ref(whole))
        view = _View(whole, tensor, _place_of(tensor, whole), lends=self._accelerator is None)
        self._make_room()
        return view

    def _new(self, tensor: torch.Tensor) -> Whole | None:
        """Keeps what was not kept before; None if there is no room for it, or it is small."""
        whole = Whole(tensor)
        if whole.size_bytes < _SMALL_BYTES:
            return None
        if -(-whole.size_bytes // _PAGE) > (self._memory_bytes or 0) // _PAGE:
            self._say_too_large(whole.size_bytes)
            return None
        # A part of a storage would keep all of it, and an accelerator's memory is what is short.
        if self._accelerator is None and tensor.untyped_storage().nbytes() < 2 * whole.size_bytes:
            self._held.add(whole)
        elif not self._move(whole):
            if isinstance(self._stash, HostStash):
                self._say_too_large(whole.size_bytes)
            return None
        self._put_bytes += whole.size_bytes
        return whole

    def _make_room(self) -> None:
        """Moves the oldest to the stash until the others have room where they are."""
        while (whole := self._held.oldest_beyond((self._memory_bytes or 0) - self._window_bytes)) is not None:
            if whole.is_as_saved and not self._move(whole):
                self._held.put_back(whole)
                return

    def _move(self, whole: Whole) -> bool:
        """Returns False if only the end of a loan would make room."""
        tensor, stash = whole.tensor, self._open(whole.size_bytes)
        item = None if tensor is None or stash is None else _copied(stash, tensor, whole)
        if item is not None:
            whole.leave(item)
            if self._accelerator is None:
                loose.count_freed(whole.size_bytes)  # soon, when the forward has no use for it any more
        return item is not None

    def _say_too_large(self, size_bytes: int) -> None:
        if not self._said:
            self._said = True
            stays = "in memory" if self._accelerator is None else f"on {self._device}"
            where = "in host memory" if isinstance(self._stash, HostStash) else "on the drive"
            print(
                f"ziggurat: a tensor of {size_text(size_bytes)} that backward needs stays {stays}, since "
                f"activation_memory={size_text(self._memory_bytes or 0)} has no room for it: give more to keep it "
                f"{where}",
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
    accelerator = streaming.accelerator
    if tier == "host" and accelerator is None:
        raise InvalidArgument(
            'offload(activations="host"): on the CPU activations are in host memory anyway: give '
            '"nvme", or leave it out'
        )
    if placement not in ("host", "nvme") and not (tier == "nvme" and path):
        raise InvalidArgument(
            f'offload(activations={placement!r}): give "nvme" for the directory of the optimizer\'s '
            'state, or "nvme:/path"; or "host" where device= names a GPU'
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

    def on_drive() -> Callable[[int], Stash] | None:
        where = folder()
        return None if where is None else functools.partial(Stash, where, accelerator=accelerator)

    if tier == "nvme":
        return Activations(on_drive, size_bytes, owned, accelerator)
    assert accelerator is not None
    in_memory = functools.partial(HostStash, accelerator)
    return Activations(lambda: in_memory, size_bytes, owned, accelerator, share=2)


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether a tensor of the device is its storage's bytes, and may be another tensor of the same."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
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
    if not _is_plain(base, tensor.device) or base.numel() == 0 or is_spread(base):
        return False
    # as_strided() reaches beyond its base, and `.data` may have given one of the two another storage.
    one, other = base.untyped_storage(), tensor.untyped_storage()
    return address_of(one) == address_of(other) and span_of(base).covers(span_of(tensor))


def _state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns what is another one if the tensor's bytes are, or are elsewhere in its storage."""
    return tensor._version, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _place_of(tensor: torch.Tensor, whole: Whole) -> _Place:
    its = span_of(tensor)
    return _Place(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        shift=tensor.data_ptr() % _ALIGNMENT // tensor.itemsize * tensor.itemsize,
        begin=its.begin - whole.span.begin,
        span_bytes=its.size_bytes,
        is_packed=whole.is_packed,
    )


def _copied(stash: Stash | HostStash, tensor: torch.Tensor, whole: Whole) -> Item | HostItem | None:
    """Copies with PyTorch's threads, or on the accelerator's stream."""
    with without_modes():  # which a script may count operations by
        its = tensor.detach() if whole.is_packed else bytes_in(tensor, whole.span)
        if isinstance(stash, HostStash):
            return stash.put(its.contiguous())
        accelerator = stash.accelerator

        def fill(address: int) -> None:
            made: Any = torch.empty(0, dtype=its.dtype, device="cpu")
            made.set_(over(address, its.nbytes), 0, its.shape)
            made.copy_(its) if accelerator is None else accelerator.copy_now(made, its)

        return stash.put(its.nbytes, fill)
