# SPDX-License-Identifier: Apache-2.0
"""Marks the cases of a test that the suite leaves to `scripts/test --long`, which sets ZIGGURAT_CASES=all."""

import os

import pytest

long = pytest.mark.skipif(os.environ.get("ZIGGURAT_CASES") != "all", reason="one of scripts/test --long")
