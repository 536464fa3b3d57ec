# SPDX-License-Identifier: Apache-2.0
"""Hooks that keep some of the tensors that autograd saves, and leave the others to the hooks around, or to what
PyTorch does without hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ziggurat._pytorch.spans import bytes_in, span_of
from ziggurat._pytorch.torch_private import (
    has_storage,
    in_functional_transform,
    in_python_function,
    keeps_graph,
    may_be_output,
    read_as,
    saved_tensors_hooks,
    uses_of,
    without_modes,
)

__all__ = ["InMemory", "Kept", "saving"]


class Kept(Protocol):
    """What is kept of a saved tensor."""

    def tensor(self) -> torch.Tensor: ...


class InMemory:
    """A saved tensor where PyTorch has it, with what PyTorch checks without hooks."""

    def __init__(self, tensor: torch.Tensor, others: int = 0) -> None:
        """`others`: how many tensors of the keeper have the same storage."""
        self._tensor = tensor
        if may_be_output(tensor):  # and its node would never be freed
            with without_modes():
                self._tensor = tensor.detach()
        self._version, self._uses = tensor._version, others + 2  # the tensor's, and of who asks

    def tensor(self) -> torch.Tensor:
        tensor, version = self._tensor, self._version
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {version} instead"
            )
        return self._copy() if in_python_function() and self._is_shared() else tensor

    def _is_shared(self) -> bool:
        """Returns whether somebody else has the memory. PyTorch gives a Function another tensor of it, and does not know
        that: if that is returned as the gradient of a leaf, others are added to it where it is."""
        tensor = self._tensor
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or not has_storage(tensor):
            return False
        if tensor.is_quantized:  # and so no gradient
            return False
        return tensor.numel() > 0 and (keeps_graph() or uses_of(tensor.untyped_storage()) > self._uses)

    def _copy(self) -> torch.Tensor:
        """Returns a tensor of the same elements, with strides as they are."""
        tensor = self._tensor
        with without_modes():
            its = bytes_in(tensor, span_of(tensor)).clone()
            copy: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return read_as(tensor, copy.set_(its.untyped_storage(), 0, tensor.shape, tensor.stride()))


class _Other(NamedTuple):
    """What the hooks around have made of a tensor that is left to them, or InMemory."""

    packed: Any


@contextlib.contextmanager
def saving(keep: Callable[[torch.Tensor], Kept | None]) -> Iterator[None]:
    """Lets `keep` decide about each tensor that the block's graph saves. None leaves it alone."""
    if in_functional_transform():  # it takes no hooks
        yield
        return
    around = saved_tensors_hooks()
    pack, unpack = around if around is not None else (InMemory, InMemory.tensor)

    def packed(tensor: torch.Tensor) -> Any:
        its = keep(tensor)
        return _Other(pack(tensor)) if its is None else its

    def unpacked(saved: Any) -> torch.Tensor:
        its: torch.Tensor = unpack(saved.packed) if isinstance(saved, _Other) else saved.tensor()
        return its

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        yield
