# SPDX-License-Identifier: Apache-2.0
"""Ends a test that needs a library of others which the machine lacks."""

import sys
from pathlib import Path
from typing import NoReturn


def skip(missing: ImportError) -> NoReturn:
    """Exits with 77 where a library of others is missing or too old. Raises `missing` if it is of the
    package or of these tests: what is broken is not skipped."""
    name = (missing.name or "").partition(".")[0]
    if name == "ziggurat" or Path(__file__).with_name(f"{name}.py").exists():
        raise missing
    print(f"skipped: {missing}")
    sys.exit(77)
