# SPDX-License-Identifier: Apache-2.0
"""streamed_init(): builds a model that memory has no room for."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ziggurat._library.native import InvalidArgument
from ziggurat._memory.file_memory import InFiles, empty_in_file, is_large, is_plain, let_pages_go
from ziggurat._memory.memory import count_freed
from ziggurat._pytorch import storages
from ziggurat._pytorch.torch_private import require_for_offload, storage_of

__all__ = ["streamed_init"]

_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' name for it
_OPEN_BYTES = 256 << 20  # of fp32 values that are not rounded yet
_IN_USE = 2  # operations whose tensors are not rounded, as trunc_normal_() and orthogonal_() need it
_AT_ONCE = 1 << 20  # elements that are compared at a time

aten = torch.ops.aten
# What writes all elements of its first argument and reads none of them.
_OVERWRITES = {
    *(aten.normal_, aten.uniform_, aten.zero_, aten.fill_, aten.copy_, aten.random_, aten.exponential_),
    *(aten.log_normal_, aten.cauchy_, aten.geometric_, aten.bernoulli_),
}
# What looks at shapes alone.
_SHAPES = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided),
}


@contextmanager
def streamed_init(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Iterator[None]:
    """Builds a model that memory has no room for: each large tensor on the CPU that a PyTorch
    operation returns in the block lies in a file without a name in `folder`, which must be on a
    drive. Values, and what random generators draw, are as without it.

    Not in files is what other threads make, what is made of memory that is there, as from lists and
    NumPy, and what an operation resizes. transformers' loading does without threads in the block.
    A tensor in a file cannot be resized, and a forked process that writes it writes its parent's. ::

        with ziggurat.torch.streamed_init("/fast/dir", dtype=torch.bfloat16):
            model = LlamaForCausalLM(config).bfloat16()
        model = ziggurat.torch.offload(model, memory="4GiB", placement="nvme")

    The drive needs room for the model as it is drawn, so for 4 bytes a parameter in fp32. `dtype`
    says to what type the block converts its fp32 model: then they are rounded to it when other
    tensors are made, and the drive needs room for that type alone. What a program reads after it was
    rounded is an error. Each file goes with its tensor, which for a parameter of an offloaded model is
    when the engine has its values.

    Errors: InvalidArgument for a folder that cannot be used, for a use of a tensor that `dtype` does
    not allow, and for a model that was not converted to it; ResourceExhausted for a full drive.
    """
    where = os.path.abspath(folder)
    try:
        tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise InvalidArgument(
            f'streamed_init("{where}"): {error.strerror}: give a directory on a drive, in which files '
            "can be made"
        ) from error
    mode = InFiles(where) if dtype is None else _Rounding(where, dtype)
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        with mode:
            yield
    finally:
        os.environ.pop(_NO_THREADS, None)
        if before is not None:
            os.environ[_NO_THREADS] = before
    if isinstance(mode, _Rounding):
        mode.require_converted()


class _Drawn:
    """The memory of a large fp32 tensor: fp32 values, or none and the rounded ones beside it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak = StorageWeakRef(tensor.untyped_storage())
        self.size_bytes = tensor.untyped_storage().nbytes()
        #: all elements in the order of the memory, when they are rounded
        self.rounded: torch.Tensor | None = None
        self.is_exact = False  #: whether rounding has changed none
        self.was_taken = False  #: whether the rounded ones are another tensor's now

    @property
    def is_gone(self) -> bool:
        return bool(self._weak.expired())

    def round(self, folder: str, dtype: torch.dtype) -> None:
        """Puts the values into a file, if the tensor is still there."""
        storage = storage_of(self._weak)
        if storage is None:
            return
        values = _elements(storage)
        self.rounded = empty_in_file(folder, torch.empty(values.shape, dtype=dtype, device="meta"))
        self.rounded.copy_(values)
        pieces = zip(values.split(_AT_ONCE), self.rounded.split(_AT_ONCE), strict=True)
        self.is_exact = all(torch.equal(one, other.float()) for one, other in pieces)
        let_pages_go(self.rounded)
        storages.swap(storage, storages.guard(self.size_bytes))
        count_freed(self.size_bytes)

    def return_to(self, tensor: torch.Tensor, overwritten: bool) -> None:
        """Gives the tensor memory again, with the values unless they are going to be overwritten."""
        memory = storages.empty(self.size_bytes)
        if not overwritten:
            _elements(memory).copy_(self.rounded)
        storages.swap(tensor.untyped_storage(), memory)
        self.rounded = None


