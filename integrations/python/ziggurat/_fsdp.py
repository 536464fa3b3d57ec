# SPDX-License-Identifier: Apache-2.0
"""FSDP2's units: which parameters each gathers, and what carries their shards on the CPU.

gloo's own all-gather and reduce-scatter copy what they carry several times. What carries ours needs
no copy but the receiver's, and sums in the order of ranks, in fp32. A unit whose
``set_custom_all_gather()`` or ``set_custom_reduce_scatter()`` somebody has called keeps that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ziggurat._buffers import Buffers
from ziggurat._exchange import sum_in_order
from ziggurat._native import Unimplemented
from ziggurat._ranks import Lane, Ranks, Work


class FsdpUnits:
    """Which parameters FSDP2 gathers before a module's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._read: dict[Any, list[torch.Tensor]] = {}  # by FSDP2's state of a unit
        self._find(model, None)

    def _find(self, module: torch.nn.Module, unit: Any) -> None:
        # As fully_shard() has it: a module's, but for those of modules in it that are units too.
        unit = _fsdp_state(module) or unit
        if unit is not None:
            self._read.setdefault(unit, []).extend(module.parameters(recurse=False))
        for child in module.children():
            self._find(child, unit)

    def of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return self._read.get(_fsdp_state(module), [])

    def prefetched(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Of the units that ``set_modules_to_forward_prefetch()`` has named."""
        ahead = getattr(_fsdp_state(module), "_states_to_forward_prefetch", ())
        return [param for unit in ahead for param in self._read.get(unit, ())]


def _fsdp_state(module: torch.nn.Module) -> Any:
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


class FsdpCarriers:
    """Carries the shards of a model's units, until closed."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks) -> None:
        """A call of all ranks, each with the same model."""
        self._ranks = ranks
        self._carriers: dict[tuple[int, ...], tuple[_Gather, _Reduce]] = {}
        self.largest_bytes = 0  #: of a unit's gradients of all ranks, as they are received
        self._replaced: list[tuple[Any, Any, Any]] = []
        for module, unit in _units_on_cpu(model):
            before = unit._all_gather_comm, unit._reduce_scatter_comm
            if not all(type(one).__name__.startswith("Default") for one in before):
                continue
            self.largest_bytes = max(self.largest_bytes, _unsharded_bytes(unit))
            gather, reduce = self._among(unit.mesh_info.shard_process_group)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
            self._replaced.append((module, *before))

    def _among(self, group: dist.ProcessGroup) -> tuple[_Gather, _Reduce]:
        members = tuple(dist.get_process_group_ranks(group))
        if members not in self._carriers:
            lane = self._ranks.lane("FSDP2's shards", members)
            buffers = self._ranks.buffers
            self._carriers[members] = _Gather(lane, buffers), _Reduce(lane, buffers)
        return self._carriers[members]

    def close(self) -> None:
        for module, gather, reduce in self._replaced:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
        self._replaced.clear()


def _units_on_cpu(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Modules that fully_shard() was called with, and FSDP2's group of their parameters."""
    for module in model.modules():
        groups = getattr(_fsdp_state(module), "_fsdp_param_groups", ())
        # With several, which one is meant would not be clear to FSDP2. Without the setter, this
        # PyTorch is older than 2.9.
        if len(groups) != 1 or not hasattr(module, "set_custom_all_gather"):
            continue
        mesh = groups[0].mesh_info
        shares = getattr(mesh, "shard_mesh_size", 1) > 1  # replicate() has none
        if shares and groups[0].device.type == "cpu":
            yield module, groups[0]


def _unsharded_bytes(unit: Any) -> int:
    """Of what the ranks send of a unit's gradients: padded in the first dimension."""
    size = unit.mesh_info.shard_mesh_size
    found = 0
    for param in unit.fsdp_params:
        policy = unit.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or param.sharded_param.dtype
        found += math.prod(param.padded_sharded_param_size) * size * dtype.itemsize
    return found


class _Carrier:
    """What FSDP2 asks of those that carry for it."""

    def __init__(self, lane: Lane, buffers: Buffers) -> None:
        self._lane = lane
        self._buffers = buffers

    def allocate(self, size: Sequence[int], **of: Any) -> torch.Tensor:
        return torch.empty(*size, **of)


class _Gather(_Carrier):
    """In place of FSDP2's all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._lane.all_gather(output_tensor, input_tensor)
        if async_op:
            return _AsTorchs(work)
        work.wait()
        return None


class _Reduce(_Carrier):
    """In place of FSDP2's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """FSDP2 waits for it itself where there are no streams: `async_op` is never asked for."""
        # set_gradient_divide_factor() makes one that scales, which gloo has not either.
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Unimplemented(
                f"FSDP2 asks for {op} of gradients on the CPU, but only sum and mean are known"
            )
        count, dtype, device = input_tensor.numel(), input_tensor.dtype, input_tensor.device
        taken = self._buffers.take(count, dtype, device)
        self._lane.all_to_all(taken, input_tensor).wait()
        size = group.size()
        sum_in_order(taken.view(size, -1), output_tensor, size if op == dist.ReduceOp.AVG else 1)
        self._buffers.give_back(taken)


class _AsTorchs(dist.Work):
    """FSDP2 waits for PyTorch's own class only."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
