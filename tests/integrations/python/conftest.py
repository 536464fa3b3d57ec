# SPDX-License-Identifier: Apache-2.0
"""What all tests of the package have in common."""

import gc


def pytest_collection_finish() -> None:
    """What PyTorch's import made stays to the end: a third of the tests' time went into looking at it for garbage."""
    gc.collect()
    gc.freeze()
