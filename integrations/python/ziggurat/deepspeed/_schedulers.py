# SPDX-License-Identifier: Apache-2.0
"""The engine's scheduler: the script's own, or the one that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed.runtime import lr_schedules


def scheduler_of(config: Config, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """None where neither has one. Errors: InvalidArgument for a name that nobody knows."""
    if optimizer is None:
        return None
    if given is not None:
        # A scheduler of PyTorch's is no function; DeepSpeed's test, and ours, is whether it steps.
        return given if hasattr(given, "step") else given(optimizer)
    name = config.scheduler_name
    if name is None:
        return None
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        raise InvalidArgument(
            f'scheduler.type="{name}" is not known: {", ".join(lr_schedules.VALID_LR_SCHEDULES)} '
            "are, and those of torch.optim.lr_scheduler"
        )
    try:
        return kind(optimizer, **config.scheduler_params)
    except TypeError as error:
        raise InvalidArgument(f"scheduler.params of {name}: {error}") from error
