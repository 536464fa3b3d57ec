# SPDX-License-Identifier: Apache-2.0
"""Puts memory that is not PyTorch's behind a parameter, and takes it away again.

A parameter keeps its storage object for life. What is exchanged is the memory in it, so all that
autograd has saved of the parameter, views too, finds the memory that is there when backward needs
it. While a parameter is away its storage has no memory and raises at each access.

PyTorch has no public calls for this: see torch_private.py.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ziggurat._pytorch.torch_private import address_of, refuse_writes, uses_of
from ziggurat._pytorch.torch_private import over as over
from ziggurat._pytorch.torch_private import swap as swap

_IMPL_BYTES = 88  #: of a C++ StorageImpl that are looked at; all belong to its object
_TRIES = 3
_CPU = torch.device("cpu")


def over_engine(address: int, size_bytes: int) -> torch.UntypedStorage:
    """Returns a storage whose memory is the engine's, which was_exported() can tell of."""
    made = over(address, size_bytes)
    known = _place_of_allocator()
    if known is not None:
        # What may be resized needs an allocator, which is the one of PyTorch's own memory.
        _word(made, known[0]).value = known[1]
        begin_exports(made)
    return made


def begin_exports(storage: torch.UntypedStorage) -> None:
    """Makes was_exported() begin anew. The memory is of over_engine()."""
    place = _place_of_resizable()
    if place is not None:
        _byte(storage, place).value = 1


def was_exported(storage: torch.UntypedStorage) -> bool:
    """Returns whether a NumPy array was made of memory that is of over_engine(), or PyTorch's own. PyTorch
    lets nobody resize such memory any more, and leaves no other mark."""
    return not storage.resizable() and has_allocator(storage)


def has_allocator(storage: torch.UntypedStorage) -> bool:
    """Returns whether the memory is PyTorch's own, or of over_engine()."""
    known = _place_of_allocator()
    return known is not None and bool(_word(storage, known[0]).value)


def users(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors have the storage, and one more for its object in Python."""
    return uses_of(storage)


def empty(size_bytes: int) -> torch.UntypedStorage:
    """Returns a storage with memory of PyTorch's."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()


def on_device(values: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """Returns the storage, or a copy on the device that it is not on."""
    if values.device == device:
        return values
    return _tensor_of(values, values.nbytes()).to(device).untyped_storage()


def guard(size_bytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """Returns a storage without memory: each access raises a RuntimeError. Without the flag that
    guards_reads() tells of, only a write does, and a read would end the process."""
    made = over(0, size_bytes, device)
    _refuse_access(made)
    return made


def guarded(like: torch.Tensor, device: torch.device = _CPU) -> torch.Tensor:
    """Returns a tensor of the shape, strides and type of `like` over a guard."""
    storage = over(0, like.numel() * like.element_size(), device)
    made: Any = torch.empty(0, dtype=like.dtype, device=device)
    made.set_(storage, 0, tuple(like.shape), like.stride())
    _refuse_access(storage)
    tensor: torch.Tensor = made
    return tensor


def guards_reads() -> bool:
    """Returns whether C++ code that reads a guard gets an error."""
    return _place_of_flag() is not None


class Away(torch.UntypedStorage):
    """The class of a parameter's storage object while a guard is in the storage, for what PyTorch does
    without an access, or in code that an error would end the process in. All aliases of a parameter
    have one storage object."""

    def is_shared(self) -> bool:
        return False

    def resize_(self, size: int) -> Any:
        self.data_ptr()  # raises
        return super().resize_(size)

    def __reduce__(self) -> Any:
        self.data_ptr()  # raises
        return super().__reduce__()  # type: ignore[no-untyped-call]


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Returns whether the storage is not empty, and no guard is in it."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False


def is_refusal(error: RuntimeError) -> bool:
    """Returns whether a guard has raised the error, or what else refuses a storage's memory. A
    tensor that has none, such as a compiler's, is refused in other words."""
    return str(error).startswith("Cannot access data pointer of Storage that is invalid")


def shares_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's storage has other elements than the tensor's own."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def identity(tensor: torch.Tensor) -> int:
    """Returns a number that stays the storage's own, wherever its memory is."""
    return address_of(tensor.untyped_storage())


def _tensor_of(storage: torch.UntypedStorage, count: int = 0) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    made: torch.Tensor = empty.set_(storage, 0, (count,))
    return made


def _refuse_access(storage: torch.UntypedStorage) -> None:
    tensor = _tensor_of(storage)
    refuse_writes(tensor)
    place = _place_of_flag()
    if place is not None:
        _byte(storage, place).value = 1


def _byte(storage: torch.UntypedStorage, place: int) -> ctypes.c_ubyte:
    return ctypes.c_ubyte.from_address(address_of(storage) + place)


def _word(storage: torch.UntypedStorage, place: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address_of(storage) + place)


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes((ctypes.c_ubyte * _IMPL_BYTES).from_address(address_of(storage)))


@functools.cache
def _place_of_resizable() -> int | None:
    """Returns where a StorageImpl has the flag that NumPy's arrays clear, or None."""
    storage = empty(8)
    seen = _bytes(storage)
    _tensor_of(storage, 8).numpy()
    now = _bytes(storage)
    changed = [place for place in range(_IMPL_BYTES) if seen[place] != now[place]]
    cleared = len(changed) == 1 and seen[changed[0]] == 1 and now[changed[0]] == 0
    return changed[0] if cleared else None


@functools.cache
def _place_of_allocator() -> tuple[int, int] | None:
    """Returns where a StorageImpl has the address of its allocator, and PyTorch's there, or None: all of PyTorch's
    own have the same there, and those of other memory nothing."""
    flag = _place_of_resizable()
    if flag is None:
        return None
    own = [empty(8), empty(1 << 12)]
    other = over(own[0].data_ptr(), 8)
    found = []
    for place in range(0, _IMPL_BYTES, 8):
        its = {_word(one, place).value for one in own}
        if place != flag // 8 * 8 and len(its) == 1 and 0 not in its and not _word(other, place).value:
            found.append((place, its.pop()))
    return found[0] if len(found) == 1 else None


@functools.cache
def _place_of_flag() -> int | None:
    """Returns where a StorageImpl has the flag that makes a read raise, or None."""
    tries = (_probed_place() for _ in range(_TRIES))
    return next((place for place in tries if place is not None), None)


def _probed_place() -> int | None:
    """Looks for the flag's place once.

    PyTorch has no call that sets it: _set_storage_access_error_msg, in builds with CUDA, is of one tensor
    and leaves its storage. The call for its neighbour, which refuses writes, changes two bytes that lie in
    a row; the flag is the third. That is tried on a storage that has memory, so that a wrong guess reads
    that memory and does no harm."""
    storage = empty(8)
    seen = _bytes(storage)
    refuse_writes(_tensor_of(storage))
    now = _bytes(storage)
    changed = [place for place, (a, b) in enumerate(zip(seen, now, strict=True)) if a != b]
    place = changed[-1] + 1
    if len(changed) != 2 or changed[1] != changed[0] + 1 or now[place] != 0:
        return None
    _byte(storage, place).value = 1
    try:
        _tensor_of(storage, 8).sum()
    except RuntimeError:
        return place
    finally:
        _byte(storage, place).value = 0
    return None
