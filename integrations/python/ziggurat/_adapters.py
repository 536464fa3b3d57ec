# SPDX-License-Identifier: Apache-2.0
"""Lets PEFT merge adapters into an offloaded model: a layer's parameters are there while it does.

A layer gets a made subclass, as the modules of units do (_passes.py). PEFT is not imported here: where a
script has not imported it, there are no such layers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ziggurat._gathered import brought
from ziggurat._streaming import Held, streaming_of
from ziggurat._subclass import subclass

_LAYERS, _MODELS = "BaseTunerLayer", "BaseTuner"  # of peft.tuners.tuners_utils


def bring_for_merges(model: torch.nn.Module) -> None:
    """Makes the calls that merge adapters into `model` bring the parameters, layer by layer. May be called
    again, when adapters were added."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    for module in model.modules():
        if "_merges" in type(module).__dict__:
            continue
        if isinstance(module, getattr(peft, _LAYERS)):
            module.__class__ = _layer(type(module))


@functools.cache
def _layer(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns the subclass of a layer's class whose merges bring the layer's parameters."""

    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _merged(self, original.merge, args, kwargs)  # type: ignore[attr-defined]

    def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _merged(self, original.unmerge, args, kwargs)  # type: ignore[attr-defined]

    return subclass(original, {"merge": merge, "unmerge": unmerge, "_merges": True})


def _merged(layer: torch.nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
    kept = [held for held in map(_held_of, layer.parameters()) if held is not None]
    with brought([held.param for held in kept]):
        result = call(layer, *args, **kwargs)
        frozen = (held for held in kept if not held.param.requires_grad)
        _note_writes(held for held in frozen if held.unit.unit.keeps(held.param))
    return result


def _held_of(param: torch.Tensor) -> Held | None:
    """Returns what keeps the parameter, if an engine has it."""
    found = streaming_of(param)
    return found[1] if found is not None and found[0].opened is not None else None


def _note_writes(kept: Iterable[Held]) -> None:
    """Counts writes through `.data`, which PyTorch does not, and puts values that were given other
    memory where the engine has them. Those of trained parameters are left out: without offload() the next
    step would not see them either."""
    for held in kept:
        if held.has_moved():
            values: Any = held.param.data
            own = torch.empty(0, dtype=values.dtype, device="cpu")
            own.set_(held.storage, 0, values.shape, values.stride())  # type: ignore[call-overload]
            held.param.data = own.copy_(values)
        torch.autograd.graph.increment_version(held.param)
