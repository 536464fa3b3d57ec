# SPDX-License-Identifier: Apache-2.0
"""Reads and writes masters, moments and gradients of one parameter between steps.

What writes, and what reads gradients, is called by all ranks; a rank may read masters and moments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._library.state_kinds import moments_of
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.rounding import rounded
from ziggurat._ranks.ranks import rank_count, several_ranks
from ziggurat._streaming.gathered import brought
from ziggurat.deepspeed._owners import owner_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

# Values that were set before the optimizer's first step; until then it has no state to read.
_set_before: Any = WeakTensorKeyDictionary()


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of the fp32 master on the CPU, or None for a parameter that no optimizer
    has."""
    optimizer = _of(param)
    if optimizer is None:
        return None
    master = _state(optimizer, param).get("master")
    if master is not None:
        return master
    with brought([param]):
        return param.detach().to("cpu", torch.float32, copy=True)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the master, and the parameter to the rounded master."""
    optimizer = _need(param)
    master = value.detach().to("cpu", torch.float32).reshape(param.shape)
    _give(optimizer, param, {"master": master})
    with brought([param]), torch.no_grad():
        param.copy_(rounded(master, param.dtype))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Returns a copy of a moment ("exp_avg", "exp_avg_sq", ...) on the CPU, in fp32."""
    optimizer = _of(param)
    if optimizer is None:
        return None
    return _moments(optimizer, param, optim_state_key).get(optim_state_key)


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets a moment, which the next step uses."""
    optimizer = _need(param)
    _moments(optimizer, param, optim_state_key)
    moment = value.detach().to("cpu", torch.float32).reshape(param.shape)
    _give(optimizer, param, {optim_state_key: moment})


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient that backward has accumulated, in fp32 and with the loss's scale, or
    None without a gradient."""
    return None if param.grad is None else param.grad.detach().clone().float()


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the gradient; call it after backward and before the step."""
    param.grad = value.detach().to(param.device, param.dtype, copy=True).reshape(param.shape)


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, Any], torch.Tensor]
) -> None:
    """Sets each gradient to ``update_func(gradient, parameter)``."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's part of the fp32 master, as a row: of one rank all of it."""
    return _part_of(safe_get_full_fp32_param(param))


def safe_get_local_optimizer_state(
    param: torch.Tensor, optim_state_key: str
) -> torch.Tensor | None:
    """Returns this rank's part of a moment, as a row."""
    return _part_of(safe_get_full_optimizer_state(param, optim_state_key))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's part of the gradient, in fp32 and with the loss's scale, as a row."""
    return _part_of(safe_get_full_grad(param))


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the master. Errors: Unimplemented on several ranks."""
    _need_one_rank("safe_set_local_fp32_param()")
    safe_set_full_fp32_param(param, value)


def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of a moment. Errors: Unimplemented on several ranks."""
    _need_one_rank("safe_set_local_optimizer_state()")
    safe_set_full_optimizer_state(param, value, optim_state_key)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient. Errors: Unimplemented on several ranks."""
    _need_one_rank("safe_set_local_grad()")
    safe_set_full_grad(param, value)


def forget_set(params: Iterable[torch.Tensor]) -> None:
    """Drops what was set for `params` before their first step, which has made their state: the copies
    are as large as that."""
    for param in params if _set_before else ():
        _set_before.pop(param, None)


def _part_of(whole: torch.Tensor | None) -> torch.Tensor | None:
    """Returns this rank's part as DeepSpeed divides a parameter: in parts of one size, the last of
    which may be shorter here, since it has no padding."""
    if whole is None:
        return None
    ranks = rank_count()
    if ranks == 1:
        return whole.flatten()
    size = -(-whole.numel() // ranks)
    begin = torch.distributed.get_rank() * size
    return whole.flatten()[begin : begin + size]


def _need_one_rank(call: str) -> None:
    if several_ranks():
        full = call.replace("local", "full")
        raise Unimplemented(f"{call} on several ranks is not supported yet: call {full} on all ranks")


def _of(param: torch.Tensor) -> EngineOptimizer | None:
    optimizer = owner_of(param)
    if optimizer is not None:
        optimizer.synchronize()
    return optimizer


def _need(param: torch.Tensor) -> EngineOptimizer:
    optimizer = _of(param)
    if optimizer is None:
        raise InvalidArgument(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: call this function "
            "after initialize(), with a parameter that is trained"
        )
    return optimizer


def _moments(optimizer: EngineOptimizer, param: torch.Tensor, key: str) -> dict[str, torch.Tensor]:
    """Returns the moments, which are zeros before the first step. Errors: InvalidArgument for a
    name that this optimizer lacks."""
    known = moments_of(optimizer._kind)
    if key not in known:
        raise InvalidArgument(
            f'optim_state_key="{key}" is not known: {type(optimizer).__name__} has '
            f'{", ".join(known)}'
        )
    begin = optimizer._settings.get("initial_accumulator", 0.0)
    begun = {name: torch.full(param.shape, begin, dtype=torch.float32) for name in known}
    state = _state(optimizer, param)
    return begun | {name: state[name] for name in known if name in state}


def _state(optimizer: EngineOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns copies of the state. Before the first step it has only what was set."""
    state = optimizer.state_of(param) or _set_before.get(param, {})
    return {name: value.clone() for name, value in state.items()}


def _give(optimizer: EngineOptimizer, param: torch.Tensor, changed: dict[str, Any]) -> None:
    """Loads the present state with the `changed` arrays; the optimizer's other parameters keep
    theirs."""
    entry = _moments(optimizer, param, moments_of(optimizer._kind)[0])
    entry |= {"step": torch.tensor(0.0)} | _state(optimizer, param) | changed
    optimizer.open()
    for opened in optimizer._opened:
        optimizer._give(opened, {param: entry}, fresh=True)
    if not optimizer.has_state_of(param):
        _set_before[param] = entry
