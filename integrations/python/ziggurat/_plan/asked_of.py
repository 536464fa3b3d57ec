# SPDX-License-Identifier: Apache-2.0
"""What a model that was offloaded and its optimizer ask of the planner, and what "auto" gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument, MemoryChoice
from ziggurat._memory.memory import bytes_of, free_bytes
from ziggurat._memory.placement import Homes
from ziggurat._plan.asked import Asked
from ziggurat._plan.chosen_memory import Given, memory_choice
from ziggurat._plan.from_ranks import Wire
from ziggurat._streaming.streaming import Streaming


def buffer_bytes(model: torch.nn.Module, made: bool = False) -> int:
    """Returns what a model's buffers take; `made`: those that are there, and not on the meta device."""
    return sum(_bytes(buffer) for buffer in model.buffers() if not (made and buffer.is_meta))


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.numel() * tensor.element_size()


def asked_of(
    streaming: Streaming, accumulation: int, clips: bool, recomputes: bool = False
) -> Asked:
    """Returns the run of an offloaded model, with what its optimizer was given. Errors: InvalidArgument
    where no optimizer trains it yet."""
    optimizer = None if streaming.optimizer is None else streaming.optimizer()
    if optimizer is None:
        raise InvalidArgument(
            "plan(): the model is offloaded, and no optimizer has its parameters yet: make the "
            "optimizer, or plan before offload()"
        )
    is_open = streaming.opened is not None
    if not is_open:  # another optimizer may train other parameters than the last one did
        streaming.division.set_trained(None)
        if streaming.leaves_choice:
            return _asked_of_choice(streaming, optimizer, accumulation, clips, recomputes)
    settings, path = optimizer.planned_with()
    asked = _asked(streaming, optimizer, settings, path, accumulation, clips, recomputes)
    for opened in optimizer.engines():  # what was chosen counts, however much memory is free now
        homes = Homes(asked.homes.params, "nvme" if opened.sums_in_files else "host")
        asked = replace(asked, host_memory=opened.figures()["host_budget_bytes"], homes=homes)
    return asked


def _asked_of_choice(
    streaming: Streaming, optimizer: Any, accumulation: int, clips: bool, recomputes: bool
) -> Asked:
    """Returns the run of a model that leaves something to "auto", as it would be chosen now."""
    choice = choose_for(streaming, optimizer, free_bytes(), here_bytes(streaming, optimizer))
    streaming.settle(choice)
    settings, path, _ = optimizer.given_for_plan()
    return _asked(streaming, optimizer, settings, path, accumulation, clips, recomputes).with_choice(choice)


def here_bytes(streaming: Streaming, optimizer: Any) -> int:
    """Returns what PyTorch's memory has now of what a run takes, which counts as free."""
    model = streaming.model()
    buffers = 0 if model is None else buffer_bytes(model, made=True)
    return streaming.here_bytes + buffers + sum(param.nbytes for _, param in optimizer.trained_beside())


def choose_for(streaming: Streaming, optimizer: Any, free: int, here: int) -> MemoryChoice:
    """Returns what the planner gives a model that was offloaded and its optimizer, if so much memory is `free`
    beside what is `here` already, on each rank.
    What this optimizer trains of a model may be cut in more pieces than all that requires a gradient. Errors:
    ResourceExhausted."""
    settings, path, tier = optimizer.given_for_plan()
    streaming.division.set_trained(optimizer.trains())
    asked = replace(_asked(streaming, optimizer, settings, path, 1, False, False), free=free + here, here=here)
    has_folder = streaming.folder is not None
    return memory_choice(asked, Given(streaming.given_bytes, streaming.given_homes, tier, has_folder))


def _asked(
    streaming: Streaming,
    optimizer: Any,
    settings: dict[str, Any],
    path: str | None,
    accumulation: int,
    clips: bool,
    recomputes: bool,
) -> Asked:
    host_memory = settings.get("host_memory")
    return Asked(
        division=streaming.division,
        is_open=streaming.opened is not None,
        homes=streaming.homes,
        memory_bytes=streaming.memory_bytes,
        optimizer=settings["optimizer"],
        state_format=settings["state_format"],
        state_on_drive=path is not None,
        path=path,
        host_memory=None if host_memory is None else bytes_of("host_memory", host_memory),
        accumulation=accumulation,
        clips=clips,
        recomputes=recomputes or streaming.recomputes,
        free=free_bytes(),
        added=optimizer.trained_beside(),
        buffer_bytes=0 if (model := streaming.model()) is None else buffer_bytes(model),
        activation_bytes=0 if streaming.activations is None else streaming.activations.memory_bytes,
        ranks=1 if streaming.ranks is None else streaming.ranks.shards,
        replicas=1 if streaming.ranks is None else streaming.ranks.replicas,
        hpz=optimizer.hpz,
        wire=Wire() if streaming.ranks is None else optimizer.wire(streaming.ranks),
        gpu=None if streaming.accelerator is None else str(streaming.device),
        folder=streaming.folder,
    )
