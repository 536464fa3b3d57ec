# SPDX-License-Identifier: Apache-2.0
"""Refuses models that cannot be offloaded, before offload() and where a script has changed one since."""

from __future__ import annotations

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._pytorch import storages

_CPU = torch.device("cpu")


def check_model(model: torch.nn.Module) -> None:
    """Errors: Unimplemented for a model that cannot be offloaded, by the module's name."""
    check_sharing(model)
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, torch.jit.ScriptModule)):
            raise Unimplemented(
                f"module '{name or 'the model'}' is a {type(module).__name__}, whose parameters "
                "cannot be offloaded: give offload() the plain model"
            )
        if hasattr(module, "_orig_mod"):
            raise Unimplemented(
                f"module '{name or 'the model'}' is compiled already: call offload() before "
                "torch.compile()"
            )


def check_sharing(model: torch.nn.Module) -> None:
    """Errors: Unimplemented for a model that is, or was since offload(), shared among several processes."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise Unimplemented(
                f"module '{name or 'the model'}' was given to fully_shard(), and its parameters are others now, "
                "which cannot be offloaded: leave out offload() or fully_shard()"
            )


def check_params(
    named: dict[torch.nn.Parameter, str],
    device: torch.device = _CPU,
    also_meta: bool = False,
) -> None:
    """Checks parameters that are brought to a device. Errors: what the engine cannot keep, by its name."""
    users: dict[int, str] = {}
    for param, name in named.items():
        _check_kind(param, name)
        if not (also_meta and param.is_meta):
            _check_device(param, name, device)
        other = users.setdefault(storages.identity(param), name)
        if other != name:
            raise InvalidArgument(
                f"parameters '{other}' and '{name}' are different parameters in one memory: "
                "tie them by giving both modules the same parameter, or give one its .clone()"
            )
    for param, name in named.items():
        if storages.shares_memory(param):
            raise InvalidArgument(
                f"parameter '{name}' is a part of a larger memory, which cannot go with it: make "
                "the parameter from its .clone()"
            )


def _check_device(param: torch.nn.Parameter, name: str, device: torch.device) -> None:
    # "cuda" alone, which plan() takes where no GPU need be, is whichever has the parameter.
    elsewhere = param.device.type != device.type if device.index is None else param.device != device
    if param.device.type != "cpu" and elsewhere:
        way = f', or offload(model, device="{param.device}")' if param.device.type == "cuda" else ""
        raise Unimplemented(
            f"parameter '{name}' is on {param.device}, and its units are brought to {device}: call offload() "
            f"before model.to(){way}"
        )
    if param.device.type == "cpu" and param.is_shared() and not param.untyped_storage().filename:
        raise Unimplemented(
            f"parameter '{name}' is in shared memory, which other processes may use: call offload() without "
            "share_memory() before"
        )


def _check_kind(param: torch.nn.Parameter, name: str) -> None:
    if type(param) is not torch.nn.Parameter:
        raise Unimplemented(
            f"parameter '{name}' is a {type(param).__name__}: only plain parameters can be "
            "offloaded; make it a torch.nn.Parameter"
        )
    if type(param.data) is not torch.Tensor:
        raise Unimplemented(
            f"parameter '{name}' holds a {type(param.data).__name__}: only plain tensors can be "
            "offloaded; make the parameter from a plain tensor"
        )
    if param.layout is not torch.strided or param.is_quantized:
        raise Unimplemented(
            f"parameter '{name}' is sparse or quantized, which offload() cannot keep: make it a "
            "dense tensor of floating point"
        )
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unimplemented(
            f"parameter '{name}' is {param.dtype}, but must be fp32, bf16 or fp16"
        )
    if not param.is_contiguous():
        raise Unimplemented(
            f"parameter '{name}' does not lie in the order of its indices: make it from its "
            ".contiguous() before offload()"
        )


def warn_of_no_optimizer() -> None:
    """Warns that nothing takes the parameters of an offloaded model that seems to be trained."""
    warnings.warn(
        "the offloaded model is called with gradients, and no optimizer of ziggurat has its parameters, so that "
        "all of them stay in memory: train it with ziggurat.torch.AdamW(model.parameters()) or another of "
        "ziggurat.torch, made before the first forward, or compute under torch.no_grad()",
        stacklevel=8,  # the model's call
    )
