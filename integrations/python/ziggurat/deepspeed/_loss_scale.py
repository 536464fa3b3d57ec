# SPDX-License-Identifier: Apache-2.0
"""The factor of the loss that keeps fp16 gradients from vanishing, by DeepSpeed's rules."""

from __future__ import annotations

import json
from typing import Any

from ziggurat._library.abi import InvalidArgument, NotFinite, call, sized
from ziggurat.deepspeed._config import Config


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
    """A scale that overflows halve, and that doubles after `window` steps without an overflow, as the
    engine says (optimizer/loss_scale.h). Its state has DeepSpeed's names."""

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
        settings = {
            "loss_scale_window": window,
            "hysteresis": hysteresis,
            "consecutive_hysteresis": consecutive_hysteresis,
            "min_loss_scale": minimum,
            "ends_at_minimum": ends_at_minimum,
        }
        self._settings = json.dumps(settings).encode()
        self.cur_iter = 0
        self.cur_overflow_iter = -1  #: the step of the newest overflow
        self.cur_hysteresis = hysteresis

    def update(self, overflow: bool) -> None:
        its = sized(
            "ziggurat_loss_scale",
            scale=self.cur_scale,
            hysteresis_left=self.cur_hysteresis,
            steps_since_overflow=self.cur_iter - self.cur_overflow_iter - 1,
        )
        try:
            call("ziggurat_update_loss_scale", self._settings, overflow, its)
        except NotFinite as error:  # which would tell the caller to skip the step, as it was
            raise InvalidArgument(f"fp16: {error}, or train with bf16") from error
        self.cur_scale, self.cur_hysteresis = its.scale, its.hysteresis_left
        if overflow:
            self.cur_overflow_iter = self.cur_iter
        self.cur_iter += 1


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
        max(1, fp16.hysteresis) if zero else 1,
        fp16.consecutive_hysteresis and zero,
        ends_at_minimum=zero,
    )
