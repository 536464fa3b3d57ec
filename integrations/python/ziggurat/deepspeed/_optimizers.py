# SPDX-License-Identifier: Apache-2.0
"""Makes the engine's optimizer: by its name in the configuration, or in place of the script's
own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch

import ziggurat.torch
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._memory.memory import size_of
from ziggurat._memory.placement import parsed
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._loss_scale import LossScale
from ziggurat.deepspeed.ops._stand_in import StandIn

_OF_TORCH: dict[type[torch.optim.Optimizer], type[EngineOptimizer]] = {
    torch.optim.AdamW: ziggurat.torch.AdamW,
    torch.optim.Adam: ziggurat.torch.Adam,
    torch.optim.SGD: ziggurat.torch.SGD,
    torch.optim.Adagrad: ziggurat.torch.Adagrad,
}
_OF_KIND: dict[str, type[EngineOptimizer]] = {
    "adamw": ziggurat.torch.AdamW,
    "adam": ziggurat.torch.Adam,
    "lion": ziggurat.torch.Lion,
    "adagrad": ziggurat.torch.Adagrad,
}
# Group settings of other optimizers that are accepted only with these values, which have no effect.
_OFF = {"amsgrad": False, "bias_correction": True}
_NO_MEANING = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


class _InEngine(EngineOptimizer):
    """Adds what scripts read from the optimizer that ``initialize()`` returns."""

    _scale: LossScale
    overflow = False  #: whether the newest step was left out

    @property
    def cur_scale(self) -> float:
        return self._scale.cur_scale

    @property
    def loss_scale(self) -> float:
        return self._scale.cur_scale


def _in_engine(kind: type[EngineOptimizer]) -> Any:
    return type(kind.__name__, (_InEngine, kind), {})


def groups_of(params: Iterable[Any], module: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns a script's ``model_parameters`` as groups with the module's names."""
    listed = list(params)
    if listed and isinstance(listed[0], tuple):
        listed = [param for _, param in listed]
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    names = {param: name for name, param in module.named_parameters()}
    return [_with_names(group, names) for group in groups]


def _with_names(group: dict[str, Any], names: dict[Any, str]) -> dict[str, Any]:
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    called = [names.get(param, f"(none) {i}") for i, param in enumerate(params)]
    return group | {"params": params, "param_names": called}


def named(config: Config, trained: list[dict[str, Any]], where: dict[str, Any]) -> Any:
    """Returns the optimizer that the configuration names, or None if it names none."""
    if config.optimizer_class is None:
        return None
    kind = getattr(ziggurat.torch, config.optimizer_class)
    return _in_engine(kind)(trained, **config.optimizer_arguments, **where)


def is_ours(client: torch.optim.Optimizer) -> bool:
    """Returns whether `client` is an optimizer of ziggurat.torch, which stays as it is."""
    return isinstance(client, EngineOptimizer) and not isinstance(client, StandIn)


def look_at_ours(client: EngineOptimizer, config: Config, ranks: int) -> None:
    """Checks that the script made `client` for as many ranks as train here, and as the config says.
    Errors: InvalidArgument, with what to change in the script."""
    who = f"initialize(): the script's {type(client).__name__}"
    made_for = 1 if client._sharing.ranks is None else client._sharing.ranks.size
    if made_for != ranks:
        raise InvalidArgument(
            f"{who} divides its state among {made_for} ranks, but {ranks} ranks train the model, "
            "and their gradients would not be exchanged: make the optimizer after "
            "deepspeed.init_distributed(), with group=torch.distributed.group.WORLD, or name an "
            "optimizer in the configuration"
        )
    has = {"threads": client._threads} | client._settings | {"placement": client._given_placement}
    for name, (value, key) in config.named_arguments.items():
        if name == "placement" and _means(name, client.placement) == _means(name, value):
            continue  # what "auto" chose
        if _means(name, has.get(name)) != _means(name, value):
            raise InvalidArgument(
                f'{who} has {name}={has.get(name)!r}, but "{key}" of the configuration asks for '
                f"{name}={value!r}: give the optimizer {name}={value!r}, or leave the key out"
            )


def _means(name: str, value: Any) -> Any:
    """Returns what is equal for two spellings of one setting."""
    if name == "placement" and value is not None:
        tier, path = parsed(value)
        return tier, path and os.path.abspath(path)
    if name == "host_memory" and value is not None:
        return value if math.isnan(size := size_of(value)) else size
    return value


def in_place_of(
    client: torch.optim.Optimizer, module: torch.nn.Module, where: dict[str, Any]
) -> Any:
    """Returns our optimizer with the groups and settings of `client`, which share them from now on.

    A scheduler that the script made for `client` therefore still works. Errors: Unimplemented if
    `client` has no counterpart.
    """
    kind = _OF_KIND[client._kind] if isinstance(client, StandIn) else _counterpart(client)
    for group in client.param_groups:
        _refuse_what_is_on(group, type(client).__name__)
    client.param_groups[:] = [group for group in client.param_groups if group["params"]]
    left_out = (*_NO_MEANING, *_OFF)
    groups = [{k: group[k] for k in group if k not in left_out} for group in client.param_groups]
    has_state = any(float(state.get("step", 1)) > 0 for state in client.state.values() if state)
    state_dict = client.state_dict() if has_state else None
    if isinstance(client, StandIn):
        where = {"state_format": client._settings["state_format"]} | where
        client.close()  # the client's hooks would take the gradients
    ours = _in_engine(kind)(groups_of(groups, module), **where)
    if state_dict is not None:
        ours.load_state_dict(state_dict)
    share_groups(ours, client)
    return ours


def _counterpart(client: torch.optim.Optimizer) -> type[EngineOptimizer]:
    kind = _OF_TORCH.get(type(client))
    if kind is None:
        raise Unimplemented(
            f"the optimizer {type(client).__module__}.{type(client).__name__} has no counterpart: "
            "give AdamW, Adam, SGD or Adagrad of torch.optim, an optimizer of ziggurat.torch (on "
            "several ranks with group=), or name an optimizer in the configuration"
        )
    decoupled = any(group.get("decoupled_weight_decay") for group in client.param_groups)
    return ziggurat.torch.AdamW if decoupled else kind


def _refuse_what_is_on(settings: dict[str, Any], whose: str) -> None:
    for key, off in _OFF.items():
        if settings.get(key, off) != off:
            raise Unimplemented(
                f"{whose}: {key}={settings[key]} is not supported yet: leave it {off}"
            )


def share_groups(ours: torch.optim.Optimizer, client: torch.optim.Optimizer) -> None:
    """Makes both optimizers share their groups, so that what schedulers write to one is in the
    other too."""
    for theirs, group in zip(client.param_groups, ours.param_groups, strict=True):
        theirs.update(group)
    ours.param_groups = client.param_groups
