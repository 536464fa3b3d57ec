# SPDX-License-Identifier: Apache-2.0
"""Schedules with DeepSpeed's names, arguments and curves.

Each sets the rates of an optimizer's groups when it is made, and at each ``step()``. Rates and
momenta may be lists, with one for each group.
"""

from __future__ import annotations

from typing import Any

from ziggurat._library.abi import InvalidArgument
from ziggurat.deepspeed._log import say
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
        self._begin()

    def _curve(self, group: int) -> dict[str, Any]:
        return {
            "type": "LRRangeTest",
            "lr_range_test_min_lr": self.min_lr[group],
            "lr_range_test_step_size": self.step_size,
            "lr_range_test_step_rate": self.step_rate,
            "lr_range_test_staircase": bool(self.staircase),
        }


class OneCycle(Schedule):
    """Raises the rate in the first half of a cycle and lowers it in the second; the momentum
    (beta1) moves the other way (Smith 2018, arXiv 1803.09820). After the cycle both decay with every
    `decay_step_size` iterations, or not at all if that is 0.

    A stair count divides a half into that many flat steps.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_second_step_size
        self._first = float(cycle_first_step_size)
        self._second = self._first if second is None else float(second)
        if self._first <= 0 or self._second < 0:
            raise InvalidArgument(
                f"cycle_first_step_size={cycle_first_step_size}, cycle_second_step_size={second}: "
                "give at least 1 for the first and 0 for the second"
            )
        stairs = cycle_second_stair_count
        self._stairs = (
            int(cycle_first_stair_count),
            int(cycle_first_stair_count if stairs is None else stairs),
        )
        self._decay_step_size = decay_step_size
        self._decay_lr_rate, self._decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self.for_each_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self.for_each_group("cycle_max_lr", cycle_max_lr)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            say(f"OneCycle: cycle_momentum has no effect, because {name} has no betas")
        self.min_moms = self.for_each_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self.for_each_group("cycle_max_mom", cycle_max_mom)
        self._begin()

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the betas of every group, or None if momenta are left alone."""
        if not self.cycle_momentum:
            return None
        betas = [(its.beta1, its.beta2) for its in self._scheduled()]
        if self.last_batch_iteration < 0:  # DeepSpeed begins with the least, but tells the most
            betas = [(most, beta2) for most, (_, beta2) in zip(self.max_moms, betas, strict=True)]
        return betas

    def _set(self) -> None:
        super()._set()
        if self.cycle_momentum:
            for group, its in zip(self.optimizer.param_groups, self._scheduled(), strict=True):
                group["betas"] = (its.beta1, its.beta2)

    def _curve(self, group: int) -> dict[str, Any]:
        return {
            "type": "OneCycle",
            "cycle_min_lr": self.min_lrs[group],
            "cycle_max_lr": self.max_lrs[group],
            "decay_lr_rate": self._decay_lr_rate,
            "cycle_first_step_size": self._first,
            "cycle_second_step_size": self._second,
            "cycle_first_stair_count": self._stairs[0],
            "cycle_second_stair_count": self._stairs[1],
            "decay_step_size": self._decay_step_size,
            "cycle_momentum": self.cycle_momentum,
            "cycle_min_mom": self.min_moms[group],
            "cycle_max_mom": self.max_moms[group],
            "decay_mom_rate": self._decay_mom_rate,
        }


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

    def _rise(self) -> dict[str, Any]:
        return {"warmup_num_steps": self.warmup_num_steps, "warmup_type": self.warmup_type}


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
        self._begin()

    def _curve(self, group: int) -> dict[str, Any]:
        bounds = {"warmup_min_lr": self.min_lrs[group], "warmup_max_lr": self.max_lrs[group]}
        return {"type": "WarmupLR", **bounds, **self._rise()}


class WarmupDecayLR(WarmupLR):
    """Raises the rate as WarmupLR does, then lowers it linearly to `warmup_min_lr`
    at `total_num_steps`."""

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

    def _curve(self, group: int) -> dict[str, Any]:
        return {**super()._curve(group), "type": "WarmupDecayLR", "total_num_steps": self.total_num_steps}


class WarmupCosineLR(_Warmup):
    """Multiplies each group's rate: by a rise from `warmup_min_ratio`, then by a cosine to
    `cos_min_ratio`."""

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
        self._begin()

    def get_lr_ratio(self) -> float:
        return float(self._at(self._curve_of(1.0)).learning_rate)

    def _curve(self, group: int) -> dict[str, Any]:
        return self._curve_of(self.org_lrs[group])

    def _curve_of(self, rate: float) -> dict[str, Any]:
        return {
            "type": "WarmupCosineLR",
            "lr": rate,
            "warmup_min_ratio": self.warmup_min_ratio,
            "cos_min_ratio": self.cos_min_ratio,
            "total_num_steps": self.total_num_steps,
            **self._rise(),
        }
