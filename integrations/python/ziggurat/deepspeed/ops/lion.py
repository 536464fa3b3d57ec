# SPDX-License-Identifier: Apache-2.0
"""Lion with DeepSpeed's constructors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ziggurat.torch
from ziggurat.deepspeed.ops._stand_in import StandIn, state_format

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class DeepSpeedCPULion(StandIn, ziggurat.torch.Lion):
    """Lion, with DeepSpeed's second beta of 0.999."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        held = state_format(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay, state_format=held)


class FusedLion(StandIn, ziggurat.torch.Lion):
    """Lion, with DeepSpeed's second beta of 0.999."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self._set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)
