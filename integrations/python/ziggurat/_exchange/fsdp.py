# SPDX-License-Identifier: Apache-2.0
"""Finds FSDP2's units and the parameters of each, and exchanges their shards on the CPU.

gloo's own all-gather and reduce-scatter copy the data several times. Ours needs only the
receiver's copy, and sums in the order of ranks, in fp32. A unit keeps what a caller has set with
``set_custom_all_gather()`` or ``set_custom_reduce_scatter()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ziggurat._exchange.exchange import sum_in_order
from ziggurat._library.native import Unimplemented
from ziggurat._ranks.buffers import Buffers
from ziggurat._ranks.ranks import Lane, Ranks, Work


class FsdpUnits:
    """Knows which parameters FSDP2 gathers before a module's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        # the parameters of each unit, by FSDP2's state of the unit
        self._read: dict[Any, list[torch.Tensor]] = {}
        self._find(model, None)

    def _find(self, module: torch.nn.Module, unit: Any) -> None:
        # A unit has its module's parameters, except those of inner modules that are units too, as
        # fully_shard() groups them.
        unit = _fsdp_state(module) or unit
        if unit is not None:
            self._read.setdefault(unit, []).extend(module.parameters(recurse=False))
        for child in module.children():
            self._find(child, unit)

    def of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return self._read.get(_fsdp_state(module), [])

    def prefetched(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Returns the parameters of the units that ``set_modules_to_forward_prefetch()`` has
        named."""
        ahead = getattr(_fsdp_state(module), "_states_to_forward_prefetch", ())
        return [param for unit in ahead for param in self._read.get(unit, ())]


def _fsdp_state(module: torch.nn.Module) -> Any:
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


class FsdpCarriers:
    """Exchanges the shards of a model's units in place of FSDP2, until closed."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks) -> None:
        """Attaches to the model's units. All ranks call it, each with the same model."""
        self._ranks = ranks
        self._carriers: dict[tuple[int, ...], tuple[_Gather, _Reduce]] = {}
        #: the most bytes that a unit's gradients take as they are received from all ranks
        self.largest_bytes = 0
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
    """Yields the modules that fully_shard() was called with, and FSDP2's group of their
    parameters."""
    for module in model.modules():
        groups = getattr(_fsdp_state(module), "_fsdp_param_groups", ())
        # FSDP2 would not know which of several groups is meant. PyTorch before 2.9 lacks the
        # setter.
        if len(groups) != 1 or not hasattr(module, "set_custom_all_gather"):
            continue
        mesh = groups[0].mesh_info
        shares = getattr(mesh, "shard_mesh_size", 1) > 1  # replicate() has no shards
        if shares and groups[0].device.type == "cpu":
            yield module, groups[0]


def _unsharded_bytes(unit: Any) -> int:
    """Returns the bytes that the ranks send for a unit's gradients, padded in the first
    dimension."""
    size = unit.mesh_info.shard_mesh_size
    found = 0
    for param in unit.fsdp_params:
        policy = unit.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or param.sharded_param.dtype
        found += math.prod(param.padded_sharded_param_size) * size * dtype.itemsize
    return found


class _Carrier:
    """The base of the objects that FSDP2 calls in place of its own collectives."""

    def __init__(self, lane: Lane, buffers: Buffers) -> None:
        self._lane = lane
        self._buffers = buffers

    def allocate(self, size: Sequence[int], **of: Any) -> torch.Tensor:
        return torch.empty(*size, **of)


class _Gather(_Carrier):
    """Replaces FSDP2's all-gather."""

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
    """Replaces FSDP2's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums the shards and returns when done. FSDP2 never sets `async_op` where there are no
        streams."""
        # set_gradient_divide_factor() makes an operation that scales, which gloo does not support
        # either.
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Unimplemented(
                f"FSDP2 asks for {op} of gradients on the CPU, but only sum and mean are supported"
            )
        count, dtype, device = input_tensor.numel(), input_tensor.dtype, input_tensor.device
        taken = self._buffers.take(count, dtype, device)
        self._lane.all_to_all(taken, input_tensor).wait()
        size = group.size()
        sum_in_order(taken.view(size, -1), output_tensor, size if op == dist.ReduceOp.AVG else 1)
        self._buffers.give_back(taken)


class _AsTorchs(dist.Work):
    """Wraps `work` in PyTorch's own class, because FSDP2 waits for no other."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
