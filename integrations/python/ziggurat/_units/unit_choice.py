# SPDX-License-Identifier: Apache-2.0
"""Chooses the modules of a model that are units: by hand, or the repeated blocks and what is as large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._library.packing import TILE

Choice = str | Sequence[str] | Callable[[str, torch.nn.Module], bool]


def chosen_in(model: torch.nn.Module, choice: Choice) -> dict[torch.nn.Module, str]:
    """Returns the modules that are units, and their names, in the model's order."""
    if choice == "auto":
        return _automatic(model)
    modules = dict(model.named_modules())
    if callable(choice):
        choice = [name for name, module in modules.items() if name and choice(name, module)]
    if isinstance(choice, str):
        raise InvalidArgument(
            f'units="{choice}": give "auto", a list with names of modules, or a function of a '
            "module's name and the module"
        )
    for name in choice:
        if name not in modules or not name:
            raise InvalidArgument(
                f"units: the model has no module '{name}': give names as model.named_modules() "
                "has them"
            )
        if isinstance(modules[name], NEVER_CALLED):
            raise InvalidArgument(
                f"units: '{name}' is a {type(modules[name]).__name__}, which is never called, so "
                f"that nothing would bring its parameters: name its elements, such as '{name}.0'"
            )
    return {module: name for name, module in modules.items() if name in set(choice)}


#: Modules that only hold others.
NEVER_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)


def _automatic(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Takes the repeated blocks and their experts, and of what is outside them embeddings and large
    linear layers."""
    listed = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    chosen: dict[torch.nn.Module, str] = {}
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        is_block = type(module).__name__ in listed or isinstance(module, torch.nn.TransformerEncoderLayer)
        blocks = [module] if name and is_block else _repeated(module)
        for block in blocks:
            inside.update(block.modules())
            chosen[block] = ""
    for module in model.modules():
        # Exact types: others may be used without a call, as attention's output layer is.
        if module in inside or module is model or type(module) not in _LAYERS:
            continue
        if sum(param.numel() for param in module.parameters()) >= TILE:
            chosen[module] = ""
    chosen |= dict.fromkeys(experts_in(model) - _in_compiled(model), "")
    return {module: name for name, module in model.named_modules() if module in chosen}


_LAYERS = (torch.nn.Embedding, torch.nn.Linear)


def used_uncalled(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules inside whose parameters the module's own forward may use."""
    if not isinstance(module, torch.nn.TransformerEncoderLayer):
        return []
    # Its fused inference, of which only these are told.
    named = ("self_attn", "norm1", "norm2", "linear1", "linear2")
    inside = (getattr(module, name, None) for name in named)
    return [inner for one in inside if one is not None for inner in one.modules()]


def is_table(module: torch.nn.Module) -> bool:
    """Returns whether a forward does nothing but read rows of the module's weight."""
    its = type(module) is torch.nn.Embedding  # others may do more
    return its and module.max_norm is None and not module.sparse


def experts_in(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Returns the experts that are modules of their own: what a list or a dict has several of, if the name
    or a class says that it is of experts. Which of them a forward calls, the batch decides."""
    found: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        elements = [one for one in module.children() if not isinstance(one, NEVER_CALLED)]
        count = Counter(map(type, elements))
        for one in elements:
            told = f"{name.rpartition('.')[2]} {type(module).__name__} {type(one).__name__}"
            size = sum(param.numel() for param in one.parameters())
            if "expert" in told.lower() and count[type(one)] > 1 and size >= TILE:
                found.add(one)
    return found


def _in_compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Returns what is compiled as a part of another module, in which a unit would break the graph."""
    compiled = [one for one in model.modules() if one._compiled_call_impl is not None]
    return {inner for one in compiled for inner in one.modules() if inner is not one}


def _repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the repeated blocks of a list: all its elements if they are alike, else those that are
    no single layer and of which there is another one, as between an embedding and a head."""
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        return []
    elements = [
        one
        for one in module
        if not isinstance(one, NEVER_CALLED) and any(True for _ in one.parameters())
    ]
    count = Counter(map(type, elements))
    if len(count) > 1:
        elements = [one for one in elements if not _is_layer(one)]
    return [one for one in elements if count[type(one)] > 1 and type(one) not in _LAYERS]


def _is_layer(module: torch.nn.Module) -> bool:
    """Returns whether the module is one of PyTorch's that consists of no others."""
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())
