# SPDX-License-Identifier: Apache-2.0
"""Offers PyTorch's activation checkpointing under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from ziggurat.deepspeed._log import say

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_state = {"configured": False}


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, which backward computes again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: Any, deepspeed_config: Any = None, **settings: Any) -> None:
    """Accepts settings of where activations are kept, without effect: PyTorch keeps them on the
    device."""
    given = [name for name, value in settings.items() if value]
    if given:
        say(
            f"checkpointing.configure() ignores {', '.join(given)}, because PyTorch keeps "
            "activations on the device"
        )
    _state["configured"] = True


def is_configured() -> bool:
    return _state["configured"]


def reset() -> None:
    """Does nothing, because nothing is kept between two steps."""
