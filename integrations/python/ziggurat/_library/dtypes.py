# SPDX-License-Identifier: Apache-2.0
"""The types of parameters and gradients."""

import torch

#: the types that the engine takes, by its names for them
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
