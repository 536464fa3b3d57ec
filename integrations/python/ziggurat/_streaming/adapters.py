# SPDX-License-Identifier: Apache-2.0
"""Lets PEFT merge adapters into an offloaded model, and make prompts that are learned: the parameters of a layer,
or of what makes the prompts, are there while it does, also outside of the model's call.

A layer, or a model with such prompts, gets a made subclass, as the modules of units do (_offload/passes.py). PEFT is
not imported here: where a script has not imported it, there are none of both.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ziggurat._pytorch.subclass import subclass
from ziggurat._streaming.gathered import brought
from ziggurat._streaming.streaming import Held, streaming_of

_LAYERS = "BaseTunerLayer"  # of peft.tuners.tuners_utils


def bring_for_adapters(model: torch.nn.Module) -> None:
    """Makes the calls that merge adapters into `model` bring the parameters, layer by layer, and those that make
    prompts bring those of the prompts. May be called again, when adapters were added."""
    peft, tuners = sys.modules.get("peft"), sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or tuners is None:  # another module may have the name
        return
    for module in model.modules():
        if "_brings" in type(module).__dict__:
            continue
        if isinstance(module, getattr(tuners, _LAYERS)):
            module.__class__ = _layer(type(module))
        elif isinstance(module, peft.PeftModel) and hasattr(module, "prompt_encoder"):
            module.__class__ = _prompted(type(module))


@functools.cache
def _layer(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns the subclass of a layer's class whose merges bring the layer's parameters."""

    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _merged(self, original.merge, args, kwargs)  # type: ignore[attr-defined]

    def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _merged(self, original.unmerge, args, kwargs)  # type: ignore[attr-defined]

    return subclass(original, {"merge": merge, "unmerge": unmerge, "_brings": True})


@functools.cache
def _prompted(original: type[Any]) -> type[Any]:
    """Returns the subclass of a model's class that brings what makes its prompts: they are made for the
    model's call, before it in generate(), and to be saved."""

    def get_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        with brought(self.prompt_encoder.parameters(), exact=False):
            return original.get_prompt(self, *args, **kwargs)

    def get_prompt_embedding_to_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        with brought(self.prompt_encoder.parameters()):
            return original.get_prompt_embedding_to_save(self, *args, **kwargs)

    made = {"get_prompt": get_prompt, "get_prompt_embedding_to_save": get_prompt_embedding_to_save}
    return subclass(original, {**made, "_brings": True})


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
            own = torch.empty(0, dtype=values.dtype, device=held.storage.device)
            own.set_(held.storage, 0, values.shape, values.stride())  # type: ignore[call-overload]
            held.param.data = own.copy_(values)
        torch.autograd.graph.increment_version(held.param)
