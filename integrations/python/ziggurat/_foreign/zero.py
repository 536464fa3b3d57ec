# SPDX-License-Identifier: Apache-2.0
"""Reads DeepSpeed's ZeRO checkpoints: stages 1 to 3, any number of ranks, as 0.19.8 writes them.

    TAG/mp_rank_00_model_states.pt                         module, buffers, shapes of parameters
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt          the same for each rank in stage 3
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   masters and moments of rank R, flat

Below stage 3 a group's parameters follow one another in the order of ``param_shapes``, with
``param_alignment_paddings`` between them, and are cut where a rank's share ends.
``param_slice_mappings`` is not used, because it is wrong with ``round_robin_gradients``, which has
another order. In stage 3 every parameter is cut into as many equal shares as there are ranks, the
last one padded; a rank's shares follow one another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat._foreign import archive
from ziggurat._foreign.content import (
    Content,
    Piece,
    Saved,
    Shape,
    add_trained,
    of_number,
    of_pieces,
    of_tensor,
    settings_of,
)
from ziggurat._foreign.state_dicts import add_optimizer
from ziggurat._library.native import DataLoss, InvalidArgument, Unimplemented

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

# DeepSpeed's names of moments where torch.optim has others; DeepSpeed's Lion keeps zeros.
STATE_NAMES: dict[str, dict[str, str | None]] = {
    "adagrad": {"exp_avg_sq": "sum"},
    "lion": {"exp_avg_sq": None},
}


def is_one(folder: Path) -> bool:
    return any(_MODEL.fullmatch(file.name) for file in folder.iterdir())


def content_of(folder: Path) -> Content:
    model_files = files_of(folder, _MODEL)
    model = [archive.load(file) for file in model_files]
    check_model(model[0], model_files[0])
    optimizer_files = files_of(folder, _OPTIMIZER)
    if not optimizer_files:
        return _without_zero(model[0], model_files[0])
    optimizer = [_part(file) for file in optimizer_files]
    ranks = _ranks(optimizer[0])
    if ranks != len(optimizer):
        raise DataLoss(
            f"{folder} was saved by {ranks} ranks, but has the *_optim_states.pt files of "
            f"{len(optimizer)}: copy the files of all ranks into one folder"
        )
    is_stage3 = "fp32_flat_groups" in optimizer[0]
    content = Content(f"DeepSpeed's checkpoint {folder} (ZeRO {3 if is_stage3 else '1 or 2'})")
    add_module(content, model, model_files)
    if is_stage3:
        _add_stage3(content, model[0], optimizer, optimizer_files)
    else:
        _add_stage2(content, model[0], optimizer, optimizer_files)
    add_aliases(content, model[0])
    content.state_names = STATE_NAMES
    return content


def files_of(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Returns the files that match, in the order of ranks. Errors: Unimplemented for layouts that
    are not supported; DataLoss if a rank's file is missing."""
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("layer_", "expert_")):
            raise Unimplemented(
                f"{file}: checkpoints of pipeline stages and experts are not supported: save the "
                "model without pipeline stages and experts"
            )
        matched = pattern.fullmatch(file.name)
        if matched is None:
            continue
        if int(matched[2]) > 0:
            raise Unimplemented(
                f"{file} belongs to a model that was divided among tensor-parallel ranks, which "
                "is not supported: convert the checkpoint with "
                "deepspeed.checkpoint.ds_to_universal, and give the converted folder"
            )
        found[int(matched[1] or 0)] = file
    if missing := set(range(max(found, default=-1) + 1)) - set(found):
        raise DataLoss(
            f"{folder} has files of rank {max(found)}, but none of rank {min(missing)}: copy the "
            "files of all ranks into one folder"
        )
    return [found[rank] for rank in sorted(found)]


