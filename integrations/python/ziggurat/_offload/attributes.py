# SPDX-License-Identifier: Apache-2.0
"""Finds what a model's forwards leave in its modules where another micro-batch's would find it.

A module that has units inside keeps its attributes while other micro-batches run: it must find them
as it has left them, but for the kind of labels that models of transformers note in their config, since only
the loss reads it. All else runs within one turn, and may use its attributes there; but each micro-batch must
leave them as the first has, because what comes later may read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._pytorch.subclass import OFFLOADED

Kept = dict[tuple[torch.nn.Module, str], Any]


class Attributes:
    """The attributes and buffers of a model's modules."""

    def __init__(self, model: torch.nn.Module, stages: dict[torch.nn.Module, str]) -> None:
        """`stages`: the modules at which micro-batches take turns, and what those are called."""
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        within = {one: list(one.modules()) for one in self._names}
        self._around = [one for one, inside in within.items() if not stages.keys().isdisjoint(inside[1:])]
        in_stages = {one for stage in stages for one in within.get(stage, ())}
        self._elsewhere = [one for one in within if one not in in_stages and one not in self._around]
        self._inside = {
            name: [one for one in within.get(stage, ()) if one not in self._around]
            for stage, name in stages.items()
        }

    def around(self) -> Kept:
        """Returns what modules keep that have units inside."""
        return _kept_by(self._around, closely=True)

    def in_turn(self, stage: str) -> Kept:
        """Returns what modules keep that may have run since the stage began."""
        return _kept_by((*self._inside.get(stage, ()), *self._elsewhere), closely=False)

    def require_same(self, before: Kept, now: Kept) -> None:
        """Errors: InvalidArgument if they differ, which names a module and its attribute."""
        if before == now:
            return
        for module, attribute in {**before, **now}:
            key = module, attribute
            changed = _changed(before.get(key), now.get(key))
            if changed is not None:
                raise InvalidArgument(
                    f"module '{self._names[module]}' changes its attribute '{attribute}{changed}' in forward, "
                    "and other micro-batches find it so, or replace it before it is used: pass it on or return "
                    "it instead, or use the ordinary loop"
                )


_OF_ALL = frozenset((*vars(torch.nn.Module()), OFFLOADED))  # attributes of PyTorch's, and ours
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LENGTH_MAX = 1000  # of lists that are looked through
# What models of transformers find out from the first labels, behind all units, and read there alone
_NOTED_OF_LABELS, _NONE = "problem_type", (type(None), None)


class _Same:
    """Is equal to itself only, and for as long as it is not written if its version counts."""

    def __init__(self, value: Any, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Same) and self._value is other._value
        return same and self._version == other._version  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def is_config(self) -> bool:
        """Returns whether it is a model's config of transformers."""
        return any(one.__module__.startswith("transformers.") for one in type(self._value).__mro__)


class _Object(NamedTuple):
    """An object, and what its own attributes are."""

    itself: _Same
    its: dict[str, Any]


def _changed(before: Any, now: Any) -> str | None:
    """Returns None for what has not changed, else which attribute of an object has, or nothing of that."""
    if before == now:
        return None
    if isinstance(before, _Object) and isinstance(now, _Object) and before.itself == now.itself:
        differ = [name for name in {**before.its, **now.its} if before.its.get(name) != now.its.get(name)]
        if differ == [_NOTED_OF_LABELS] and before.its.get(_NOTED_OF_LABELS) == _NONE and before.itself.is_config():
            return None
        return f".{differ[0]}"
    return ""


def _kept_by(modules: Iterable[torch.nn.Module], closely: bool) -> Kept:
    return {
        (module, name): _key(value, closely, depth=3)
        for module in modules
        for items in (vars(module), module._buffers)
        for name, value in items.items()
        if name not in _OF_ALL
    }


def _key(value: Any, closely: bool, depth: int) -> Any:
    """Returns what is equal as long as the value is. `closely`: also a tensor that is written, and what
    an object has."""
    if isinstance(value, torch.Tensor):
        counted = closely and not isinstance(value, torch.nn.Parameter) and not value.is_inference()
        return _Same(value, value._version if counted else 0)
    if isinstance(value, _PLAIN):
        return type(value), value
    if depth == 0 or isinstance(value, torch.nn.Module):
        return _Same(value)
    if isinstance(value, dict):
        return _keys((*value.keys(), *value.values()), closely, depth)
    if isinstance(value, (list, tuple, set)):
        return _keys(value, closely, depth)
    if closely and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        if len(vars(value)) > _LENGTH_MAX:
            return _Same(value)
        return _Object(_Same(value), {name: _key(one, closely, depth=0) for name, one in vars(value).items()})
    return _Same(value)


def _keys(values: Any, closely: bool, depth: int) -> Any:
    if len(values) > _LENGTH_MAX:
        return _Same(values), len(values)
    return [_key(one, closely, depth - 1) for one in values]
