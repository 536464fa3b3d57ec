# SPDX-License-Identifier: Apache-2.0
"""Handles all gradients of a step together: their norm, and the factor that clips and unscales
them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def norm_of(params: Iterable[torch.Tensor]) -> float:
    """Returns the 2-norm of all gradients, in fp32; infinite or NaN if one of their elements is."""
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return 0.0
    # Takes all gradients at once, because it is a single exchange if they are divided among ranks.
    norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    return float(torch.linalg.vector_norm(together))


def factor_of(norm: float, clipping: float, scale: float) -> float:
    """Returns the factor for gradients whose norm, without the loss's `scale`, is `norm`."""
    # DeepSpeed adds the small number, so a norm that equals the limit is clipped by a millionth.
    is_clipped = clipping > 0 and math.isfinite(norm)
    excess = (norm + 1e-6) / clipping if is_clipped else 1.0
    return 1.0 / (scale * max(excess, 1.0))


def multiply(params: Iterable[torch.Tensor], factor: float) -> None:
    """Records the factor with each gradient; writes no gradient."""
    if factor == 1.0:
        return
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)
