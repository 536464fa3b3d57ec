# SPDX-License-Identifier: Apache-2.0
"""Describes by name what a checkpoint of another trainer holds, before any of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ziggurat._library.native import DataLoss

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor in a file. ``read()`` brings the whole tensor into memory."""

    shape: Shape
    file: Path  #: the file that errors name
    read: Callable[[], torch.Tensor]
    #: what the trainer rounded this master to, if the checkpoint has that too
    weight: Saved | None = None


#: A parameter's state: "master" (fp32), "step", and moments by their names in ``torch.optim``.
State = dict[str, Saved]


@dataclass
class Content:
    """The content of one checkpoint, or of a part of it."""

    layout: str  #: describes the kind of checkpoint and its path
    values: dict[str, Saved] = field(default_factory=dict)  #: parameters and buffers
    #: The states by parameter name, or by the parameter's number in the optimizer's groups.
    states: dict[str | int, State] = field(default_factory=dict)
    #: How many numbered parameters there are, or None if the states have names.
    places: int | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)  #: the groups' settings
    #: Our name for each moment that has another name, for each kind of optimizer; None for a moment
    #: that is not needed.
    state_names: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    #: Other names of parameters that are there already. Such a name has a value but needs no place.
    aliases: set[str] = field(default_factory=set)
    #: Parameters that the saved optimizer had in its groups and never trained, if they may lack a state.
    untrained: set[str] = field(default_factory=set)


def of_tensor(tensor: torch.Tensor, file: Path) -> Saved:
    """Returns a tensor that is in memory already, as pages of the file."""
    return Saved(tuple(tensor.shape), file, lambda: tensor)


def add_trained(content: Content, name: str, state: State) -> None:
    """Adds a trained parameter, whose state has a master."""
    weight = content.values.get(name)
    if weight is not None and weight.shape == state["master"].shape:
        state["master"] = replace(state["master"], weight=weight)
    content.states[name] = state
    content.values[name] = state["master"]


def of_number(number: Any, file: Path) -> Saved:
    value = number if isinstance(number, torch.Tensor) else torch.tensor(float(number))
    return Saved((), file, lambda: value.reshape(()))


@dataclass(frozen=True)
class Piece:
    """`count` elements of a flat tensor, from `start` on."""

    flat: torch.Tensor
    start: int
    count: int


def of_pieces(name: str, pieces: Sequence[Piece], shape: Shape, file: Path) -> Saved:
    """Joins the `pieces` of a tensor that is divided among ranks, in the ranks' order.

    Errors: DataLoss if the pieces have more or fewer elements than `shape`.
    """
    found = sum(max(0, min(p.count, p.flat.numel() - p.start)) for p in pieces)
    if found != math.prod(shape):
        empty = all(piece.flat.numel() == 0 for piece in pieces)
        why = (
            "the state was on NVMe when it was saved, so it is not in the checkpoint: save it "
            "with the optimizer offloaded to the CPU, or not offloaded"
            if empty
            else "the files are not of one checkpoint, or were cut short; save the checkpoint again"
        )
        raise DataLoss(
            f"{file}: '{name}' has {found} elements in the ranks' files, but {math.prod(shape)} by "
            f"its shape: {why}"
        )

    def read() -> torch.Tensor:
        parts = [p.flat[p.start : p.start + p.count] for p in pieces if p.count > 0]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(shape)

    return Saved(shape, file, read)


def settings_of(groups: Any) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer's groups, without the parameters."""
    if not isinstance(groups, (list, tuple)):
        return []
    return [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
        if isinstance(group, Mapping)
    ]


def state_of(entry: Mapping[str, Any], file: Path) -> State:
    """Returns what ``torch.optim`` keeps for one parameter: its tensors, and its step as a
    tensor."""
    state: State = {}
    for key, value in entry.items():
        if key == "step":
            state[key] = of_number(value, file)
        elif isinstance(value, torch.Tensor):
            state[str(key)] = of_tensor(value, file)
    return state
