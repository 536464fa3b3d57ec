# SPDX-License-Identifier: Apache-2.0
"""Lets PyTorch's nn.TransformerEncoder take its fast path in an offloaded model, as it does without.

Where nothing is trained, an encoder decides from its first layer's parameters, before that layer is
called, whether padding goes through its layers: only if all are plain parameters. A layer decides likewise,
and then computes with the parameters of its inner modules, which it does not call. None of them says so
where it goes the other way, whose values are others.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator
from typing import Any

import torch

from ziggurat._pytorch.subclass import subclass
from ziggurat._pytorch.torch_private import uncompiled
from ziggurat._streaming.pins import Held
from ziggurat._streaming.streaming import streaming_of


def look_at_first_layer(encoder: torch.nn.TransformerEncoder, stages: Container[torch.nn.Module]) -> None:
    """Makes the encoder's forward find the parameters of its first layer as those of a layer that is there, if
    the layer, or a module of it, is one of the `stages` that bring their own parameters."""
    layers = getattr(encoder, "layers", ())
    if len(layers) and any(module in stages for module in layers[0].modules()):
        encoder.__class__ = _made(type(encoder))


@functools.cache
def _made(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In code that is compiled as a whole an encoder goes the other way. Behind this call it would not
        # know any more, because units break the graph.
        shown = _show(self.layers[0], torch.compiler.is_compiling())
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            _hide(shown)

    return subclass(original, {"forward": forward})


@uncompiled
def _show(layer: torch.nn.Module, is_compiled: bool) -> list[Held]:
    """Gives those of the layer's parameters that are away their ordinary class. Their memory still refuses
    reads. Whoever brings them and lets them go gives them the other one again."""
    shown = [] if is_compiled else [held for held in _held_of(layer) if held.is_away]
    for held in shown:
        held.show()
    return shown


@uncompiled
def _hide(shown: list[Held]) -> None:
    for held in shown:
        held.hide()


def _held_of(module: torch.nn.Module) -> Iterator[Held]:
    found = map(streaming_of, module.parameters())
    return (its[1] for its in found if its is not None)