class _Rounding(InFiles):
    """Keeps the large fp32 tensors that were used last in memory, and rounds the others."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        super().__init__(folder)
        require_for_offload()
        self._dtype = dtype
        self._drawn: dict[int, _Drawn] = {}  # by the storage's identity, what was used last at the end
        #: what each of the last operations on them had and made, which the next may use with it
        self._in_use: deque[set[int]] = deque(maxlen=_IN_USE)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        converted = self._converted(func, args, kwargs)
        if converted is not None:
            return converted
        given = list(filter(is_plain, tree_leaves((args, kwargs))))
        identities = [storages.identity(tensor) for tensor in given]
        for tensor in given:
            is_first = len(args) > 0 and tensor is args[0]
            # Another operand may be an alias, as where a model loads its own state_dict().
            is_alone = identities.count(storages.identity(tensor)) == 1
            self._use(func, tensor, may_overwrite=is_first and is_alone)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self._note_use([*given, *filter(is_plain, tree_leaves(result))])
            self._round_oldest()
        return result

    def require_converted(self) -> None:
        """Errors: InvalidArgument if there is a tensor whose fp32 values are gone."""
        if any(one.rounded is not None and not one.is_gone for one in self._drawn.values()):
            gc.collect()  # modules may have one another
        left = [one for one in self._drawn.values() if one.rounded is not None and not one.is_gone]
        if left:
            raise InvalidArgument(
                f"streamed_init(dtype={self._dtype}): {len(left)} tensors are still fp32, and their values "
                f"were rounded: call model.to({self._dtype}) within the block"
            )

    def _empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("dtype", torch.get_default_dtype()) != torch.float32:
            return super()._empty(func, args, kwargs)
        return None  # _moved() keeps what is made

    def _moved(self, made: Any, known: set[int]) -> Any:
        if not is_plain(made) or made.dtype != torch.float32 or not is_large(made):
            return super()._moved(made, known)
        if storages.identity(made) not in known and not storages.shares_memory(made):
            self._drawn[storages.identity(made)] = _Drawn(made)
        return made

    def _converted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Returns what a conversion of a rounded tensor to the block's type returns; None for all else."""
        if func is not aten._to_copy.default or kwargs.get("dtype") != self._dtype or not is_plain(args[0]):
            return None
        drawn = self._drawn.get(storages.identity(args[0]))
        if drawn is None or drawn.rounded is None:
            return None
        tensor = args[0]
        made = drawn.rounded.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if _is_whole(tensor) and kwargs.get("memory_format") in (None, torch.preserve_format):
            drawn.rounded, drawn.was_taken = None, True
            return made
        return self._moved(made.clone(memory_format=kwargs.get("memory_format")), set())

    def _use(self, func: Any, tensor: torch.Tensor, may_overwrite: bool) -> None:
        """Gives a rounded tensor its values if the operation may have them."""
        drawn = self._drawn.pop(storages.identity(tensor), None)
        if drawn is None:
            return
        self._drawn[storages.identity(tensor)] = drawn
        if func.is_view or func.overloadpacket in _SHAPES or (drawn.rounded is None and not drawn.was_taken):
            return
        overwritten = may_overwrite and func.overloadpacket in _OVERWRITES and _is_whole(tensor)
        if not overwritten and not drawn.is_exact or drawn.was_taken:
            raise InvalidArgument(
                f"streamed_init(dtype={self._dtype}): {func} uses a tensor of {tuple(tensor.shape)} whose "
                "fp32 values were rounded when others were made: leave dtype out, which takes 4 bytes a "
                "parameter on the drive"
            )
        drawn.return_to(tensor, overwritten)

    def _note_use(self, tensors: list[torch.Tensor]) -> None:
        used = {storages.identity(tensor) for tensor in tensors} & self._drawn.keys()
        if used:
            self._in_use.append(used)

    def _round_oldest(self) -> None:
        self._drawn = {key: one for key, one in self._drawn.items() if not one.is_gone}
        kept = {k: one for k, one in self._drawn.items() if one.rounded is None and not one.was_taken}
        open_bytes = sum(one.size_bytes for one in kept.values())
        for key, oldest in kept.items():
            if open_bytes <= _OPEN_BYTES:
                return
            if not any(key in used for used in self._in_use):
                open_bytes -= oldest.size_bytes
                oldest.round(self.folder, self._dtype)


def _elements(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all that is in a storage of fp32 values, in the order of the memory."""
    empty: Any = torch.empty(0, dtype=torch.float32, device="cpu")
    made: torch.Tensor = empty.set_(storage, 0, (storage.nbytes() // 4,))
    return made


def _is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor has each element of its memory once."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return not storages.shares_memory(tensor) and tensor.permute(order).is_contiguous()
