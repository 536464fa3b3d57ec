# SPDX-License-Identifier: Apache-2.0
"""The factor of the loss that keeps fp16 gradients from vanishing, by DeepSpeed's rules."""

from __future__ import annotations

from typing import Any

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed._config import Config

_FACTOR = 2.0


class LossScale:
    """A fixed scale: 1 with fp32 and bf16, or ``fp16.loss_scale`` if that is given."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    def update(self, overflow: bool) -> None:
        """Called after each step; a step whose gradients had an `overflow` was left out."""

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key.startswith("cur_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({key: state[key] for key in self.state_dict() if key in state})


class DynamicLossScale(LossScale):
    """A scale that overflows halve, and that doubles after `window` steps without an overflow.

    The first ``hysteresis - 1`` overflows have no effect. The number of overflows that are left is
    reset when the scale grows, or with `consecutive_hysteresis` when a step has no overflow.
    """

    dynamic = True

    def __init__(
        self,
        scale: float,
        window: int,
        minimum: float,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        ends_at_minimum: bool = True,
    ) -> None:
        super().__init__(scale)
        self._window, self._minimum = window, minimum
        self._hysteresis, self._consecutive = hysteresis, consecutive_hysteresis
        self._ends_at_minimum = ends_at_minimum
        self.cur_iter = 0
        self.cur_overflow_iter = -1  #: the step of the newest overflow
        self.cur_hysteresis = hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self._overflowed()
        else:
            if self._consecutive:
                self.cur_hysteresis = self._hysteresis
            stable = self.cur_iter - self.cur_overflow_iter - 1
            if stable > 0 and stable % self._window == 0:
                self.cur_hysteresis = self._hysteresis
                self.cur_scale *= _FACTOR
        self.cur_iter += 1

    def _overflowed(self) -> None:
        self.cur_overflow_iter = self.cur_iter
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self._minimum and self._ends_at_minimum:
            raise InvalidArgument(
                f"fp16: gradients overflow though the loss scale is at min_loss_scale="
                f"{self._minimum:g}: the loss may be infinite; train with bf16, or lower "
                "fp16.min_loss_scale or the learning rate"
            )
        self.cur_scale = max(self.cur_scale / _FACTOR, self._minimum)


def loss_scale_of(config: Config) -> LossScale:
    fp16 = config.fp16
    if fp16 is None:
        return LossScale()
    if fp16.loss_scale:
        return LossScale(float(fp16.loss_scale))
    # Without ZeRO, DeepSpeed has no hysteresis and stays at the smallest scale.
    zero = config.zero_stage > 0
    return DynamicLossScale(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        float(fp16.min_loss_scale),
        fp16.hysteresis if zero else 1,
        fp16.consecutive_hysteresis and zero,
        ends_at_minimum=zero,
    )
