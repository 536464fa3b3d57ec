# SPDX-License-Identifier: Apache-2.0
"""offload(): what a script calls for a model that does not fit its memory."""

from __future__ import annotations

import math
import warnings

import torch

from ziggurat._activations.activations import activations_of
from ziggurat._library.native import InvalidArgument, require_gpu
from ziggurat._losses.causal_loss import compute_in_chunks, find_head
from ziggurat._memory.memory import bytes_of
from ziggurat._memory.placement import AUTO, Homes
from ziggurat._offload.encoders import look_at_first_layer
from ziggurat._offload.passes import enter_at_call
from ziggurat._offload.tokens import TokenCost
from ziggurat._optimizer.opened import is_lent
from ziggurat._pytorch import storages
from ziggurat._pytorch.accelerator import gpu_of
from ziggurat._pytorch.torch_private import require_for_offload
from ziggurat._ranks.ranks import rank_count
from ziggurat._streaming.pins import PinnedUnit
from ziggurat._streaming.streaming import Streaming, streaming_of
from ziggurat._streaming.table_rows import grad_in_file
from ziggurat._streaming.tiled_linear import Tiled, compute_in_tiles
from ziggurat._units.refusals import check_model
from ziggurat._units.tile_choice import Tiles
from ziggurat._units.unit_choice import Choice
from ziggurat._units.units import Division, divide

__all__ = ["offload"]


