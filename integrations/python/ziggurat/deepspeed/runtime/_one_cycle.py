# SPDX-License-Identifier: Apache-2.0
"""The 1cycle schedule (Smith 2018, arXiv 1803.09820) with DeepSpeed's arguments and curve."""

from __future__ import annotations

import math
from typing import Any

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed.runtime._schedule import Rate, Schedule

_BETA2 = 0.99  # DeepSpeed sets beta2 with the momentum, whatever the optimizer was given


class OneCycle(Schedule):
    """Raises the rate in the first half of a cycle and lowers it in the second; the momentum
    (beta1) moves the other way. After the cycle both decay with every `decay_step_size` iterations,
    or not at all if that is 0.

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
            cycle_first_stair_count,
            cycle_first_stair_count if stairs is None else stairs,
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
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momenta(self.min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        self._set_momenta(self._momenta())

    def get_lr(self) -> list[float]:
        height, decays = self._place()
        lower = 1 + self._decay_lr_rate * decays
        return [
            (low + (high - low) * height) / lower
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the betas of every group, or None if momenta are left alone."""
        return [(mom, _BETA2) for mom in self._momenta()] if self.cycle_momentum else None

    def _momenta(self) -> list[float]:
        height, decays = self._place()
        higher = 1 + self._decay_mom_rate * decays
        return [
            (high - (high - low) * height) * higher
            for low, high in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def _set_momenta(self, momenta: list[float]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, _BETA2)

    def _place(self) -> tuple[float, float]:
        """Returns the height in the cycle, 0 at its ends and 1 at the peak, and the number of
        decays after it."""
        total, done = self._first + self._second, self.last_batch_iteration + 1
        if self.last_batch_iteration >= total:
            intervals = done - total
            return 0.0, intervals / self._decay_step_size if self._decay_step_size else 0.0
        return self._height(done, total), 0.0

    def _height(self, done: int, total: float) -> float:
        # The order of the divisions matters: another order rounds a boundary to the other half.
        peak = self._first / total
        x = 1.0 + done / total - math.floor(1 + done / total)
        rising = x <= peak
        stairs = self._stairs[0 if rising else 1]
        if not stairs:
            return x / peak if rising else (x - 1) / (peak - 1)
        # Whole numbers find the stair, because the quotient may lie just below it.
        within = done % total
        if within <= self._first:
            return math.floor(within * stairs / self._first) / stairs
        return math.floor((total - within) * stairs / self._second) / stairs
