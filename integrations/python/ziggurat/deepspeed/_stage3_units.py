# SPDX-License-Identifier: Apache-2.0
"""Chooses the units of a model in ZeRO stage 3: the modules whose parameters are brought together.

They are what ``offload(units="auto")`` takes, with two changes that a script or its configuration
asks for: a leaf module is one unit with all that is in it, and a parameter that was registered as
external to its module is there as long as the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._library.native import InvalidArgument
from ziggurat._library.packing import TILE
from ziggurat._units.unit_choice import NEVER_CALLED, chosen_in
from ziggurat.deepspeed._config import LeafModules
from ziggurat.deepspeed._tiling import TiledLinear

_FLAG = "_z3_leaf"  # DeepSpeed's name: some scripts set it themselves

#: The parameters of register_external_parameter(), each with how often it is registered.
_external: Any = WeakTensorKeyDictionary()


def register(param: torch.nn.Parameter) -> None:
    _external[param] = _external.get(param, 0) + 1


def unregister(param: torch.nn.Parameter) -> None:
    left = _external.get(param, 0) - 1
    if left > 0:
        _external[param] = left
    elif left == 0:
        del _external[param]


def set_leaf(module: torch.nn.Module, flag: bool) -> None:
    setattr(module, _FLAG, flag)


def is_leaf(module: torch.nn.Module) -> bool:
    return bool(getattr(module, _FLAG, False))


def of_classes(model: torch.nn.Module, classes: Sequence[Any]) -> list[torch.nn.Module]:
    """Returns the modules of classes that are given themselves, by name, or by module and name."""
    for one in classes:
        if not isinstance(one, str | type):
            raise InvalidArgument(f"leaf_module_classes: {one!r} is no class: give classes or their names")
    kinds = tuple(one for one in classes if isinstance(one, type))
    names = {one for one in classes if isinstance(one, str)}
    return [one for one in model.modules() if isinstance(one, kinds) or names & _names_of(type(one))]


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def take_leaves(model: torch.nn.Module, leaves: LeafModules) -> None:
    """Makes the modules leaves that the configuration names. Errors: InvalidArgument for a name that
    the model does not have."""
    named = dict(model.named_modules())
    found = of_classes(model, leaves.classes)
    for name in leaves.names:
        if name not in named:
            raise InvalidArgument(
                f'zero_optimization.leaf_module.names: the model has no module "{name}": give names as '
                "model.named_modules() has them"
            )
        found.append(named[name])
    for suffix in leaves.name_suffixes:
        found += [module for name, module in named.items() if name.endswith(suffix)]
    for module in found:
        set_leaf(module, True)


def units_of(model: torch.nn.Module) -> list[str]:
    """Returns the names of the modules that are units. The model as a whole is always one, with all
    that no other has."""
    names = {module: name for name, module in model.named_modules()}
    chosen = set(chosen_in(model, "auto"))
    for tiled in model.modules():
        if isinstance(tiled, TiledLinear):  # a tile is used by itself, and so is brought by itself
            chosen |= {tile for tile in tiled.tiles() if _size(tile) >= TILE}
    for leaf in model.modules():
        if is_leaf(leaf) and not isinstance(leaf, NEVER_CALLED):
            chosen -= set(leaf.modules())
            chosen.add(leaf)
    chosen.discard(model)
    chosen = {one for one in chosen if not any(param in _external for param in one.parameters())}
    return [names[module] for module in model.modules() if module in chosen]


def _size(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
