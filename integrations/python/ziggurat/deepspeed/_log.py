# SPDX-License-Identifier: Apache-2.0
"""Prints lines about a run on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch


def _made() -> logging.Logger:
    made = logging.getLogger("ziggurat.deepspeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("ziggurat.deepspeed: %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _made()


def this_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def log_dist(
    message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO, **_: Any
) -> None:
    """Prints `message` on `ranks`, or on all ranks if `ranks` is empty or has -1 in it."""
    if not ranks or -1 in ranks or this_rank() in ranks:
        logger.log(level, message)


def say(message: str) -> None:
    """Prints a line once for the whole job."""
    log_dist(message, ranks=[0])
