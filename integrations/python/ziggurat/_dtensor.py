# SPDX-License-Identifier: Apache-2.0
"""What is asked of PyTorch's DTensors, which FSDP2 makes of parameters and gradients."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ziggurat._native import Unimplemented


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


def local_box(whole: Any) -> tuple[list[int], list[int]]:
    """Where in the whole this process's elements begin, and how many there are of each dimension.

    Errors: Unimplemented for what is no box of it."""
    kinds = sys.modules["torch.distributed.tensor"]
    offsets, box = [0] * whole.dim(), list(whole.shape)
    coordinates = whole.device_mesh.get_coordinate()
    for place, coordinate, ranks in zip(
        whole.placements, coordinates, whole.device_mesh.shape, strict=True
    ):
        if type(place) is kinds.Replicate:
            continue
        if type(place) is not kinds.Shard:
            raise Unimplemented(
                f"a parameter is placed as {place}, so a rank's part of it is "
                "not a box: place it as Shard or Replicate"
            )
        slice_ = -(-box[place.dim] // ranks)
        begin = min(coordinate * slice_, box[place.dim])
        offsets[place.dim] += begin
        box[place.dim] = min(slice_, box[place.dim] - begin)
    return offsets, box


def is_in_runs(whole: Any) -> bool:
    """Whether what each process has of it are elements that follow one another in the whole. Every
    process finds the same."""
    kinds = sys.modules["torch.distributed.tensor"]
    return all(
        ranks == 1
        or type(place) is kinds.Replicate
        or (type(place) is kinds.Shard and math.prod(whole.shape[: place.dim]) == 1)
        for place, ranks in zip(whole.placements, whole.device_mesh.shape, strict=True)
    )


def is_first_copy(whole: Any) -> bool:
    """Of what several processes have alike, this one's is the first."""
    kinds = sys.modules["torch.distributed.tensor"]
    pairs = zip(whole.placements, whole.device_mesh.get_coordinate(), strict=True)
    return all(at == 0 for place, at in pairs if isinstance(place, kinds.Replicate))
