# SPDX-License-Identifier: Apache-2.0
"""The type of a model's parameters, and the conversion to it."""

from __future__ import annotations

import torch

from ziggurat.deepspeed._config import Config

#: The types by their names in a configuration.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(config: Config) -> torch.dtype | None:
    """Returns the type that the configuration asks for, or None if the model keeps its own."""
    if config.bf16_enabled:
        return torch.bfloat16
    return None if config.fp16 is None else torch.float16


def cast(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Converts the parameters, which stay the same objects; buffers keep their type."""
    for param in module.parameters():
        if dtype is not None and param.dtype in DTYPES.values():
            param.data = param.data.to(dtype)
