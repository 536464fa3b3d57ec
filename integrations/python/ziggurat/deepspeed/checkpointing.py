# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: PyTorch's, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from ziggurat.deepspeed._log import say

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_state = {"configured": False}


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, computed again in backward."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: Any, deepspeed_config: Any = None, **settings: Any) -> None:
    """Settings of where activations are kept change nothing: PyTorch keeps them on the device."""
    given = [name for name, value in settings.items() if value]
    if given:
        say(f"checkpointing.configure(): {', '.join(given)} change nothing here")
    _state["configured"] = True


def is_configured() -> bool:
    return _state["configured"]


def reset() -> None:
    """Nothing is kept between two steps."""
