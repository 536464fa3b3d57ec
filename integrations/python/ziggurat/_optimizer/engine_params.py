# SPDX-License-Identifier: Apache-2.0
"""What an engine is told of the parts that it is given."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ziggurat._exchange.parts import Nothing, Part
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import InvalidArgument, Param, Unimplemented
from ziggurat._optimizer.device import check_device, check_layout
from ziggurat._optimizer.kept import KeptSlice


class Kind(NamedTuple):
    """The properties that a parameter may not change."""

    dtype: str
    shape: tuple[int, ...]  # the shape of this rank's part
    device: torch.device
    whole: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{self.dtype} of {self.whole}{where}"


def kind_of(part: Part, param: torch.Tensor, name: str) -> Kind:
    """Returns the kind of the part's memory `param`. Errors: InvalidArgument, which names the
    parameter, if the engine cannot take it."""
    check_device(param, name)
    if param.dtype not in DTYPES:
        raise InvalidArgument(f"parameter '{name}' is {param.dtype}, but must be fp32, bf16 or fp16")
    if not param.is_contiguous():
        check_layout(param, name)
    shape = tuple(param.shape)
    whole = shape if part.param is param else tuple(part.param.shape)
    return Kind(DTYPES[param.dtype], shape, param.device, whole)


def listed(
    parts: Sequence[Part],
    names: Sequence[str],
    kinds: Sequence[Kind],
    addresses: Sequence[int | None],
    groups: Sequence[int],
    lacking: Mapping[int, torch.Tensor],
) -> list[Param]:
    """Returns the parts as the engine takes them. `lacking`: the first values of some parts that the engine keeps;
    the caller holds them until the engine is open."""
    params = [
        Param(
            name,
            kind.shape,
            kind.dtype,
            address,
            group,
            unit=getattr(part, "unit", 0),
            optional=getattr(part, "optional", False),
        )
        for name, kind, address, group, part in zip(names, kinds, addresses, groups, parts, strict=True)
    ]
    for i, values in lacking.items():
        params[i] = replace(params[i], begins_at=values.data_ptr())
    return params


def lacking_in(
    checkpoint: Mapping[str, Any], parts: Sequence[Part], kept: Container[int]
) -> dict[int, torch.Tensor]:
    """Returns, by index, the values of what the engine keeps, and the checkpoint lacks."""
    return {
        i: _values_here(parts[i]).detach().contiguous()
        for i, given in enumerate(checkpoint["parts"])
        if given is None and i in kept
    }


def _values_here(part: Part) -> torch.Tensor:
    """Returns the part's elements before an engine has it."""
    return part.values_here() if isinstance(part, KeptSlice) else part.memory()


def settings_of_places(parts: Sequence[Part], names: Sequence[str], count: int, in_store: bool) -> dict[str, Any]:
    """Returns the engine's settings that say where in which parameter each part is; `count`: of all that the engine
    is given, of which the parts come first."""
    settings: dict[str, Any] = {}
    # The engine rounds an element alike on whatever rank it is, if the settings, the store or the checkpoint ask for
    # stochastic rounding.
    firsts = [part.first_element() if part.is_run() else 0 for part in parts]
    if any(firsts):  # frozen ones are never rounded
        settings["first_elements"] = firsts + [0] * (count - len(firsts))
    if in_store and (pieces := _pieces(parts, names)) is not None:
        settings["pieces"] = pieces
    return settings


def _pieces(parts: Sequence[Part], names: Sequence[str]) -> list[dict[str, Any] | None] | None:
    """Says of each part where in which parameter it is, so that the store can be divided among
    other ranks. None if a part has no such place: its store stays with its ranks."""
    pieces: list[dict[str, Any] | None] = []
    for part, name in zip(parts, names, strict=True):
        if isinstance(part, Nothing):
            pieces.append(None)
            continue
        try:
            place = part.place()
        except Unimplemented:
            return None
        pieces.append({"name": name, "shape": list(part.param.shape)} | place)
    return pieces
