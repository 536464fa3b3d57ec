# SPDX-License-Identifier: Apache-2.0
"""Marks the cases of a test that the suite leaves to `scripts/test --long`, which sets ZIGGURAT_CASES=all."""

import os
from typing import Any

import pytest


def in_long_run() -> bool:
    return os.environ.get("ZIGGURAT_CASES") == "all"


long = pytest.mark.skipif(not in_long_run(), reason="one of scripts/test --long")


def long_case(*values: Any) -> Any:
    """Returns one of a test's parameters that is left so."""
    return pytest.param(*values, marks=long)
