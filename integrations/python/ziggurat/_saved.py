# SPDX-License-Identifier: Apache-2.0
"""Hooks that keep some of the tensors that autograd saves, and leave the others to the hooks around, or to what
PyTorch does without hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ziggurat._torch_private import in_functional_transform, saved_tensors_hooks

__all__ = ["Kept", "saving"]


class Kept(Protocol):
    """What is kept of a saved tensor."""

    def tensor(self) -> torch.Tensor: ...


class _Other(NamedTuple):
    """What the hooks around have made of a tensor that is left to them, or _kept()."""

    packed: Any


@contextlib.contextmanager
def saving(keep: Callable[[torch.Tensor], Kept | None]) -> Iterator[None]:
    """Lets `keep` decide about each tensor that the block's graph saves. None leaves it alone."""
    if in_functional_transform():  # it takes no hooks
        yield
        return
    around = saved_tensors_hooks()
    pack, unpack = around if around is not None else (_kept, _unchanged)

    def packed(tensor: torch.Tensor) -> Any:
        its = keep(tensor)
        return _Other(pack(tensor)) if its is None else its

    def unpacked(saved: Any) -> torch.Tensor:
        its: torch.Tensor = unpack(saved.packed) if isinstance(saved, _Other) else saved.tensor()
        return its

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        yield


def _kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keeps what PyTorch keeps without hooks. A node that has its own output through Python would never
    be freed."""
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def _unchanged(its: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Checks what PyTorch checks without hooks."""
    tensor, version = its
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor
