# SPDX-License-Identifier: Apache-2.0
"""Finds the optimizer that has a parameter's state, for functions that get a parameter alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._optimizer.optimizer import EngineOptimizer

_owners: Any = WeakTensorKeyDictionary()  # Tensor -> weakref of its optimizer


def take(optimizer: EngineOptimizer) -> None:
    """Records at ``initialize()`` that `optimizer` has all its parameters."""
    this = weakref.ref(optimizer)
    for _, param, _ in optimizer._named():
        _owners[param] = this


def owner_of(param: torch.Tensor) -> EngineOptimizer | None:
    this = _owners.get(param)
    return None if this is None else this()
