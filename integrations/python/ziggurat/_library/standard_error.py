# SPDX-License-Identifier: Apache-2.0
"""Standard error as programs have it that show text elsewhere, or nowhere."""

from __future__ import annotations

import io
import sys
from typing import Any


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def stderr() -> Any:
    """Returns where print() puts what people are told. A process without a console may have no standard error, and
    print(file=None) would put the text on standard output."""
    return _Nowhere() if sys.stderr is None else sys.stderr


def on_terminal() -> bool:
    """Returns whether standard error is a terminal, which an object in its place need not be able to say."""
    isatty = getattr(sys.stderr, "isatty", None)
    try:
        return isatty is not None and bool(isatty())
    except ValueError:  # it was closed
        return False
