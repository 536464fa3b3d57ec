# SPDX-License-Identifier: Apache-2.0
"""What the programs in this folder need."""

from __future__ import annotations

import sys


def require() -> None:
    """Ends the program with 77 if PyTorch, transformers or ziggurat is missing."""
    try:
        import transformers  # noqa: F401

        import torch  # noqa: F401
        import ziggurat.torch  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}")
        sys.exit(77)
