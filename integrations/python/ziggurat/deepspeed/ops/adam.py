# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW with DeepSpeed's constructors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ziggurat.torch
from ziggurat.deepspeed.ops._stand_in import StandIn, need_off, state_format

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(StandIn, ziggurat.torch.AdamW):
    """AdamW, or Adam with ``adamw_mode=False``. No weight decay unless it is given."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        need_off(amsgrad, bias_correction)
        self._kind = "adamw" if adamw_mode else "adam"
        self.adam_w_mode = adamw_mode
        held = state_format(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, eps, weight_decay, state_format=held)


class FusedAdam(StandIn, ziggurat.torch.AdamW):
    """AdamW, or Adam with ``adam_w_mode=False``. No weight decay unless it is given."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        need_off(amsgrad, bias_correction)
        self._kind = "adamw" if adam_w_mode else "adam"
        self.adam_w_mode = adam_w_mode
        self._set_grad_none = set_grad_none
        super().__init__(params, lr, betas, eps, weight_decay)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)
