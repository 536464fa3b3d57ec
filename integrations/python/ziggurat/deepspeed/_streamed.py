# SPDX-License-Identifier: Apache-2.0
"""Streams a model's parameters in ZeRO stage 3, as the configuration's keys ask.

They are where the optimizer's engine keeps them, in host memory or on a drive, and are brought unit
by unit. This module makes offload()'s arguments and the engine's limits of the keys.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.memory import size_text
from ziggurat._offload.offload import offload
from ziggurat._streaming.streaming import Streaming, is_away, streaming_around, streaming_of
from ziggurat._units.units import Division, divide
from ziggurat.deepspeed._config import Config, ParamLimits
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._owners import owner_of
from ziggurat.deepspeed._stage3_params import mark
from ziggurat.deepspeed._stage3_units import take_leaves, units_of

_GRADIENT_BITS = 4  # of zero_quantized_gradients, as in DeepSpeed


def streams(config: Config) -> bool:
    """Returns whether parameters leave the model."""
    return config.zero_stage == 3


def nvme_path_of(config: Config) -> str | None:
    """Returns the directory for parameters on a drive; None if they are in host memory. Errors:
    InvalidArgument if there is none."""
    its = config.offload_param
    if its is None or its.device != "nvme":
        return None
    state = config.offload_optimizer
    of_state = state.nvme_path if state is not None and state.device == "nvme" else None
    path = its.nvme_path or of_state
    if not path:
        raise InvalidArgument(
            '"zero_optimization.offload_param.nvme_path" is missing, although the device is nvme: give a '
            "directory on NVMe"
        )
    return path


def stream(module: torch.nn.Module, config: Config, ranks: int) -> Streaming | None:
    """Lets the optimizer that is made next keep the parameters, or this one's slices of them among several
    `ranks`, if the configuration asks for that. Returns None if they stay in PyTorch's memory, which is
    said if the stage is 3."""
    if not streams(config):
        return None
    known = streaming_around(list(module.parameters()))
    if known is not None:
        mark(module.parameters())
        return known  # the script has called offload(), and its arguments hold
    path = nvme_path_of(config)
    state = config.offload_optimizer
    if path is not None and state is not None and state.device == "nvme" and path != state.nvme_path:
        say(
            f"zero_optimization.offload_param.nvme_path is {path}, but parameters share the directory of the "
            f"optimizer's state in {state.nvme_path}"
        )
    take_leaves(module, config.leaf_modules)
    try:
        units = units_of(module)
        division = divide(module, units)
        division.set_ranks(ranks)
        memory_bytes = _memory_of(module, division, config, on_nvme=path is not None)
        offload(
            module,
            memory=memory_bytes,
            placement="host" if path is None else "nvme",
            units=units,
            chunked_loss=False,  # scripts that were written for DeepSpeed may read logits
        )
    except (InvalidArgument, Unimplemented) as error:
        say(f"zero_optimization.stage is 3, but parameters stay whole in memory: {error}")
        return None
    streaming = streaming_around(list(module.parameters()))
    assert streaming is not None
    mark(module.parameters())
    streaming.limits = _limits_of(division, config.param_limits, on_nvme=path is not None)
    streaming.returns_to_files = path is not None
    streaming.room_by, streaming.or_else = "give zero_optimization.stage3_max_live_parameters more", ""
    streaming.brings_by = "deepspeed.zero.GatheredParameters([param])"
    streaming.keeps_by = "call deepspeed.zero.register_external_parameter(module, param) before initialize()"
    return streaming


def exchange_of(config: Config, streaming: Streaming | None, ranks: int) -> dict[str, Any]:
    """Returns the optimizer's arguments for what the ranks send each other (ZeRO++). Says which keys change
    nothing. Errors: those of _hpz_of(); InvalidArgument if gradients are to travel in a type too."""
    found: dict[str, Any] = {}
    hpz = _hpz_of(config, streaming, ranks)
    if hpz is not None:
        found["hpz"] = hpz
    keys = [f'"zero_optimization.zero_quantized_{key}"' for key, asked in config.quantized.items() if asked]
    if keys and (ranks == 1 or streaming is None):
        why = "one rank sends nothing" if ranks == 1 else "the ranks have whole parameters"
        say(f"{', '.join(keys)}: true changes nothing: {why}")
        return found
    if config.quantized["weights"]:
        found["quantized_weights"] = True
    elif config.quantized["nontrainable_weights"]:
        found["quantized_weights"] = "frozen"
    if config.quantized["gradients"]:
        if config.communication_data_type is not None:
            raise InvalidArgument(
                f'"communication_data_type": {config.communication_data_type} and '
                f'"zero_optimization.zero_quantized_gradients": true cannot be used together, because gradients travel '
                f"in {_GRADIENT_BITS} bits then: give only one of them"
            )
        found["quantized_gradients"] = _GRADIENT_BITS
    return found


def _hpz_of(config: Config, streaming: Streaming | None, ranks: int) -> int | None:
    """Returns how many ranks share copies of the parameters; None if none do, which is said if the configuration
    asks for it. Errors: InvalidArgument if it does not divide the `ranks`."""
    key, size = '"zero_optimization.zero_hpz_partition_size"', config.hpz_partition_size
    if size in (0, 1):
        return None
    if size < 0 or (size < ranks and ranks % size != 0):
        raise InvalidArgument(
            f"{key} is {size}, which does not divide the {ranks} ranks into nodes: give the number of ranks of a node, "
            f"a divisor of {ranks}"
        )
    if streaming is None:
        say(f"{key} is {size}, which changes nothing: the ranks have whole parameters")
    elif size >= ranks:
        say(f"{key} is {size}, which changes nothing: there are not more ranks than this value")
    else:
        return size
    return None


def require_no_engine(module: torch.nn.Module) -> None:
    """Refuses a model that another engine keeps the parameters of. Errors: InvalidArgument."""
    if any(map(_has_engine, module.parameters())):
        gc.collect()  # a scheduler and its optimizer have each other
    for name, param in module.named_parameters():
        if is_away(param) or _has_engine(param):
            raise InvalidArgument(
                f"initialize(): an engine has this model already, and keeps its parameter '{name}': call "
                "destroy() of that engine before another one trains the model"
            )


def _has_engine(param: torch.Tensor) -> bool:
    """Returns whether the optimizer of an engine is going to take the streamed parameter at its first forward."""
    owner = owner_of(param)
    return owner is not None and not owner.is_closed and streaming_of(param) is not None


def say_of_no_optimizer(config: Config) -> None:
    """Says that the stage has no effect without an optimizer, whose engine would keep the parameters."""
    if not streams(config):
        return
    its = config.offload_param
    on_nvme = its is not None and its.device == "nvme"
    in_files = "make the model within deepspeed.zero.Init, which puts what is large into files"
    on_drive = 'have "offload_param" on nvme, and ' + in_files
    say(
        "zero_optimization.stage is 3, but parameters stay whole where they were made, because the engine "
        "has no optimizer, which would bring them: give initialize() one, or name one in the configuration; "
        f"if the model is only evaluated and memory has no room for it, {in_files if on_nvme else on_drive}"
    )


def keep_on_drive(streaming: Streaming, folder: Path) -> None:
    """Tells where parameters are on a drive, if the optimizer's state is in host memory."""
    streaming.folder = os.fspath(folder)


