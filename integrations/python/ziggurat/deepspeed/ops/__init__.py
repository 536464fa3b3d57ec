# SPDX-License-Identifier: Apache-2.0
"""Optimizers under DeepSpeed's names: ``ops.adam``, ``ops.lion``, ``ops.adagrad``."""

from ziggurat.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
