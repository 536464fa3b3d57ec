# SPDX-License-Identifier: Apache-2.0
"""Refuses models that cannot be offloaded, before offload() and where a script has changed one since."""

from __future__ import annotations

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._native import Unimplemented


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


def warn_of_no_optimizer() -> None:
    """Warns that nothing takes the parameters of an offloaded model that seems to be trained."""
    warnings.warn(
        "the offloaded model is called with gradients, and no optimizer of ziggurat has its parameters, so that "
        "all of them stay in memory: train it with ziggurat.torch.AdamW(model.parameters()) or another of "
        "ziggurat.torch, made before the first forward, or compute under torch.no_grad()",
        stacklevel=8,  # the model's call
    )
