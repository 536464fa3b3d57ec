# SPDX-License-Identifier: Apache-2.0
"""Memory of tensors in files without names, and a mode in which large tensors get it.

The kernel writes such memory to the drive, and reads it again where it is used. What an operation
has touched leaves the process's memory when the operation has ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ziggurat._library.native import ResourceExhausted
from ziggurat._memory.memory import advise, count_freed, size_text
from ziggurat._pytorch import storages

__all__ = [
    "LARGE_BYTES",
    "InFiles",
    "empty_in_file",
    "is_in_file",
    "is_large",
    "is_plain",
    "let_pages_go",
    "move_to_file",
]

LARGE_BYTES = 1 << 20  #: what is smaller stays in PyTorch's memory
# Where a file without a name is opened, spelled as nobody else does, since it tells our mappings from
# others', whose pages may hold what no file has.
_NAMELESS = "/proc/self/./fd/"


def let_pages_go(tensor: torch.Tensor) -> None:
    """Lets the pages of a tensor in a file leave this process's memory. They stay in the file. Does
    nothing for other tensors."""
    if not is_in_file(tensor):
        return
    storage = tensor.untyped_storage()
    # If it fails, the pages stay a little longer.
    advise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)


def empty_in_file(folder: str, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the size, strides and type of `like`, which is not empty: in a new file in
    `folder`, or in memory if it is small. The file's space is reserved: a full drive is an error
    here, where it would otherwise end the process at a write.

    Errors: ResourceExhausted."""
    shape, strides = tuple(like.shape), like.stride()
    if not is_large(like):
        return torch.empty_strided(shape, strides, dtype=like.dtype, device="cpu")
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size_bytes = reach * like.element_size()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            name = f"{_NAMELESS}{file.fileno()}"
            storage = torch.UntypedStorage.from_file(name, True, size_bytes)
    except OSError as error:
        raise ResourceExhausted(
            f"cannot make a file of {size_text(size_bytes)} in {folder} for a tensor that memory has no "
            f"room for: {error.strerror}: free some space there"
        ) from error
    except RuntimeError as error:  # PyTorch's, of mmap()
        raise ResourceExhausted(
            f"cannot map a file of {size_text(size_bytes)} in {folder} for a tensor that memory has no "
            f"room for: name a folder whose file system has shared mappings ({error})"
        ) from error
    made: Any = torch.empty(0, dtype=like.dtype, device="cpu")
    tensor: torch.Tensor = made.set_(storage, 0, shape, strides)
    return tensor


def move_to_file(tensor: torch.Tensor, folder: str) -> None:
    """Moves the values of a tensor, with all its aliases, to a file without a name in `folder`, unless
    they are in one or few. Errors: ResourceExhausted."""
    if is_in_file(tensor) or not is_large(tensor):
        return
    values = empty_in_file(folder, tensor)
    values.copy_(tensor.detach())
    let_pages_go(values)
    storages.swap(tensor.untyped_storage(), values.untyped_storage())
    count_freed(tensor.nbytes)


class InFiles(TorchDispatchMode):
    """Puts large tensors that operations make into files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _MAKE_EMPTY:
            made = self._empty(func, args, kwargs)
            if made is not None:
                return made
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = {storages.identity(one) for one in given if is_plain(one)}
        result = tree_map(lambda one: self._moved(one, known), result)
        for tensor in given:
            let_pages_go(tensor)
        return result

    def _empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns an empty tensor in a file, or None if it would not be a large one on the CPU."""
        device = kwargs.get("device")
        if kwargs.get("pin_memory") or torch.device(device or "cpu").type != "cpu":
            return None
        like = func(*args, **{**kwargs, "device": torch.device("meta")})
        return empty_in_file(self.folder, like) if is_large(like) else None

    def _moved(self, made: Any, known: set[int]) -> Any:
        """Returns a copy in a file of what an operation has made, if it is large."""
        if not is_plain(made) or not is_large(made) or storages.identity(made) in known:
            return made
        if is_in_file(made) or storages.shares_memory(made):
            return made
        copy = empty_in_file(self.folder, made)
        copy.copy_(made)
        let_pages_go(copy)
        count_freed(made.nbytes)
        return copy


_MAKE_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_strided)


def is_plain(value: Any) -> bool:
    """Returns whether the value is a tensor on the CPU with a storage of its own kind."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    return value.device.type == "cpu" and value.layout is torch.strided


def is_large(tensor: torch.Tensor) -> bool:
    return not tensor.is_quantized and tensor.numel() * tensor.element_size() >= LARGE_BYTES


def is_in_file(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory is a file without a name of this package's."""
    if not is_plain(tensor) or not storages.has_memory(tensor.untyped_storage()):
        return False
    name = tensor.untyped_storage().filename
    return name is not None and name.startswith(_NAMELESS)
