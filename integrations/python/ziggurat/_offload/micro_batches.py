# SPDX-License-Identifier: Apache-2.0
"""micro_batches(): the forwards and backwards of a step's micro-batches, unit by unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._offload.attributes import Attributes
from ziggurat._offload.passes import stages_in
from ziggurat._offload.turns import Turns
from ziggurat._pytorch.tensors_in import tensors_in
from ziggurat._streaming.streaming import Streaming, streaming_of
from ziggurat._units.units import ROOT

__all__ = ["micro_batches"]


def micro_batches(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Makes the gradients of all `batches`, and brings each unit of an offloaded model once in forward
    and once in backward, not once for each of them.

    Does what this loop does, with the same gradients to the last bit::

        for batch in batches:
            loss(model(batch), batch).backward()

    but all micro-batches pass a unit before the first comes to the next. Returns the losses, detached,
    in the order of `batches`. An optimizer's step follows as ever.

    ``batches``
        What the model is called with: a tensor, a tuple or list of arguments, or a mapping of named
        ones. Sizes may differ. All are taken before the first forward.
    ``loss``
        A function of the model's output and the batch, which returns the scalar that backward begins
        with; so it also divides by the number of micro-batches. Without it the output's `loss` is
        taken, as models of transformers have it.

    Memory: what backward needs of all micro-batches is there at once, as it is for one batch of all of
    them; with gradient checkpointing that is the inputs of the blocks. Logits and what follows the
    last unit are there for one micro-batch at a time.

    Random numbers: the first micro-batch draws from PyTorch's generator what it draws in the loop. Each
    further one has a seed, drawn from a copy of the generator as it was before; the generator goes
    on where the last one leaves it. If nothing is drawn, it stays as it is. Draws from NumPy's and
    Python's generators, and from a generator that the model has, come in the order of units.

    Each micro-batch runs in a thread of its own, one at a time, under the caller's autocast, hooks for
    saved tensors and function modes. Gradients in files are summed in memory while their unit is there.
    What a forward sets for the whole process around several units, such as `sdpa_kernel()`, a filter of
    warnings or a lock, is entered by all micro-batches before the first leaves it: set it around
    micro_batches().

    Errors: InvalidArgument for a model that is not offloaded, that calls a unit twice, or units in
    another order for another micro-batch, or that leaves something else in an attribute or a buffer for
    each micro-batch; Unimplemented for what cannot be had in other threads. After an error, or Ctrl-C, which ends all micro-batches at the next
    unit, the gradients are incomplete: call zero_grad().
    """
    streaming = _streaming_in(model)
    given = list(batches)
    _check(streaming, given)
    if not given:
        return []
    streaming.open()
    losses: list[torch.Tensor] = [torch.empty(0)] * len(given)

    def one(index: int) -> None:
        found = _loss_of(_called(model, given[index]), given[index], loss, index)
        losses[index] = found.detach()
        torch.autograd.backward(found)

    optimizer = None if streaming.optimizer is None else streaming.optimizer()
    feeder = None if optimizer is None else optimizer._sharing.feeder
    with contextlib.nullcontext() if feeder is None else feeder.together(len(given)):
        Turns(streaming, len(given), Attributes(model, stages_in(model))).run(one)
    return losses


def _streaming_in(model: torch.nn.Module) -> Streaming:
    found = {known[0]: None for known in map(streaming_of, model.parameters()) if known is not None}
    if not found:
        raise InvalidArgument(
            f"micro_batches() was called with a {type(model).__name__} that is not offloaded: call "
            "ziggurat.torch.offload(model, memory=...) before, or use the ordinary loop"
        )
    if len(found) > 1:
        raise InvalidArgument(
            f"micro_batches() was called with a {type(model).__name__} of {len(found)} offloaded "
            "models: call offload() once, for the whole"
        )
    streaming = next(iter(found))
    if all(unit.name == ROOT for unit in streaming.units):
        raise InvalidArgument(
            f"micro_batches() was called with a {type(model).__name__} that has no units, because it "
            "has no repeated blocks: name them in offload(units=[...]), or use the ordinary loop"
        )
    return streaming


def _check(streaming: Streaming, batches: list[Any]) -> None:
    if streaming.turns is not None or any(unit.forwards for unit in streaming.units):
        raise InvalidArgument(
            "micro_batches() was called within a forward of the same model: call it outside"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise InvalidArgument(
            "micro_batches() was called where gradients are disabled: call it outside of "
            "torch.no_grad() and torch.inference_mode()"
        )
    for index, batch in enumerate(batches):
        # Autograd numbers the nodes of a graph by thread, and runs the newest first.
        if any(tensor.grad_fn is not None for tensor in tensors_in(batch)):
            raise Unimplemented(
                f"micro-batch {index} has a tensor with a graph, which another thread has made: make it "
                "in the model's forward, or detach() it"
            )


def _called(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss_of(
    output: Any, batch: Any, loss: Callable[[Any, Any], Any] | None, index: int
) -> torch.Tensor:
    if loss is not None:
        found = loss(output, batch)
    else:
        found = getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor):
        whose = "the function" if loss is not None else "the output"
        raise InvalidArgument(
            f"the loss of micro-batch {index} is a {type(found).__name__}, and not a tensor: {whose} "
            "must give one; without a function, the batch needs labels"
        )
    if found.numel() != 1 or not found.requires_grad:
        raise InvalidArgument(
            f"the loss of micro-batch {index} has shape {tuple(found.shape)} and requires_grad="
            f"{found.requires_grad}: backward needs one number that depends on trained parameters"
        )
    return found
