# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine's scheduler: the script's own, or the one that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed.runtime import lr_schedules


def scheduler_of(config: Config, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Returns the scheduler, or None if neither the script nor the configuration has one. Errors:
    InvalidArgument for an unknown name."""
    if optimizer is None:
        return None
    if given is not None:
        # PyTorch's schedulers cannot be called. Like DeepSpeed, this checks whether it has a
        # step().
        return given if hasattr(given, "step") else given(optimizer)
    name = config.scheduler_name
    if name is None:
        return None
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        raise InvalidArgument(
            f'scheduler.type="{name}" is not known: give one of '
            f'{", ".join(lr_schedules.VALID_LR_SCHEDULES)}, or a class of torch.optim.lr_scheduler'
        )
    try:
        return kind(optimizer, **config.scheduler_params)
    except TypeError as error:
        raise InvalidArgument(f"scheduler.params of {name}: {error}") from error
