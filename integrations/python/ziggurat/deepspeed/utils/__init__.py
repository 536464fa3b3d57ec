# SPDX-License-Identifier: Apache-2.0
"""Offers what scripts import from ``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed import _stage3_units
from ziggurat.deepspeed._data import RepeatingLoader
from ziggurat.deepspeed._log import log_dist, logger
from ziggurat.deepspeed._state_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Makes the modules of these classes, or of classes of these names, leaf modules and returns
    them: in stage 3 each is one unit, with all modules in it. Call it before ``initialize()``.
    Errors: InvalidArgument if there is none."""
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Undoes ``set_z3_leaf_modules()``, before ``initialize()``, and returns the modules."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Returns whether the module is a leaf module."""
    return _stage3_units.is_leaf(model)


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Makes this one module a leaf module, or none."""
    _stage3_units.set_leaf(model, flag)


def _set(
    model: torch.nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    found = _stage3_units.of_classes(model, classes)
    if not found and raise_if_not_found:
        raise InvalidArgument(
            f"leaf_module_classes={list(classes)}: the model has no module of these classes: give others, "
            "or raise_if_not_found=False"
        )
    for module in found:
        _stage3_units.set_leaf(module, flag)
    return found
