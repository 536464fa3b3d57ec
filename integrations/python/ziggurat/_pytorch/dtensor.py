# SPDX-License-Identifier: Apache-2.0
"""What this package uses of PyTorch's DTensors; FSDP2 makes parameters and gradients DTensors."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ziggurat._library.native import Unimplemented


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # None if not imported: no DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """Returns this process's part of `tensor`: the same memory, without autograd."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor that is placed as `whole` is and of which this process has `local`."""
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
    """Returns the part of `values` that corresponds to this process's part of `whole`. Every
    process has all of `values`."""
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return local_of(distribute(values, whole.device_mesh, whole.placements, src_data_rank=None))


def local_box(whole: Any) -> tuple[list[int], list[int]]:
    """Returns where this process's elements begin in the whole, and how many there are in each
    dimension.

    Errors: Unimplemented if the part is no box of the whole."""
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
                f"a parameter is placed as {place}, so a rank's part is not a box of the whole "
                "parameter: place the parameter as Shard or Replicate"
            )
        slice_ = -(-box[place.dim] // ranks)
        begin = min(coordinate * slice_, box[place.dim])
        offsets[place.dim] += begin
        box[place.dim] = min(slice_, box[place.dim] - begin)
    return offsets, box


def is_in_runs(whole: Any) -> bool:
    """Returns whether each process's elements follow one another in the whole. Every process finds
    the same."""
    kinds = sys.modules["torch.distributed.tensor"]
    return all(
        ranks == 1
        or type(place) is kinds.Replicate
        or (type(place) is kinds.Shard and math.prod(whole.shape[: place.dim]) == 1)
        for place, ranks in zip(whole.placements, whole.device_mesh.shape, strict=True)
    )


def is_first_copy(whole: Any) -> bool:
    """Returns whether this process's copy is the first, where several processes hold the same
    part."""
    kinds = sys.modules["torch.distributed.tensor"]
    pairs = zip(whole.placements, whole.device_mesh.get_coordinate(), strict=True)
    return all(at == 0 for place, at in pairs if isinstance(place, kinds.Replicate))