def offload(
    model: torch.nn.Module,
    *,
    memory: int | str = AUTO,
    placement: str = "host",
    units: Choice = "auto",
    tiles: Tiles | None = None,
    chunked_loss: bool | None = None,
    activations: str | None = None,
    activation_memory: int | str | None = None,
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """Lets the engine of the optimizer that trains `model` keep its parameters too.

    From the first forward that trains, or the first step, the parameters are where `placement`
    says, and each unit of the model is brought while its forward and its backward run. Returns the
    model itself.

    ``placement``
        ``"host"``, or ``"nvme"``: in the directory of the optimizer's state. Gradients stay in
        PyTorch's memory until the step; where they would take more than half of what is free, or
        with ``"params=nvme,grads=nvme"``, each goes to that directory as backward makes it. ``"auto"``:
        where a step moves for the shortest time and memory has room, when the engine opens.
    ``memory``
        The hard limit of what is brought: bytes, or a text like "4GiB". Of an embedding that is too
        large for it each batch's rows are read where they lie, unless another module uses the table.
        Left out, or "auto": as the planner finds it when the engine opens, together with what else is left
        out, ``host_memory`` and an optimizer's "auto:/path" too. All take up to three quarters of the memory
        that is free. A line on standard error says the choice, and another one after the fourth step what it took.
    ``units``
        ``"auto"``: the repeated blocks, embeddings and large linear layers outside them; what
        remains is there as long as the model runs. Experts that are modules of their own are units
        within their block, which a batch brings that calls them. Or a list of names of modules, or a function of
        a module's name and the module that tells whether it is a unit.
    ``tiles``
        Names of linear layers and into how many tiles of output features each is cut, as {"lm_head": 8}. A
        tile of the weight is brought, used and let go after the other, so that `memory` needs room for the
        largest one in place of the layer. To all else it stays one parameter. The layer's outputs and the
        gradients of weight and bias keep their bits; its input's gradient is summed over the tiles in fp32.
    ``chunked_loss``
        Whether a causal language model of transformers computes its loss by
        :func:`chunked_cross_entropy` where it gets labels and gradients are enabled. The output's
        ``logits`` are then an object whose uses raise an error. None: if its forward is seen to
        need them for nothing else, and the vocabulary has 16384 words or more, which a line says.
        True: or Unimplemented is raised. False: logits are built, as without offload().

    ``activations``
        ``"nvme"``, or ``"nvme:/path"``: what backward needs of a forward is kept in memory up to
        ``activation_memory``, and beyond that in files without names in the directory of the optimizer's
        state, or at the path. Where ``device`` is a GPU also ``"host"``: what fits in ``activation_memory`` of
        host memory is kept there, the rest on the GPU. None: it stays in PyTorch's memory. Its bits stay the same.
    ``activation_memory``
        Bytes, or a text like "4GiB". None takes an eighth of the memory that is free at the first
        forward, or for "host" half of it.
    ``device``
        Where the model computes: an NVIDIA GPU ("cuda:0", of several ranks one each) has ``memory`` of its own for
        units, beside PyTorch's, and each use of a unit waits on the GPU, not on the CPU. Parameters are there from
        the first forward on, which needs the optimizer; buffers are at once. Gradients leave the GPU as backward
        makes them. It has been tested over a stand-in for CUDA's runtime, and on no GPU yet.

    Errors: InvalidArgument for too little memory, which says how much works; Unimplemented, which
    names the parameter or module that cannot be offloaded.
    """
    require_for_offload()
    if not storages.guards_reads():
        warnings.warn(
            f"PyTorch {torch.__version__} has no way to refuse reads in C++ of parameters that are "
            "away: one that Python does not see would end the process instead of raising an error",
            stacklevel=2,
        )
    check_model(model)
    homes = Homes.of(placement)
    memory_bytes = None if memory == AUTO else bytes_of("memory", memory)
    if torch.device(device).type != "cpu" and (memory_bytes is None or homes.params == AUTO):
        raise InvalidArgument(
            f'offload(device="{device}"): "auto" is for a model that computes on the CPU: give memory= for units on '
            'the GPU, and placement="host" or "nvme"'
        )
    accelerator = gpu_of(device)
    if accelerator is not None:
        require_gpu(accelerator.index)
    to = torch.device("cpu") if accelerator is None else accelerator.device
    division = divide(model, units, tiles=tiles, device=to, brings_all=accelerator is not None)
    _check_params(division)
    division.leave_in_files({param for param in model.parameters() if param.requires_grad})
    division.set_ranks(rank_count())  # whole units take other memory than parts that one engine has
    division.require(math.inf if memory_bytes is None else memory_bytes)
    found = find_head(model, chunked_loss)
    streaming = Streaming(division, homes, memory_bytes, accelerator)
    streaming.activations = activations_of(streaming, model, activations, activation_memory)
    for entry in division.entries:
        for index in (unit.index for unit in entry.units if unit.tiles):
            streaming.tiled[index] = Tiled(streaming, streaming.units[index])
            compute_in_tiles(entry.module, streaming.tiled[index])
    if found is not None:
        streaming.seams.append(compute_in_chunks(*found))
    pinned: dict[int, PinnedUnit] = {unit.index: unit for unit in streaming.units}
    names = {module: name for name, module in model.named_modules()}
    tokens = TokenCost()
    root = division.entries[0].module
    stages = {entry.module for entry in division.entries} - {root}
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder):
            look_at_first_layer(module, stages)
    for entry in division.entries:
        own = [pinned[unit.index] for unit in entry.units]
        is_root = entry.module is root
        # Micro-batches call other experts, each in its turn at the block.
        stage = None if is_root or entry.is_expert else names[entry.module]
        whole = tokens if is_root else None
        if any(unit.is_table for unit in entry.units):
            grad_in_file(entry.module, streaming, own[0])
        kept = streaming.activations if is_root else None
        enter_at_call(entry.module, streaming, own, opens=True, stage=stage, tokens=whole, activations=kept)
    for module in division.outer:
        of_root = [pinned[unit.index] for unit in division.entries[0].units]
        enter_at_call(
            module, streaming, of_root, opens=True, tokens=tokens, activations=streaming.activations
        )
    if accelerator is not None:
        moved: dict[torch.Tensor, torch.Tensor] = {}  # modules may share one
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                moved.setdefault(buffer, buffer.to(accelerator.device))
                module._buffers[name] = moved[buffer]
    return model


def _check_params(division: Division) -> None:
    params = [param for unit in division.units for _, param in unit.params]
    names = [name for unit in division.units for name, _ in unit.params]
    if not params:
        raise InvalidArgument("offload(): the model has no parameters")
    for name, param in zip(names, params, strict=True):
        if streaming_of(param) is not None:
            raise InvalidArgument(f"parameter '{name}' was offloaded already: call offload() once")
        if is_lent(param):
            raise InvalidArgument(
                f"parameter '{name}' is in an optimizer's engine already: call offload() before "
                "the optimizer's first step"
            )
