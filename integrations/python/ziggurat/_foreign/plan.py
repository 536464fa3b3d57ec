# SPDX-License-Identifier: Apache-2.0
"""Decides what of a checkpoint goes where in a model and its optimizer, and what fits nowhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._foreign.content import Content, Saved, State
from ziggurat._library.native import InvalidArgument
from ziggurat._library.state_kinds import moments_of
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._pytorch.names import names_alone, names_in


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a state dict holds."""
    left_out = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    every = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in every if name not in left_out}


def _older_names(model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the model's names by the names that other checkpoints use: state dicts of the wrapped
    model, and checkpoints of earlier versions, which kept the ``module.`` of DataParallel and
    AveragedModel."""
    prefix, inner = "", model
    while True:
        if isinstance(inner, DistributedDataParallel):
            prefix, inner = f"{prefix}module.", inner.module
        elif isinstance(its := getattr(inner, "_orig_mod", None), torch.nn.Module):
            prefix, inner = f"{prefix}_orig_mod.", its
        else:
            break
    inside = {name.removeprefix(prefix): short for name, short in names.items()}
    alone = names_alone(list(inside), wrapper=False)
    return {alone[name]: short for name, short in inside.items()} | inside | dict(names)


class Places:
    """What a checkpoint may fill: the model's parameters and buffers, and the optimizer's state."""

    def __init__(self, optimizer: EngineOptimizer, model: torch.nn.Module) -> None:
        params = dict(model.named_parameters(remove_duplicate=False))
        spelled = {**_saved_buffers(model), **params}
        names = names_in(model, spelled)
        self.targets: dict[str, torch.Tensor] = {names[its]: spelled[its] for its in spelled}
        self._older = _older_names(model, names)
        self._names: dict[torch.Tensor, str] = {}
        for name, target in self.targets.items():
            self._names.setdefault(target, name)
        self.ordered = [param for _, param, _ in optimizer._named()]
        # What was frozen since an engine has its state keeps that state.
        known_to_engine = optimizer._opened_with
        self.trained = [param for param in self.ordered if param.requires_grad or param in known_to_engine]
        self.kind = optimizer._kind
        known = set(params.values())
        for name, param, _ in optimizer._named():
            if param not in known:
                raise InvalidArgument(
                    f"parameter '{name}' of the optimizer is not in the model: give the model that "
                    "the optimizer trains"
                )

    def name_here(self, name: str, short: str) -> str:
        """Returns the model's name for a checkpoint's `name`; `short` is that name without known
        wrappers."""
        for its in (name, short):
            if its in self.targets:
                return its
            if its in self._older:
                return self._older[its]
        return short

    def name_of(self, target: torch.Tensor) -> str:
        """Returns a tensor's name; a tied tensor has several, of which this is the first."""
        return self._names[target]


class Plan:
    """Matches a checkpoint's content with a model and its optimizer; reads no values yet."""

    def __init__(self, content: Content, places: Places) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong_shapes: list[str] = []
        self.values: dict[torch.Tensor, Saved] = {}
        self.states: dict[torch.Tensor, State] = {}
        self._content, self._places = content, places
        self._moments = moments_of(places.kind)
        self._match_values()
        self._match_states()
        for name, target in places.targets.items():
            if target not in self.values and places.name_of(target) == name:
                self.missing.append(name)

    def _match_values(self) -> None:
        for name, saved in self._content.values.items():
            target = self._places.targets.get(name)
            if target is not None:
                if self._fits(name, saved, target):
                    self.values.setdefault(target, saved)
            elif name not in self._content.aliases:
                self.unexpected.append(name)

    def _match_states(self) -> None:
        content, places = self._content, self._places
        if content.places is not None and content.places != len(places.ordered):
            raise InvalidArgument(
                f"{content.layout}: the saved optimizer has {content.places} parameters, but this "
                f"optimizer has {len(places.ordered)}. They are matched in their order: give this "
                "optimizer the same groups"
            )
        trained, seen = set(places.trained), set()
        for key, state in content.states.items():
            param = places.ordered[key] if isinstance(key, int) else places.targets.get(key)
            name = str(key) if param is None else places.name_of(param)
            if param in trained:
                seen.add(param)
                self._match_state(name, state, param)
            else:
                self.unexpected += [f"{name}: {kind}" for kind in state if kind != "master"]
        for param in places.trained:
            if param in seen or places.name_of(param) in content.untrained:
                continue
            self.missing += [f"{places.name_of(param)}: {kind}" for kind in self._moments]

    def _match_state(self, name: str, state: State, param: torch.Tensor) -> None:
        names = self._content.state_names.get(self._places.kind, {})
        renamed = ((names.get(kind, kind), saved) for kind, saved in state.items())
        state = {kind: saved for kind, saved in renamed if kind is not None}
        wanted = {"master", "step", *self._moments}
        self.unexpected += [f"{name}: {kind}" for kind in state if kind not in wanted]
        known = {kind: saved for kind, saved in state.items() if kind in wanted}
        fitting = {
            kind
            for kind, saved in known.items()
            if kind == "step" or self._fits(f"{name}: {kind}", saved, param)
        }
        if "master" in fitting:
            self.values[param] = known["master"]
        lacking = [kind for kind in (*self._moments, "step") if kind not in known]
        if self._places.kind == "sgd" and lacking == ["step"]:
            lacking = []  # PyTorch's SGD counts no steps
        if not lacking:
            self.states[param] = known
        # without any state it never had a gradient: torch.optim lists it, but keeps nothing for it
        elif state:
            self.missing += [f"{name}: {kind}" for kind in lacking]

    def _fits(self, name: str, saved: Saved, target: torch.Tensor) -> bool:
        if saved.shape == tuple(target.shape):
            return True
        self.wrong_shapes.append(
            f"{name} is {saved.shape} in {saved.file}, but {tuple(target.shape)} in the model"
        )
        return False
