# SPDX-License-Identifier: Apache-2.0
"""Ziggurat: training state on host memory or NVMe, updated on the CPU.

``ziggurat.torch`` has optimizers for PyTorch, and ``ziggurat.hf`` puts them into Hugging Face's
Trainer. This package imports neither PyTorch nor the engine's
library; the first engine loads it.
"""

from ziggurat._library.native import (
    DataLoss,
    Engine,
    Exchange,
    GroupStep,
    InvalidArgument,
    NotFinite,
    Param,
    Ranks,
    ResourceExhausted,
    Runtime,
    Ticket,
    Unavailable,
    Unimplemented,
    ZigguratError,
    version,
)

__all__ = [
    "DataLoss",
    "Engine",
    "Exchange",
    "GroupStep",
    "InvalidArgument",
    "NotFinite",
    "Param",
    "Ranks",
    "ResourceExhausted",
    "Runtime",
    "Ticket",
    "Unavailable",
    "Unimplemented",
    "ZigguratError",
    "version",
]
