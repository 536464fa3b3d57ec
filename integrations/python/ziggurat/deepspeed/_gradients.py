# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step as a whole: their norm, and the factor that clips and unscales them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def norm_of(params: Iterable[torch.Tensor]) -> float:
    """The 2-norm of all gradients, in fp32; infinite or NaN where one of their elements is."""
    norms = [
        torch.linalg.vector_norm(param.grad, dtype=torch.float32)
        for param in params
        if param.grad is not None
    ]
    if not norms:
        return 0.0
    return float(
        torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    )


def factor_of(norm: float, clipping: float, scale: float) -> float:
    """What the gradients are multiplied by, whose norm without the loss's `scale` is `norm`."""
    # The small number is DeepSpeed's: a norm that equals the limit is clipped by a millionth.
    excess = (norm + 1e-6) / clipping if clipping > 0 else 1.0
    return 1.0 / (scale * max(excess, 1.0))


def multiply(params: Iterable[torch.Tensor], factor: float) -> None:
    """Recorded with each gradient: none is written."""
    if factor == 1.0:
        return
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)
