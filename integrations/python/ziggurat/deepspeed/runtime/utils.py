# SPDX-License-Identifier: Apache-2.0
"""Helpers that scripts import from ``deepspeed.runtime.utils``."""

from __future__ import annotations

from ziggurat._memory.memory import free_bytes, size_text
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed.accelerator import get_accelerator

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints `message` and how much memory of device and host is used, if `force` is set."""
    if not force:
        return
    accelerator = get_accelerator()
    used = size_text(accelerator.memory_allocated())
    most = size_text(accelerator.max_memory_allocated())
    free = size_text(free_bytes())
    say(f"{message}: the device uses {used} and has used at most {most}; the host has {free} free")
