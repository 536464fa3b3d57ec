# SPDX-License-Identifier: Apache-2.0
"""Finds what an optimizer keeps, and what its step takes beside that, by its own step on the meta device."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._plan.recorded_step import bytes_of_storages, counting


_NUMBERS_BYTES = 64  # Python's numbers, which operations on other devices make tensors of


class Update(NamedTuple):
    """Bytes of an optimizer."""

    state: int  #: kept from step to step
    beside: int  #: what a step takes at most, beyond what is there before and after it
    name: str


def optimizer_of(model: torch.nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer, or makes PyTorch's of that name. Errors: InvalidArgument if it has none."""
    if isinstance(optimizer, torch.optim.Optimizer):
        its = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(param) in its for param in model.parameters()):
            raise InvalidArgument("plan(): the optimizer has no parameter of the model: give the one that trains it")
        return optimizer
    if not isinstance(optimizer, str):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise InvalidArgument(
            f"plan(): optimizer is {'None' if optimizer is None else what}: give an optimizer of the model's "
            'parameters, or the name of one of PyTorch, as "adamw"'
        )
    known = {name.lower(): kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if optimizer.lower() not in known:
        raise InvalidArgument(
            f'plan(optimizer="{optimizer}"): PyTorch has no such optimizer; give it itself, or one of '
            f"{', '.join(sorted(known))}"
        )
    made: torch.optim.Optimizer = known[optimizer.lower()]([one for one in model.parameters() if one.requires_grad])
    return made


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def recorded_update(optimizer: torch.optim.Optimizer) -> Update:
    """Makes two steps of a copy on the meta device: the first makes the state, the second says what a step takes beside
    it. Errors: InvalidArgument for an optimizer that cannot, as one that wants a closure."""
    name = type(optimizer).__name__
    shapes = _without_hooks(optimizer)
    shapes.state = defaultdict(dict)
    shapes.param_groups = [_on_meta(group) for group in optimizer.param_groups]
    params = [param for group in shapes.param_groups for param in group["params"]]
    try:
        for param in params:
            param.grad = torch.empty_like(param)
        with counting():
            shapes.step()
        state = sum(bytes_of_storages(_state_tensors(shapes)).values())
        with counting() as counted:
            shapes.step()
        beside = max(moment.held for moment in counted.moments)
    except Exception as error:
        raise InvalidArgument(
            f"plan(): a step of {name} on the meta device, which would tell what it takes, failed ({error}): give the "
            'name of an optimizer of PyTorch that keeps as much, as "adamw"'
        ) from error
    # A fused step computes in place. The meta device has none, so that another one has told the state.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return Update(state, _NUMBERS_BYTES + (0 if fused else int(beside)), name)


def _without_hooks(optimizer: torch.optim.Optimizer) -> Any:
    """Returns a copy with all attributes, without the hooks that a script may have set, and without a step() of its
    own, which learning rate schedulers set."""
    shapes = object.__new__(type(optimizer))
    its = {name: _own(value) for name, value in vars(optimizer).items() if name != "step"}
    vars(shapes).update(its, **{name: OrderedDict() for name in its if "_hooks" in name})
    return shapes


def _own(value: Any) -> Any:
    """Returns a copy of what a step may write."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = (value for its in optimizer.state.values() for value in its.values())
    return [value for value in found if isinstance(value, torch.Tensor)]


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    params = [param for param in group["params"] if param.requires_grad]
    made = {**group, "params": [torch.nn.Parameter(param.detach().to("meta")) for param in params]}
    if made.get("fused"):
        made |= {"fused": None, "foreach": False}
    elif made.get("foreach") is None and "foreach" in made:
        made["foreach"] = any(param.device.type == "cuda" for param in params)
    return made
