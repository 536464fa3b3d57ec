# SPDX-License-Identifier: Apache-2.0
"""Offers the loaders where scripts import them from."""

from ziggurat.deepspeed._data import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
