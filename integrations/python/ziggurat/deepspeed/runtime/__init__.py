# SPDX-License-Identifier: Apache-2.0
"""Modules that scripts import from ``deepspeed.runtime``."""

from ziggurat.deepspeed.runtime import dataloader, lr_schedules, utils, zero

__all__ = ["dataloader", "lr_schedules", "utils", "zero"]
