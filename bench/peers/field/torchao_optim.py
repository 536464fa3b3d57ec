# SPDX-License-Identifier: Apache-2.0
"""The reports' scripts with torchao's AdamW8bit.

AdamW8bit keeps moments in 8 bits only for a tensor of 4,096 numbers or more that is made of whole
blocks of 256. Only the script of report 12 has such a tensor. All other moments have the
parameter's own type.

These optimizers save through the state dicts of model and optimizer, so PyTorch's column tells
what becomes of a model's names, ties and files. torchao's CPUOffloadOptimizer is for parameters on
an accelerator.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from field.jobs import DECAY, GROUPS, LAYOUTS
from field.scripts import (
    DTYPES,
    Script,
    as_by_formula,
    compiled_step,
    empty_sparse,
    every_size,
    loaded_late,
    other_order,
    small_decays,
)
from torchao.optim import AdamW8bit


def adamw(params: Any, **settings: Any) -> AdamW8bit:
    return AdamW8bit(params, **({"lr": 1e-2, "weight_decay": DECAY} | settings))


# few sizes, because torchao compiles its step for each size
SOME_SIZES = [7, 16, 33, 1000, 1024, 1025]
ROUNDED = {"to nearest": False, "bf16_stochastic_round": True}
CELLS: dict[str, dict[str, Script]] = {
    "1": {"": partial(as_by_formula, adamw, "1")},
    "2": {what: partial(as_by_formula, adamw, "2", what=what) for what in GROUPS},
    "4": {kind: partial(every_size, adamw, kind, sizes=SOME_SIZES) for kind in DTYPES},
    "6": {f"after {n} steps": partial(loaded_late, adamw, n) for n in (0, 1)},
    "7": {"": partial(other_order, adamw)},
    "11": {f"norm {n:g}": partial(as_by_formula, adamw, "11", norm=n) for n in (2, 1, math.inf)},
    "12": {
        way: partial(small_decays, partial(adamw, bf16_stochastic_round=random))
        for way, random in ROUNDED.items()
    },
    "13": {what: partial(as_by_formula, adamw, "13", what=what) for what in LAYOUTS},
    "14": {"": partial(as_by_formula, adamw, "14")},
    "sparse": {"": partial(empty_sparse, adamw)},
    "compiled": {"": partial(compiled_step, adamw)},
}
SAVED_BY_TORCH = "PyTorch saves the model"
NOT_RUN = {
    "5": SAVED_BY_TORCH,
    "8": SAVED_BY_TORCH,
    "9": SAVED_BY_TORCH,
    "10": "torchao has nothing to do with loaders",
}