def check_model(model: Any, file: Path) -> None:
    if not isinstance(model, Mapping) or "module" not in model:
        raise InvalidArgument(f"{file} has no 'module', so it is no checkpoint of DeepSpeed")
    if "ziggurat" in model:
        raise InvalidArgument(
            f"{file} was saved by ziggurat.deepspeed: load it with that engine's load_checkpoint()"
        )


def _part(file: Path) -> Mapping[str, Any]:
    """Returns the state of one rank's optimizer. Errors: Unimplemented for layouts that are not
    supported."""
    loaded = archive.load(file)
    part = loaded.get("optimizer_state_dict") if isinstance(loaded, Mapping) else None
    if not isinstance(part, Mapping):
        raise InvalidArgument(
            f"{file} has no 'optimizer_state_dict', so it is no optimizer file of DeepSpeed"
        )
    if part.get("ds_zero_partition_groups"):
        raise Unimplemented(
            f"{file}: some parameters are divided among smaller groups of ranks (experts, MiCS), "
            "which is not supported: convert the checkpoint with "
            "deepspeed.checkpoint.ds_to_universal, and give the converted folder"
        )
    if isinstance(part.get("base_optimizer_state"), list):
        raise Unimplemented(
            f'{file} was saved with "elastic_checkpoint": true, which is not supported: save it '
            f'with false'
        )
    return part


def _ranks(part: Mapping[str, Any]) -> int:
    count = part["partition_count"]  # one for each group, below stage 3
    return int(max(count) if isinstance(count, (list, tuple)) else count)


def _without_zero(model: Mapping[str, Any], file: Path) -> Content:
    """Returns the content of a stage 0 checkpoint."""
    content = Content(f"DeepSpeed's checkpoint {file.parent} (stage 0)")
    add_module(content, [model], [file])
    add_aliases(content, model)
    optimizer = model.get("optimizer")
    if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= set(optimizer):
        add_optimizer(content, _with_steps(optimizer), file)
        content.state_names = STATE_NAMES
    elif optimizer:
        raise Unimplemented(
            f"{file}: DeepSpeed's 16-bit optimizers of stage 0 are not supported: save with stage "
            "1, 2 "
            "or 3"
        )
    return content


