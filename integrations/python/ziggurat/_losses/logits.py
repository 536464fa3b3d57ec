# SPDX-License-Identifier: Apache-2.0
"""How the losses that build no logits compute the logits of some tokens and words at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class How(NamedTuple):
    """How the loss is computed."""

    chunk: int  #: tokens at a time
    dtype: torch.dtype  #: of the products
    logit_scale: float
    softcap: float | None
    trains: bool

    @property
    def wide(self) -> torch.dtype:
        """Returns the type of softmax and of sums."""
        return torch.promote_types(self.dtype, torch.float32)


def change(logits: torch.Tensor, how: How, trains: bool) -> torch.Tensor | None:
    """Scales and limits the logits, in place. Returns what undo_change() needs if it `trains`."""
    slope = None
    if how.softcap is not None:
        logits.mul_(how.logit_scale / how.softcap).tanh_()
        slope = logits.square().neg_().add_(1) if trains else None
        logits.mul_(how.softcap)
    elif how.logit_scale != 1:
        logits.mul_(how.logit_scale)
    return slope


def undo_change(gradients: torch.Tensor, how: How, slope: torch.Tensor | None) -> None:
    """Makes the gradients of what change() was given, in place, of those of what it has made."""
    if slope is not None:
        gradients.mul_(slope)
    if how.logit_scale != 1:
        gradients.mul_(how.logit_scale)
