# SPDX-License-Identifier: Apache-2.0
"""What is asked of PyTorch's DTensors, which FSDP2 makes of parameters and gradients."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """What this process has of it: the memory itself, not to be differentiated."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor placed as `whole` is, of which this process has `local`."""
    made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


def local_part(values: torch.Tensor, whole: Any) -> torch.Tensor:
    """Of `values`, which every process has all of, what it has of `whole`."""
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return local_of(distribute(values, whole.device_mesh, whole.placements, src_data_rank=None))
