# SPDX-License-Identifier: Apache-2.0
"""The optimizers and the formats of their state, as the engine's library describes them. This
module imports no PyTorch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from ziggurat._library.abi import call


@dataclass(frozen=True)
class Optimizer:
    name: str
    title: str  #: its class in ziggurat.torch
    moments: tuple[str, ...]  #: as torch.optim calls them
    settings: dict[str, Any]  #: what it reads, with the defaults
    initial_accumulator: bool  #: whether its first moment begins at a given value


@dataclass(frozen=True)
class Format:
    name: str
    holds_param: bool  #: whether records have the bf16 parameter itself
    rounds_state: bool  #: whether anything is rounded to bf16 from step to step
    codes: bool  #: whether moments are 8-bit codes in blocks


@functools.cache
def _described() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(call("ziggurat_state_kinds"))
    return described


@functools.cache
def optimizers() -> dict[str, Optimizer]:
    """Returns the optimizers by name."""
    described = [one | {"moments": tuple(one["moments"])} for one in _described()["optimizers"]]
    return {one["name"]: Optimizer(**one) for one in described}


@functools.cache
def formats() -> dict[str, Format]:
    """Returns the formats by name."""
    return {one["name"]: Format(**one) for one in _described()["formats"]}


def moments_of(optimizer: str) -> tuple[str, ...]:
    return optimizers()[optimizer].moments


def has_codes(state_format: str | None) -> bool:
    """Returns whether moments are kept in blocks; False for a format that the engine will refuse."""
    its = formats().get(state_format or "")
    return its is not None and its.codes


def begins_with_param(state_format: str, param_bytes: int) -> bool:
    """Returns whether records have parameters of so many bytes an element bit for bit: an fp32
    parameter is its own master."""
    its = formats().get(state_format)
    return its is not None and param_bytes == (2 if its.holds_param else 4)
