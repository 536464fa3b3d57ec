# SPDX-License-Identifier: Apache-2.0
"""Modules that scripts import from ``deepspeed.runtime.zero``."""

from ziggurat.deepspeed.runtime.zero import partition_parameters

__all__ = ["partition_parameters"]
