# SPDX-License-Identifier: Apache-2.0
"""The base of the optimizers under DeepSpeed's names.

Used alone, they are ziggurat.torch's optimizers with state in host memory. ``initialize()``
replaces them by one whose state is where the configuration says.
"""

from __future__ import annotations

from ziggurat._library.native import Unimplemented
from ziggurat._optimizer.optimizer import EngineOptimizer


class StandIn(EngineOptimizer):
    """An optimizer that ``initialize()`` replaces."""


def state_format(fp32_optimizer_states: bool) -> str:
    """Returns the state's format. If False, DeepSpeed keeps the moments in the parameters' 16
    bits."""
    return "fp32" if fp32_optimizer_states else "bf16-moments"


def need_off(amsgrad: bool, bias_correction: bool = True) -> None:
    if amsgrad:
        raise Unimplemented("amsgrad=True is not supported yet: leave it False")
    if not bias_correction:
        raise Unimplemented("bias_correction=False is not supported yet: leave it True")
