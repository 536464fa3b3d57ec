# SPDX-License-Identifier: Apache-2.0
"""Adagrad with DeepSpeed's constructor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ziggurat.torch
from ziggurat.deepspeed.ops._stand_in import StandIn, need_off, state_format

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(StandIn, ziggurat.torch.Adagrad):
    """Adagrad."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        need_off(amsgrad)
        held = state_format(fp32_optimizer_states)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps, state_format=held)
