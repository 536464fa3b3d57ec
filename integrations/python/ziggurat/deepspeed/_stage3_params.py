# SPDX-License-Identifier: Apache-2.0
"""Gives streamed parameters the attributes that scripts for ZeRO stage 3 read.

Scripts take a parameter with ``ds_id`` for one to gather before they read it, and count elements by
``ds_numel``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from enum import Enum

import torch

from ziggurat._streaming.streaming import streaming_of

_numbers = itertools.count()
_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status")


class ZeroParamStatus(Enum):
    """Tells whether a parameter has to be gathered, with DeepSpeed's names and numbers.

    A streamed parameter is AVAILABLE within ``GatheredParameters()`` and NOT_AVAILABLE elsewhere, also
    while a forward has it or before the first one moves it, because only that block promises it.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(params: Iterable[torch.Tensor]) -> None:
    """Gives the attributes to those of `params` that are streamed."""
    for param in params:
        if streaming_of(param) is not None:
            values = (next(_numbers), param.shape, param.numel(), ZeroParamStatus.NOT_AVAILABLE)
            for name, value in zip(_NAMES, values, strict=True):
                setattr(param, name, value)


def unmark(params: Iterable[torch.Tensor]) -> None:
    """Removes the attributes, because the parameters are whole again."""
    for param in params:
        for name in _NAMES:
            param.__dict__.pop(name, None)


@contextlib.contextmanager
def available(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lets the status of `params` say within the block that they are there."""
    away = ZeroParamStatus.NOT_AVAILABLE
    # A block within another one leaves the status to the outer block.
    changed = [param for param in params if getattr(param, "ds_status", None) is away]
    for param in changed:
        param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in changed:
            if "ds_status" in param.__dict__:  # the block has not ended the engine
                param.ds_status = away  # type: ignore[attr-defined]
