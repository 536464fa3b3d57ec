# SPDX-License-Identifier: Apache-2.0
"""Tells which bytes of its storage a tensor covers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Span", "bytes_in", "is_spread", "span_of"]


class Span(NamedTuple):
    """Bytes of a storage."""

    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    def covers(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def span_of(tensor: torch.Tensor) -> Span:
    """Returns the bytes from the first element to the last one, of which there is at least one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return Span(begin * tensor.element_size(), (begin + last + 1) * tensor.element_size())


def is_spread(tensor: torch.Tensor) -> bool:
    """Returns whether other elements lie between those of the tensor, of which no two lie at one place."""
    end = 1  # of the elements along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end += (size - 1) * stride
    return end > tensor.numel()


def bytes_in(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Returns those bytes of the tensor's storage, where they are."""
    made: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    its: torch.Tensor = made.set_(tensor.untyped_storage(), span.begin, (span.size_bytes,))
    return its
