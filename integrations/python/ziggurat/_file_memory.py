# SPDX-License-Identifier: Apache-2.0
"""Memory of tensors in files without names, so that a model can be built that memory has no room
for.

The kernel writes such memory to the drive, and reads it again where it is used. What an operation
has touched leaves the process's memory when the operation has ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ziggurat import _storage
from ziggurat._memory import advise, count_freed, size_text
from ziggurat._native import InvalidArgument, ResourceExhausted

__all__ = ["empty_in_file", "is_in_file", "let_pages_go", "move_to_file", "streamed_init"]

_LARGE_BYTES = 1 << 20  # what is smaller stays in PyTorch's memory
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' name for it
# Where a file without a name is opened, spelled as nobody else does, since it tells our mappings from
# others', whose pages may hold what no file has.
_NAMELESS = "/proc/self/./fd/"


@contextmanager
def streamed_init(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Builds a model that memory has no room for: each large tensor on the CPU that a PyTorch
    operation returns in the block lies in a file without a name in `folder`, which must be on a
    drive. Values, and what random generators draw, are as without it.

    Not in files is what other threads make, what is made of memory that is there, as from lists and
    NumPy, and what an operation resizes. transformers' loading does without threads in the block.
    A tensor in a file cannot be resized, and a forked process that writes it writes its parent's. ::

        with ziggurat.torch.streamed_init("/fast/dir"):
            model = LlamaForCausalLM(config).bfloat16()
        model = ziggurat.torch.offload(model, memory="4GiB", placement="nvme")

    The drive needs room for the model as it is drawn, so for 4 bytes a parameter here. Each file
    goes with its tensor, which for a parameter of an offloaded model is when the engine has its
    values.

    Errors: InvalidArgument for a folder that cannot be used; ResourceExhausted for a full drive.
    """
    where = os.path.abspath(folder)
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise InvalidArgument(
            f'streamed_init("{where}"): {error.strerror}: give a directory on a drive, in which files '
            "can be made"
        ) from error
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        with _InFiles(where):
            yield
    finally:
        os.environ.pop(_NO_THREADS, None)
        if before is not None:
            os.environ[_NO_THREADS] = before


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
    if not _is_large(like):
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
    made: Any = torch.empty(0, dtype=like.dtype, device="cpu")
    tensor: torch.Tensor = made.set_(storage, 0, shape, strides)
    return tensor


def move_to_file(tensor: torch.Tensor, folder: str) -> None:
    """Moves the values of a tensor, with all its aliases, to a file without a name in `folder`, unless
    they are in one or few. Errors: ResourceExhausted."""
    if is_in_file(tensor) or not _is_large(tensor):
        return
    values = empty_in_file(folder, tensor)
    values.copy_(tensor.detach())
    let_pages_go(values)
    _storage.swap(tensor.untyped_storage(), values.untyped_storage())
    count_freed(tensor.nbytes)


class _InFiles(TorchDispatchMode):
    """Puts large tensors that operations make into files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

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
        known = {_storage.identity(one) for one in given if _is_plain(one)}
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
        return empty_in_file(self._folder, like) if _is_large(like) else None

    def _moved(self, made: Any, known: set[int]) -> Any:
        """Returns a copy in a file of what an operation has made, if it is large."""
        if not _is_plain(made) or not _is_large(made) or _storage.identity(made) in known:
            return made
        if is_in_file(made) or _storage.shares_memory(made):
            return made
        copy = empty_in_file(self._folder, made)
        copy.copy_(made)
        let_pages_go(copy)
        count_freed(made.nbytes)
        return copy


_MAKE_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_strided)


def _is_plain(value: Any) -> bool:
    """Returns whether the value is a tensor on the CPU with a storage of its own kind."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return False
    return value.device.type == "cpu" and value.layout is torch.strided


def _is_large(tensor: torch.Tensor) -> bool:
    return not tensor.is_quantized and tensor.numel() * tensor.element_size() >= _LARGE_BYTES


def is_in_file(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory is a file without a name of this package's."""
    if not _is_plain(tensor):
        return False
    name = tensor.untyped_storage().filename
    return name is not None and name.startswith(_NAMELESS)
