# SPDX-License-Identifier: Apache-2.0
"""What hooks of saved tensors do with those that they leave alone: what PyTorch does without hooks."""

from __future__ import annotations

import torch


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keeps what PyTorch keeps without hooks. A node that has its own output through Python would never
    be freed."""
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def unchanged(its: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Checks what PyTorch checks without hooks."""
    tensor, version = its
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor
