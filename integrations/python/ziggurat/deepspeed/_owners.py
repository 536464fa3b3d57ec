# SPDX-License-Identifier: Apache-2.0
"""Which optimizer has a parameter's state: for the functions that are given a parameter alone."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._optimizer import EngineOptimizer

_owners: Any = WeakTensorKeyDictionary()  # Tensor -> weakref of its optimizer


def take(optimizer: EngineOptimizer) -> None:
    """At ``initialize()``: of all its parameters."""
    this = weakref.ref(optimizer)
    for _, param, _ in optimizer._named():
        _owners[param] = this


def owner_of(param: torch.Tensor) -> EngineOptimizer | None:
    this = _owners.get(param)
    return None if this is None else this()
