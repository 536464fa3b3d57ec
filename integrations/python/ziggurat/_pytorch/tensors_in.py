# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors that a module is called with, or returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's arguments or result, which may contain itself."""
    found: list[torch.Tensor] = []
    left: list[Any] = [value]
    seen: dict[int, Any] = {}  # by id, and kept, so that no other object gets the id
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple, dict)) or hasattr(one, "__dataclass_fields__"):
            if id(one) not in seen:
                seen[id(one)] = one
                left.extend(_elements(one))
    return found


def _elements(one: Any) -> Iterable[Any]:
    if isinstance(one, (list, tuple)):
        return one
    if isinstance(one, dict):
        return one.values()
    return [getattr(one, name, None) for name in one.__dataclass_fields__]