def _itemsize(module: torch.nn.Module) -> int:
    return max((param.element_size() for param in module.parameters()), default=1)


def _beside_bytes(division: Division, limits: ParamLimits) -> int:
    """Returns what parameters take that stay between their uses because they are small."""
    threshold = _threshold(division, limits)
    return sum(piece.size_bytes for piece in _pieces(division) if piece.elements <= threshold)


def _memory_of(module: torch.nn.Module, division: Division, config: Config, on_nvme: bool) -> int:
    """Returns the memory for units: what the keys allow, and at least what works. An engine takes no more
    of it than its parameters need."""
    limits = config.param_limits
    elements = limits.max_live + (_in_host_memory(limits) if on_nvme else 0)
    asked = elements * _itemsize(module) + _beside_bytes(division, limits)
    try:
        division.require(asked, own_blocks=has_codes(config.engine_arguments.get("state_format")))
    except InvalidArgument:
        smallest, of_what = division.smallest()
        say(
            f"zero_optimization.stage3_max_live_parameters is {limits.max_live}, which is too little: "
            f"parameters get {size_text(smallest)}, for {of_what}"
        )
        return smallest
    return asked


def _in_host_memory(limits: ParamLimits) -> int:
    """Returns how many elements of parameters on a drive may be in host memory beside those in use."""
    return limits.max_in_cpu + limits.buffer_count * limits.buffer_size


class _Piece(NamedTuple):
    """What the engine brings and keeps by itself."""

    elements: int
    size_bytes: int


def _pieces(division: Division) -> list[_Piece]:
    """Returns a large parameter of a unit alone and the small ones together, or among several ranks, which
    send a unit as a whole, the units."""
    if all(unit.ranks == 1 for unit in division.units):
        parts = [part for unit in division.units for part in unit.parts()]
        return [_Piece(part.elements, part.home_bytes) for part in parts]
    counts = {unit: sum(param.numel() for _, param in unit.params) for unit in division.units}
    return [_Piece(count, sum(unit.pieces())) for unit, count in counts.items() if unit.pieces()]


def _threshold(division: Division, limits: ParamLimits) -> int:
    """Returns how many elements the largest piece has that stays; 0 if none does."""
    counts = Counter(piece.elements for piece in _pieces(division))
    total = largest = 0
    for size, count in sorted(counts.items()):
        total += size * count
        if size > limits.persistence_threshold or total > limits.model_persistence_threshold:
            break
        largest = size
    return largest


def _limits_of(division: Division, limits: ParamLimits, on_nvme: bool) -> dict[str, int]:
    """Returns the engine's settings. A limit that could change nothing is left out, since then the engine
    need not know when a unit is used next."""
    sizes = [piece.elements for piece in _pieces(division)]
    most = 4 * sum(sizes)  # elements are used between two uses of a unit in a step
    given = {}
    distance = limits.max_reuse_distance + (_in_host_memory(limits) if on_nvme else 0)
    if distance < most:
        given["max_reuse_distance"] = distance
    threshold = _threshold(division, limits)
    if threshold > 0:
        given["param_persistence_threshold"] = threshold
    ahead = limits.prefetch_bucket_size
    if ahead is not None and ahead < most:
        # As in DeepSpeed, what reaches the limit comes too.
        given["prefetch_bucket_size"] = ahead + max(sizes, default=0) if ahead > 0 else 0
    return given
