# SPDX-License-Identifier: Apache-2.0
"""Offers what scripts for ZeRO stage 3 import from ``deepspeed.runtime.zero.partition_parameters``."""

from ziggurat.deepspeed._stage3_params import ZeroParamStatus
from ziggurat.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]
