# SPDX-License-Identifier: Apache-2.0
"""Offers what scripts import from ``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ziggurat.deepspeed._data import RepeatingLoader
from ziggurat.deepspeed._log import log_dist, logger
from ziggurat.deepspeed._state_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
]


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Returns the modules of these classes. It has no other effect, because nothing is gathered
    module by module."""
    names = {kind for kind in leaf_module_classes if isinstance(kind, str)}
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds) or type(module).__name__ in names
    ]


unset_z3_leaf_modules = set_z3_leaf_modules
