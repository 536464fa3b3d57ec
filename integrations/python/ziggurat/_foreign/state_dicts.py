# SPDX-License-Identifier: Apache-2.0
"""Reads state dicts in one file of ``torch.save``: a model's, an optimizer's, or both under the
names that trainers commonly give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ziggurat._foreign import archive
from ziggurat._foreign.content import Content, of_tensor, settings_of, state_of
from ziggurat._library.native import InvalidArgument, Unimplemented

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")


def content_of(path: Path) -> Content:
    loaded = archive.load(path)
    content = Content(f"torch.save's file {path}")
    if not isinstance(loaded, Mapping):
        raise InvalidArgument(
            f"{path} holds a {type(loaded).__name__}, not a state dict: save model.state_dict()"
        )
    if _is_optimizers(loaded):
        add_optimizer(content, loaded, path)
        return content
    model = next((loaded[key] for key in MODEL_KEYS if isinstance(loaded.get(key), Mapping)), None)
    optimizer = next((loaded[key] for key in OPTIMIZER_KEYS if loaded.get(key)), None)
    if model is None and optimizer is None:
        model = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
        if not model:
            raise InvalidArgument(
                f"{path} has {', '.join(map(repr, list(loaded)[:8]))}, but no state dict: save "
                '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
            )
    if model is not None:
        add_model(content, model, path)
    if optimizer is not None:
        add_optimizer(content, _one(optimizer, path), path)
    return content


def _is_optimizers(found: Any) -> bool:
    return isinstance(found, Mapping) and "state" in found and "param_groups" in found


def _one(optimizer: Any, path: Path) -> Mapping[str, Any]:
    """Returns the optimizer's state dict; Lightning saves a list of optimizers."""
    found = optimizer[0] if isinstance(optimizer, list) and len(optimizer) == 1 else optimizer
    if not _is_optimizers(found):
        raise Unimplemented(
            f"the optimizer's entry in {path} is not one state dict of torch.optim: save "
            "optimizer.state_dict()"
        )
    return found  # type: ignore[no-any-return]


def add_model(content: Content, state_dict: Mapping[str, Any], path: Path) -> None:
    for name, value in state_dict.items():
        # values that are no tensors are modules' own, from get_extra_state()
        if isinstance(value, torch.Tensor):
            content.values[name] = of_tensor(value, path)


def add_optimizer(content: Content, state_dict: Mapping[str, Any], path: Path) -> None:
    groups = state_dict["param_groups"]
    if "ziggurat" in state_dict:
        raise InvalidArgument(
            f"{path} has no state itself, but names the store with the state: give the file to "
            "load_state_dict()"
        )
    content.groups = settings_of(groups)
    listed = [param for group in groups for param in group["params"]]
    entries = state_dict["state"]
    if any(isinstance(param, str) for param in listed):  # get_optimizer_state_dict() gives names
        content.states = {name: state_of(entries.get(name, {}), path) for name in listed}
        return
    content.places = len(listed)
    for place, number in enumerate(listed):
        content.states[place] = state_of(entries.get(number, {}), path)
