# SPDX-License-Identifier: Apache-2.0
"""The type of a model's parameters, and what is brought to it."""

from __future__ import annotations

import torch

from ziggurat.deepspeed._config import Config

#: By the names in a configuration.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(config: Config) -> torch.dtype | None:
    """None where the model keeps its own."""
    if config.bf16_enabled:
        return torch.bfloat16
    return None if config.fp16 is None else torch.float16


def cast(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Parameters, which stay the same objects; buffers keep their type."""
    for param in module.parameters():
        if dtype is not None and param.dtype in DTYPES.values():
            param.data = param.data.to(dtype)
