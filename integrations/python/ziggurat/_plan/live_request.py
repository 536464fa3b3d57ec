# SPDX-License-Identifier: Apache-2.0
"""What plan() of a module that is not offloaded is asked, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._plan.recorded_step import Runs, tensors
from ziggurat._units.refusals import check_sharing

Loss = Callable[[Any, Any], torch.Tensor]


def plain_module(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that a wrapper has. Errors: Unimplemented for one that others have divided already."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)
    check_sharing(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Unimplemented(
                f"plan(): module '{name or 'the model'}' is a {type(module).__name__}, which computes with "
                "no parameters but its own: give plan() the module that it was made from"
            )
    if not any(param.requires_grad for param in model.parameters()):
        raise InvalidArgument(
            "plan(): no parameter of the model is trained, so that there is no step: call requires_grad_() of those to "
            "train before"
        )
    if any(isinstance(param, torch.nn.parameter.UninitializedTensorMixin) for param in model.parameters()):
        raise InvalidArgument("plan(): the model has lazy parameters without a shape: call it once before")
    return model


def check_batch(batch: Any) -> None:
    found = list(tensors(batch))
    if not found:
        raise InvalidArgument(
            f"plan(): the batch, a {type(batch).__name__}, has no tensor: give what the model is called with, which is a "
            "tensor, a dictionary of arguments or a list of them"
        )
    if any(one.dim() and len(one) == 0 for one in found):
        raise InvalidArgument("plan(): a tensor of the batch has no rows: give a batch as the model is trained with")
    if torch.is_inference_mode_enabled():
        raise InvalidArgument("plan(): there is no backward in torch.inference_mode(): call it outside")


def runs_of(model: torch.nn.Module, loss: Loss | None) -> Runs:
    """Returns a function that computes the loss of a batch, and the output."""
    if loss is not None and not callable(loss):
        raise InvalidArgument(
            f"plan(): loss is a {type(loss).__name__}: give a function of the output and the batch that returns the loss"
        )

    def run(batch: Any) -> tuple[torch.Tensor, Any]:
        if isinstance(batch, torch.Tensor):
            output = model(batch)
        elif hasattr(batch, "items"):
            output = model(**batch)
        else:
            output = model(*batch)
        its = _loss_in(output) if loss is None else loss(output, batch)
        if its is None and isinstance(output, torch.Tensor) and output.numel() == 1:
            its = output
        if not isinstance(its, torch.Tensor) or its.numel() != 1:
            raise InvalidArgument(
                "plan(): the model returns no loss: give loss=, a function of the output and the batch that returns it"
                if loss is None
                else f"plan(): loss= has returned {_told(its)}: it must return a tensor of one element"
            )
        if not its.requires_grad:
            raise InvalidArgument("plan(): the loss depends on no parameter that is trained, so that there is no backward")
        return its, output

    return run


def _told(value: Any) -> str:
    return f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
