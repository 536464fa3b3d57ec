# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of another trainer has, by name, before any of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ziggurat._native import DataLoss

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor in a file. ``read()`` brings it into memory, as a whole."""

    shape: Shape
    file: Path  #: named in errors
    read: Callable[[], torch.Tensor]
    weight: Saved | None = None  #: what the trainer rounded this master to, where it is there too


#: Of a parameter: "master" (fp32), "step", and moments by their names in ``torch.optim``.
State = dict[str, Saved]


@dataclass
class Content:
    """One checkpoint, or part of one."""

    layout: str  #: in words
    values: dict[str, Saved] = field(default_factory=dict)  #: parameters and buffers
    #: By parameter; a number is its place among all parameters of the optimizer's groups.
    states: dict[str | int, State] = field(default_factory=dict)
    #: How many places there are; None: states go by name.
    places: int | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)  #: their settings
    #: By the optimizer's kind, its moments under other names; None: what is not needed.
    state_names: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    #: What has a value but needs no place of its own: another name of a parameter that has one.
    aliases: set[str] = field(default_factory=set)


def of_tensor(tensor: torch.Tensor, file: Path) -> Saved:
    """Of one that is there already, as the file's pages."""
    return Saved(tuple(tensor.shape), file, lambda: tensor)


def add_trained(content: Content, name: str, state: State) -> None:
    """A parameter whose state has a master."""
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
    """One that is divided among ranks: `pieces` are in their order.

    Errors: DataLoss where they are not as many elements as `shape` has.
    """
    found = sum(max(0, min(p.count, p.flat.numel() - p.start)) for p in pieces)
    if found != math.prod(shape):
        empty = all(piece.flat.numel() == 0 for piece in pieces)
        why = (
            "the state was on NVMe when it was saved, so it is not in the checkpoint: save it "
            "with the optimizer offloaded to the CPU, or not offloaded"
            if empty
            else "the files are not of one checkpoint, or were cut: save it again"
        )
        raise DataLoss(
            f"{file}: '{name}' has {found} elements here, but {math.prod(shape)} by its shape: "
            f"{why}"
        )

    def read() -> torch.Tensor:
        parts = [p.flat[p.start : p.start + p.count] for p in pieces if p.count > 0]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(shape)

    return Saved(shape, file, read)


def settings_of(groups: Any) -> list[dict[str, Any]]:
    """Of an optimizer's groups, without their parameters."""
    if not isinstance(groups, (list, tuple)):
        return []
    return [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
        if isinstance(group, Mapping)
    ]


def state_of(entry: Mapping[str, Any], file: Path) -> State:
    """Of what ``torch.optim`` has of one parameter: tensors and numbers; None is left out."""
    state: State = {}
    for key, value in entry.items():
        if key == "step":
            state[key] = of_number(value, file)
        elif isinstance(value, torch.Tensor):
            state[str(key)] = of_tensor(value, file)
    return state
