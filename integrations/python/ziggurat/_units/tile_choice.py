# SPDX-License-Identifier: Apache-2.0
"""Finds the linear layers that offload(tiles=) names, and where their tiles begin and end."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented

Tiles = Mapping[str, int]
Rows = tuple[int, int]  #: the first row of a tile, and the row behind its last

# Matrix products take so many rows at a time. A tile that began within such a group would add up its numbers
# in another order than the whole layer does, and have other bits.
_GROUP = 16
_TOLD = 4  # layers that an error names


def tiled_in(model: torch.nn.Module, tiles: Tiles) -> dict[torch.nn.Module, tuple[str, list[Rows]]]:
    """Returns the modules that `tiles` names, their names and tiles. Errors: InvalidArgument for a name that
    is no linear layer's, and a number of tiles that it cannot have; Unimplemented for a layer that may do more
    than torch.nn.Linear."""
    if not isinstance(tiles, Mapping):
        raise InvalidArgument(
            f'tiles={tiles!r}: give names of linear layers and how many tiles each has, as {{"lm_head": 8}}'
        )
    modules = {name: module for name, module in model.named_modules() if name}
    found = {}
    for name, count in tiles.items():
        if name not in modules:
            raise InvalidArgument(f"tiles: the model has no module '{name}': {_layers(modules)}")
        module = modules[name]
        if not isinstance(module, torch.nn.Linear):
            raise InvalidArgument(f"tiles: '{name}' is a {type(module).__name__}, no torch.nn.Linear: {_layers(modules)}")
        if type(module) is not torch.nn.Linear or "forward" in module.__dict__:
            raise Unimplemented(
                f"tiles: '{name}' is a {type(module).__name__} or has a forward of its own, which may do more than "
                "tiles do: name layers that are torch.nn.Linear itself, or leave it whole"
            )
        if not isinstance(count, int) or isinstance(count, bool) or not 2 <= count <= module.out_features:
            raise InvalidArgument(
                f"tiles: {count!r} tiles of '{name}', which has {module.out_features} rows: give from 2 to "
                f"{module.out_features}, or leave it out"
            )
        found[module] = (name, rows_of(module.out_features, count))
    return found


def rows_of(rows: int, count: int) -> list[Rows]:
    """Divides `rows` into `count` tiles that are as large as each other, but for less than a group."""
    group = _GROUP if rows // count >= _GROUP else 1
    begins = [place * rows // count // group * group for place in range(count)]
    return list(zip(begins, [*begins[1:], rows], strict=True))


def require_own(
    module: torch.nn.Module, name: str, named: Container[torch.Tensor], homes: Mapping[torch.nn.Parameter, Sequence[object]]
) -> None:
    """Errors: Unimplemented if other modules use a parameter of a layer that has tiles: they would need all of
    it at once. `homes` are the units that use each parameter."""
    for own, param in module.named_parameters(recurse=False):
        if param in named and list(homes[param]) != [module]:
            raise Unimplemented(
                f"tiles: '{name}.{own}' is also used by other modules, as where an embedding is tied to a head, and they "
                f"need all of it: untie them, or leave '{name}' out of tiles"
            )


def _layers(modules: Mapping[str, torch.nn.Module]) -> str:
    """Returns words that name the largest linear layers."""
    linear = {name: one for name, one in modules.items() if type(one) is torch.nn.Linear}
    if not linear:
        return "it has no torch.nn.Linear"
    largest = sorted(linear, key=lambda name: linear[name].weight.numel(), reverse=True)[:_TOLD]
    others = f", and {len(linear) - len(largest)} others" if len(linear) > len(largest) else ""
    told = ", ".join(f"'{name}'" for name in largest)
    return f"its linear layers are {told}{others}"
