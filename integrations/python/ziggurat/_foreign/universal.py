# SPDX-License-Identifier: Apache-2.0
"""Reads DeepSpeed's universal checkpoints, as ``ds_to_universal`` of 0.19.8 writes them.

TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   each trained parameter's whole arrays
TAG/zero/optimizer_state.pt                       settings, and in stage 3 the step
TAG/..._model_states.pt                           copied from the checkpoint that was converted
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ziggurat._foreign import archive
from ziggurat._foreign.content import Content, Saved, Shape, add_trained, of_number, settings_of
from ziggurat._foreign.zero import (
    STATE_NAMES,
    _MODEL,
    add_aliases,
    add_module,
    check_model,
    files_of,
    shapes_of,
)
from ziggurat._library.native import DataLoss, InvalidArgument

_MASTER = "fp32"


def is_one(folder: Path) -> bool:
    return (folder / "zero").is_dir()


def content_of(folder: Path) -> Content:
    content = Content(f"DeepSpeed's universal checkpoint {folder}")
    shapes: dict[str, Shape] = {}
    model: Mapping[str, Any] = {}
    if files := files_of(folder, _MODEL):
        every = [archive.load(file) for file in files]
        model = every[0]
        check_model(model, files[0])
        add_module(content, every, files)
        shapes = shapes_of(model)
    common = folder / "zero" / "optimizer_state.pt"
    settings = archive.load(common) if common.is_file() else {}
    content.groups = settings_of(settings.get("param_groups"))
    step = _step_of_all(settings)
    for place in sorted((folder / "zero").rglob(f"{_MASTER}.pt")):
        name = place.parent.relative_to(folder / "zero").as_posix()
        state = {
            "master" if file.stem == _MASTER else file.stem: _saved(name, file, shapes.get(name))
            for file in sorted(place.parent.glob("*.pt"))
            if file.stem != "step"
        }
        own = place.parent / "step.pt"
        if own.is_file():
            state["step"] = of_number(archive.load(own), own)
        elif step is not None:
            state["step"] = of_number(step, common)
        if set(state) <= {"master", "step"}:  # a parameter that was not trained, in its own type
            content.values.setdefault(name, state["master"])
            continue
        add_trained(content, name, state)
    add_aliases(content, model)
    content.state_names = STATE_NAMES
    return content


def _saved(name: str, file: Path, shape: Shape | None) -> Saved:
    """Finds a tensor in its file. Stage 3 stores it flat, with its shape in the model's file."""
    found = archive.load(file)
    value = found.get("param") if isinstance(found, Mapping) else found
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"{file} has no tensor, so the file is not part of a universal checkpoint"
        )
    whole = tuple(value.shape) if shape is None else shape
    if value.numel() != math.prod(whole):
        if value.dim() == len(whole):  # a vocabulary without its padding
            whole = tuple(value.shape)
        else:
            raise DataLoss(
                f"{file}: '{name}' has {value.numel()} elements, but its shape in the model's file "
                f"has {math.prod(whole)}: convert the checkpoint again"
            )
    # The file is mapped again when it is read: a model may have more parameters than a process can
    # have open files.
    return Saved(whole, file, lambda: _again(file).reshape(whole))


def _again(file: Path) -> torch.Tensor:
    found = archive.load(file)
    tensor: torch.Tensor = found["param"] if isinstance(found, Mapping) else found
    return tensor


def _step_of_all(settings: Any) -> Any:
    """Returns the step in stage 3, where the optimizer's own state has one step for all
    parameters."""
    inner = settings.get("optimizer_state_dict") or settings.get("base_optimizer_state") or {}
    for entry in inner.get("state", {}).values():
        if "step" in entry:
            return entry["step"]
    groups = settings.get("param_groups") or []
    return next((group["step"] for group in groups if "step" in group), None)