def _with_steps(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives every parameter its group's steps, which FusedAdam counts in the last parameter's state
    alone."""
    state = dict(optimizer["state"])
    for group in optimizer["param_groups"]:
        params = [param for param in group["params"] if param in state]
        if "step" in group and params:
            step = max(state[param].get("step", 0) for param in params)
            state |= {param: {**state[param], "step": step} for param in params}
    return {**optimizer, "state": state}


def add_module(content: Content, model: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    """Adds buffers, frozen parameters and weights that are stored whole; in stage 3 no trained
    weight is."""
    first, file = model[0], files[0]
    shapes = shapes_of(first)
    frozen = first.get("frozen_param_shapes") or {}
    for name, value in first["module"].items():
        if not isinstance(value, torch.Tensor):
            continue
        shape = frozen.get(name, shapes.get(name, value.shape))
        # In stage 3 tensors of other shapes stand in for the weights.
        if tuple(value.shape) == tuple(shape):
            content.values[name] = of_tensor(value, file)
    for name, shape in frozen.items():
        fragments = [rank["frozen_param_fragments"][name].reshape(-1) for rank in model]
        if name not in content.values:
            content.values[name] = of_pieces(name, _shares(fragments, shape), tuple(shape), file)


def add_aliases(content: Content, model: Mapping[str, Any]) -> None:
    """Adds the second names of parameters that have two; DeepSpeed stores a value for the first
    alone."""
    for alias, stored in (model.get("shared_params") or {}).items():
        content.aliases.add(alias)
        if stored in content.values:
            content.values[alias] = content.values[stored]


def shapes_of(model: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of the parameters that were trained."""
    groups = model.get("param_shapes") or []
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _shares(flats: Sequence[torch.Tensor], shape: Sequence[int], offset: int = 0) -> list[Piece]:
    """Returns one parameter's shares in stage 3; `offset` is where the parameter begins in every
    rank's tensor."""
    total = math.prod(shape)
    share = math.ceil(total / len(flats))
    return [
        Piece(flat, offset, max(0, min(share, total - rank * share)))
        for rank, flat in enumerate(flats)
    ]


def _add(
    content: Content,
    name: str,
    shape: Shape,
    arrays: Mapping[str, Sequence[Piece]],
    step: Saved | None,
    file: Path,
) -> None:
    """Adds a parameter that was trained; `arrays` has the pieces of each of its arrays."""
    state = {key: of_pieces(name, pieces, shape, file) for key, pieces in arrays.items()}
    if step is not None:
        state["step"] = step
    add_trained(content, name, state)


def _add_stage2(
    content: Content,
    model: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    files: Sequence[Path],
) -> None:
    base = [part["base_optimizer_state"] for part in parts]
    content.groups = settings_of(base[0]["param_groups"])
    paddings = parts[0].get("param_alignment_paddings")
    groups = model.get("param_shapes") or []
    if len(groups) != len(parts[0]["single_partition_of_fp32_groups"]):
        raise DataLoss(
            f"{files[0]} has {len(parts[0]['single_partition_of_fp32_groups'])} groups of "
            f"parameters, but the model's file beside it has {len(groups)}, so the files are not "
            "of one checkpoint. Copy the checkpoint again"
        )
    for group, shapes in enumerate(groups):
        flats = [
            _flats(base[rank], group, part["single_partition_of_fp32_groups"][group])
            for rank, part in enumerate(parts)
        ]
        step = _step(base[0], group, files[0])
        behind = paddings[group] if paddings is not None else [0] * len(shapes)
        offset = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            count = math.prod(shape)
            arrays = {
                key: _cut([flat[key] for flat in flats], flats[0]["master"].numel(), offset, count)
                for key in flats[0]
            }
            _add(content, name, tuple(shape), arrays, step, files[0])
            offset += count + padding


def _cut(flats: Sequence[torch.Tensor], share: int, offset: int, count: int) -> list[Piece]:
    """Cuts elements `offset` to `offset + count` out of the ranks' tensors as if these were joined.
    Each has `share` elements; the last may be shorter, without its padding."""
    pieces = []
    for rank, flat in enumerate(flats):
        begin, end = max(offset, rank * share), min(offset + count, (rank + 1) * share)
        if begin < end:
            pieces.append(Piece(flat, begin - rank * share, end - begin))
    return pieces


def _add_stage3(
    content: Content,
    model: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    files: Sequence[Path],
) -> None:
    base = [part["optimizer_state_dict"] for part in parts]
    content.groups = settings_of(base[0]["param_groups"])
    for group, shapes in enumerate(model["param_shapes"]):  # DeepSpeed's sub-groups
        flats = [
            _flats(base[r], group, part["fp32_flat_groups"][group]) for r, part in enumerate(parts)
        ]
        step = _step(base[0], group, files[0])
        offset = 0
        for name, shape in shapes.items():
            arrays = {
                key: _shares([flat[key] for flat in flats], shape, offset) for key in flats[0]
            }
            _add(content, name, tuple(shape), arrays, step, files[0])
            offset += math.ceil(math.prod(shape) / len(parts))


def _flats(base: Mapping[str, Any], group: int, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what one rank holds of a group, by name."""
    flats = {"master": master.reshape(-1)}
    for key, value in base["state"].get(group, {}).items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            flats[str(key)] = value.reshape(-1)
    return flats


def _step(base: Mapping[str, Any], group: int, file: Path) -> Saved | None:
    """Returns the step from the state, or from a group's settings, where some of DeepSpeed's
    optimizers keep it."""
    found = base["state"].get(group, {}).get("step")
    if found is None:
        found = next((g["step"] for g in base["param_groups"] if "step" in g), None)
    return None if found is None else of_number(found, file)
