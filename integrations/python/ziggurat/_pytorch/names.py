# SPDX-License-Identifier: Apache-2.0
"""Removes from parameters' names what PyTorch's wrappers add, and matches two lists of names.

``torch.compile`` adds ``_orig_mod.`` to the names of what it compiles, a whole model or blocks of
it. A wrapper like DistributedDataParallel adds ``module.``. Neither says anything about a
parameter, so both are removed wherever they stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ziggurat._library.native import InvalidArgument

_COMPILED = "_orig_mod"
_WRAPPED = "module"
_WRAPPERS = (DistributedDataParallel, DataParallel, AveragedModel)
_GENERATED = re.compile(r"group\d+\.\d+")
_SHOWN = 8  # the most names that an error lists


def names_in(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns each of the model's `names` without what PyTorch's wrappers add. The ``module.`` of
    any other wrapper stays."""
    wrappers = {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _WRAPPERS)
    }

    def without(name: str) -> str:
        path, kept = "", []
        for part in name.split("."):
            if part != _COMPILED and not (part == _WRAPPED and path in wrappers):
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    return _distinct({name: without(name) for name in names})


def names_alone(names: Sequence[str], *, wrapper: bool = True) -> dict[str, str]:
    """Returns each of `names` without ``_orig_mod.``, for a model that is not known. With `wrapper`
    a ``module.`` with which all of the names begin is removed too."""
    every = [[part for part in name.split(".") if part != _COMPILED] for name in names]
    if wrapper and every and all(parts[0] == _WRAPPED and len(parts) > 1 for parts in every):
        every = [parts[1:] for parts in every]
    return _distinct({name: ".".join(parts) for name, parts in zip(names, every, strict=True)})


def _distinct(named: dict[str, str]) -> dict[str, str]:
    """Keeps the old names where two new names would be equal."""
    times = Counter(named.values())
    kept = {old: new if times[new] == 1 else old for old, new in named.items()}
    return kept if len(set(kept.values())) == len(kept) else {old: old for old in named}


def generated(group: int, place: int) -> str:
    """Returns the name of a parameter that nobody has named."""
    return f"group{group}.{place}"


class Named(NamedTuple):
    """A parameter's name and shape, in a store or in a program."""

    name: str
    shape: tuple[int, ...]


def matched(store: str, stored: Sequence[Named], ours: Sequence[Sequence[Named]]) -> list[int]:
    """Returns for each parameter of a store, in the store's order, its place in `ours`. Matches by
    name, or by order if one side has made its names up.

    `ours` has the program's parameters in its order, once for each list of names that they go by;
    an error lists the first. Errors: InvalidArgument, which lists what differs.
    """
    spellings = [stored, [Named(short, one.shape) for short, one in _shortened(stored)]]
    for spelling in spellings:
        for own in ours:
            places = {one.name: place for place, one in enumerate(own)}
            if places.keys() == {one.name for one in spelling} and len(own) == len(spelling):
                order = [places[one.name] for one in spelling]
                _require_shapes(store, spelling, [own[place] for place in order])
                return order
    if any(made_up(one.name for one in params) for params in (stored, ours[0])):
        _require_shapes(store, stored, ours[0])
        return list(range(len(stored)))
    raise _differ(store, spellings[1], ours[0])


def _shortened(stored: Sequence[Named]) -> list[tuple[str, Named]]:
    short = names_alone([one.name for one in stored], wrapper=False)
    return [(short[one.name], one) for one in stored]


def made_up(names: Iterable[str]) -> bool:
    """Returns whether generated() made all of the names."""
    return all(_GENERATED.fullmatch(name) for name in names)


def _require_shapes(store: str, stored: Sequence[Named], ours: Sequence[Named]) -> None:
    if len(stored) != len(ours):
        raise InvalidArgument(
            f"{store} has {len(stored)} parameters, but this program trains {len(ours)}. They are "
            "matched in their order, because the store or the program does not name them: give "
            "the optimizer the parameters that the store was "
            "made with, or another directory"
        )
    other = [
        f"{there.name} is {there.shape} in the store and {here.name} is {here.shape} in the program"
        for there, here in zip(stored, ours, strict=True)
        if there.shape != here.shape
    ]
    if other:
        raise InvalidArgument(
            f"{store} has parameters of other shapes than this program ({shown(other)}): give the "
            "optimizer the parameters that the store was made with, in that order, or another "
            "directory"
        )


def _differ(store: str, stored: Sequence[Named], ours: Sequence[Named]) -> InvalidArgument:
    words = differences(
        [one.name for one in stored], [one.name for one in ours], "the store", "the program"
    )
    return InvalidArgument(
        f"{store} has other parameters than this program trains ({words}): give the optimizer the "
        "parameters that the store was made with, or another directory"
    )


def differences(theirs: Iterable[str], ours: Iterable[str], they: str, we: str) -> str:
    """Lists the names that only one side has; `they` and `we` name the sides."""
    there, here = dict.fromkeys(theirs), dict.fromkeys(ours)
    lists = {
        f"not in {they}": [name for name in here if name not in there],
        f"not in {we}": [name for name in there if name not in here],
    }
    return "; ".join(listed(what, names) for what, names in lists.items() if names)


def listed(what: str, names: Sequence[str]) -> str:
    return f"{what}: {shown(names)}"


def shown(names: Sequence[str]) -> str:
    """Lists the first of `names`, and says how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def ours_by_number(
    saved: Mapping[object, str], ours: Mapping[str, object]
) -> dict[object, object] | None:
    """Returns which of `ours` each number of a state dict stands for, by the names that both give,
    or None if they share no name. Errors: InvalidArgument if they share only some."""
    names = list(saved.values())
    shared = False
    for spelling in (dict(zip(names, names, strict=True)), names_alone(names)):
        theirs = {number: spelling[name] for number, name in saved.items()}
        if set(theirs.values()) == ours.keys():
            return {number: ours[name] for number, name in theirs.items()}
        shared = shared or not ours.keys().isdisjoint(theirs.values())
    if not shared:
        return None
    raise InvalidArgument(
        "load_state_dict(): the state dict and this optimizer share only some names "
        f"({differences(theirs.values(), ours, 'the state dict', 'the optimizer')}): give the "
        "optimizer the parameters that the state dict was saved with"
    )
