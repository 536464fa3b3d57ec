# SPDX-License-Identifier: Apache-2.0
"""Schedules with DeepSpeed's names, arguments and curves.

Each sets the rates of an optimizer's groups when it is made, and at each ``step()``. Rates and
momenta may be lists, with one for each group.
"""

from __future__ import annotations

import math
from typing import Any

from ziggurat.deepspeed._log import say
from ziggurat.deepspeed.runtime._one_cycle import OneCycle
from ziggurat.deepspeed.runtime._schedule import Rate, Schedule, positive

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class LRRangeTest(Schedule):
    """Raises the rate from `lr_range_test_min_lr` on, to find where training diverges."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self.for_each_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]


class _Warmup(Schedule):
    """Raises the rate over `warmup_num_steps` iterations, logarithmically or linearly."""

    def __init__(
        self,
        optimizer: Any,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
        total_num_steps: int | None = None,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = max(2, positive("warmup_num_steps", warmup_num_steps))
        if warmup_type not in ("log", "linear"):
            say(f'warmup_type="{warmup_type}" is not known, so "log" is used; the other type is '
                f'"linear"')
            warmup_type = "log"
        self.warmup_type = warmup_type
        self.total_num_steps = total_num_steps
        if total_num_steps is not None and total_num_steps < self.warmup_num_steps:
            say(
                f"the schedule ends before its warm-up: total_num_steps={total_num_steps} is less "
                f"than warmup_num_steps={self.warmup_num_steps}"
            )

    def _risen(self) -> float:
        """Returns how far the rise has come, from 0 to 1."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        return math.log(self.last_batch_iteration + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr`, where it stays. None takes each
    group's own rate."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        total_num_steps: int | None = None,
    ) -> None:
        super().__init__(
            optimizer, warmup_num_steps, warmup_type, last_batch_iteration, total_num_steps
        )
        highest = self.get_last_lr() if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self.for_each_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self.for_each_group("warmup_max_lr", highest)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        share = self._share()
        bounds = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * share for low, high in bounds]

    def _share(self) -> float:
        return self._risen()


class WarmupDecayLR(WarmupLR):
    """Raises the rate as WarmupLR does, then lowers it linearly to `warmup_min_lr`
    at `total_num_steps`."""

    total_num_steps: int

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
            total_num_steps,
        )

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._risen()
        falls = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / falls)


class WarmupCosineLR(_Warmup):
    """Multiplies each group's rate: by a rise from `warmup_min_ratio`, then by a cosine to
    `cos_min_ratio`."""

    total_num_steps: int

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(
            optimizer, warmup_num_steps, warmup_type, last_batch_iteration, total_num_steps
        )
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = self.get_last_lr()
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr_ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._risen()
        # DeepSpeed counts one iteration more after the rise.
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]
