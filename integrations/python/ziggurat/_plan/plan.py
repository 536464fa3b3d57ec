# SPDX-License-Identifier: Apache-2.0
"""plan(): what a model takes and moves that offload() is going to be called for, before anything is
allocated; and what a step of any module holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from ziggurat._library.native import InvalidArgument, ResourceExhausted
from ziggurat._memory.frozen_files import FileMappings
from ziggurat._memory.memory import bytes_of, free_bytes, size_of, size_text
from ziggurat._memory.placement import AUTO, Homes, parsed
from ziggurat._plan.asked import Asked
from ziggurat._plan.asked_of import asked_of, buffer_bytes
from ziggurat._plan.chosen_memory import Given, memory_choice
from ziggurat._plan.from_ranks import Wire
from ziggurat._plan.plan_page import Plan
from ziggurat._plan.times import Times
from ziggurat._pytorch.accelerator import cpu_or_nvidia
from ziggurat._ranks.codes import grid_of
from ziggurat._ranks.cuts import check_hpz, shards_of
from ziggurat._ranks.ranks import rank_count
from ziggurat._streaming.streaming import Streaming, streaming_of
from ziggurat._units.refusals import check_model
from ziggurat._units.tile_choice import Tiles
from ziggurat._units.unit_choice import Choice
from ziggurat._units.units import divide

if TYPE_CHECKING:
    from ziggurat._plan.live_page import LivePlan

__all__ = ["plan"]

_SLOWEST_DRIVE = 1000  # bytes a second: less was meant in gigabytes, or is no drive


@overload
def plan(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | str = "adamw",
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    accumulation: int = 1,
    ranks: int | None = None,
    machine: str | None = None,
    free_memory: int | str | None = None,
) -> LivePlan: ...
@overload
def plan(model: torch.nn.Module, batch: Any = None, *, tokens: int, **how: Any) -> Plan: ...
def plan(
    model: torch.nn.Module,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | str = "adamw",
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    machine: str | None = None,
    tokens: int | None = None,
    accumulation: int = 1,
    memory: int | str = AUTO,
    placement: str = "host",
    units: Choice = "auto",
    tiles: Tiles | None = None,
    optimizer_placement: str = "host",
    state_format: str = "fp32",
    host_memory: int | str | None = None,
    clips: bool = False,
    free_memory: int | str | None = None,
    drive: float | str | None = None,
    compute_s: float | None = None,
    flops: float | None = None,
    recomputes: bool = False,
    frozen_in_files: bool = True,
    ranks: int | None = None,
    shard_group: int | None = None,
    hpz: int | None = None,
    quantized_weights: bool | str = False,
    quantized_gradients: int | None = None,
    ranks_per_node: int | None = None,
    activation_memory: int | str | None = None,
    device: str | torch.device = "cpu",
) -> Plan | LivePlan:
    """With a `batch`, returns what a training step of any module holds, and under which strategy it fits: PyTorch's own
    loop, DDP, ZeRO, FSDP over `ranks`, and offload(). Steps of a few rows of the batch are made and what PyTorch's
    allocators give in them is followed, so that nothing of the model is guessed. Parameters, gradients, buffers, hooks and
    random numbers stay as they are. The step is: ``loss = ...; loss.backward(); optimizer.step();
    optimizer.zero_grad()``, which keeps nothing else from one to the next.

    ``batch``
        A tensor, a tuple or a dictionary, as the model is called with it: ``model(batch)``, ``model(*batch)`` or
        ``model(**batch)``. The first dimension of a tensor is that of rows if it has as many as the first tensor.
    ``optimizer``
        The optimizer, or the name of PyTorch's. A step of it on the meta device tells what it takes.
    ``loss``
        A function of the output and the batch that returns the loss; without it, ``output.loss`` or ``output["loss"]`` is it.
    ``machine``
        The name of a machine, as "h100x8", or a file, as `ziggurat plan --machine` takes it. None: this one.
    ``accumulation``, ``ranks``, ``free_memory``
        As below.

    A model on the meta device, or one for whose gradients and a copy of whose parameters this machine has no room, is
    judged by its shapes: what kernels take for themselves is not counted, and a value that the forward asks for is 0.

    With `tokens`, returns what a run of `model` takes and moves, and the least time of a step. Nothing is allocated,
    and no parameter is read: it may be a model on the meta device, or one that was offloaded, whose own
    settings and optimizer's count then. With a `batch` too, steps of the model as it is are made and timed, and an
    offloaded model's step is played by them on this machine as `ziggurat profile --measure` has measured it; `loss`
    is as above.

    ``tokens``, ``accumulation``
        Tokens of one backward, and backwards in a step.
    ``memory``, ``placement``, ``units``, ``tiles``
        As offload() takes them, "auto" too: as it would be chosen with what is free here, or with ``free_memory``.
    ``optimizer``, ``optimizer_placement``, ``state_format``, ``host_memory``
        The optimizer's name in lower case, and its arguments. ``optimizer_placement`` is "host" or
        "nvme:/path", or "nvme" where the directory does not matter.
    ``clips``
        Whether the norm of all gradients is asked for in each step.
    ``free_memory``
        The memory of the machine that the run may take; without it, what is free here.
    ``drive``
        Bytes a second, reads and writes together, or a text like "1.2GB". Without it, what
        `ziggurat bench io` has measured for the directory.
    ``compute_s``, ``flops``, ``recomputes``
        Seconds that the forwards and backwards of a step compute. Or operations a second, of which each
        weight takes 2 a token in forward, 2 in backward for its input's gradient and 2 for its own
        (Kaplan et al. 2020, section 2.1), and with gradient checkpointing, which ``recomputes`` tells,
        another 2; it also brings experts that are units once more.
    ``frozen_in_files``
        Whether frozen parameters on the meta device are going to stay in the files that they are loaded
        from, as those of safetensors with the model's type do. Of others their memory tells.
    ``ranks``
        Among how many ranks the model is divided, of which the plan tells what each takes. None: those that
        torch.distributed has.
    ``shard_group``, ``hpz``, ``quantized_weights``, ``quantized_gradients``, ``ranks_per_node``
        As the optimizer takes them.
    ``activation_memory``
        As offload(activations="nvme") takes it: what backward needs of a forward has so much memory. What
        goes to the drive beyond that is not in the plan, since a model's sizes do not tell it.
    ``device``
        As offload() takes it: of a GPU ("cuda:0") the plan tells what it needs beside activations. The GPU need
        not be there, and whether it has room is not looked at.

    Errors: InvalidArgument for a `memory` or `host_memory` that is too small, which says how much works;
    ResourceExhausted for what the machine or the drive has no room for.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"plan(): the model is a {type(model).__name__}: give a torch.nn.Module")
    _require_counts(accumulation=accumulation, ranks=ranks, tokens=tokens)
    if batch is not None and tokens is None:
        _refuse_offloads(model, locals())
        if machine is not None and free_memory is not None:
            raise InvalidArgument("plan(machine=, free_memory=): give one of the two, which both say what memory there is")
        from ziggurat._plan.live_plan import live_plan  # importing ziggurat.torch does not wait for it

        return live_plan(
            model,
            batch,
            optimizer,
            loss=loss,
            accumulation=accumulation,
            ranks=ranks or rank_count(),
            machine=machine,
            free_memory=free_memory,
        )
    lacks_batch = batch is None and loss is not None
    if tokens is None or lacks_batch or machine is not None or not isinstance(optimizer, str):
        raise InvalidArgument(
            "plan(): give a batch, of any module; or of a model that is offloaded, or going to be, tokens=, and "
            "neither machine=, nor loss= without a batch, and the name of the optimizer"
        )
    if batch is not None and (compute_s is not None or flops is not None):
        raise InvalidArgument("plan(batch, tokens=): leave out compute_s= and flops=, which steps of the batch tell")
    _require_positive(compute_s=compute_s, flops=flops)
    rate = _rate_of(drive)
    streaming = next(filter(None, map(_streaming_of, model.parameters())), None)
    if streaming is not None:
        if batch is not None:
            raise InvalidArgument("plan(): the model is offloaded: leave out the batch")
        if streaming.opened is None:
            streaming.division.leave_in_files({one for one in model.parameters() if one.requires_grad})
        asked = asked_of(streaming, accumulation, clips, recomputes)
    else:
        check_model(model)
        tier, path = parsed(optimizer_placement) if optimizer_placement != "nvme" else ("nvme", None)
        if tier == "auto":
            raise InvalidArgument('plan(optimizer_placement="auto"): give "host" or "nvme:/path"')
        to = cpu_or_nvidia("plan", device)
        on_gpu = to.type != "cpu"
        division = divide(model, units, tiles=tiles, also_meta=True, device=to, brings_all=on_gpu)
        trained = {param for param in model.parameters() if param.requires_grad}
        division.leave_in_files(trained, also_meta=frozen_in_files)
        ranks = ranks or rank_count()
        shards = shards_of(ranks, shard_group)
        check_hpz(shards, hpz)
        wire = Wire(quantized_weights if shards > 1 else False)
        if quantized_gradients is not None and ranks > 1:
            grid = grid_of(ranks, ranks_per_node, f"quantized_gradients={quantized_gradients}")
            wire = Wire(wire.weights, quantized_gradients, grid)
        division.set_ranks(shards)
        homes = Homes.of(placement)
        if on_gpu and AUTO in (memory, homes.params):
            raise InvalidArgument(f'plan(device="{device}"): give memory=, and placement="host" or "nvme"')
        asked = Asked(
            division=division,
            homes=homes,
            memory_bytes=0 if memory == AUTO else bytes_of("memory", memory),
            optimizer=optimizer,
            state_format=state_format,
            state_on_drive=tier == "nvme",
            path=path,
            host_memory=None if host_memory in (None, AUTO) else bytes_of("host_memory", host_memory),
            accumulation=accumulation,
            clips=clips,
            recomputes=recomputes,
            buffer_bytes=buffer_bytes(model),
            activation_bytes=0 if activation_memory is None else bytes_of("activation_memory", activation_memory),
            ranks=shards,
            replicas=ranks // shards,
            hpz=hpz,
            wire=wire,
            gpu=str(to) if on_gpu else None,
            free=_free(model) if free_memory is None else bytes_of("free_memory", free_memory),
        )
        if AUTO in (memory, homes.params):
            asked.require_directory()
            given = Given(None if memory == AUTO else asked.memory_bytes, homes, tier)
            asked = asked.with_choice(memory_choice(asked, given))
    work = _work(model, recomputes)
    if flops is not None:
        compute_s = sum(work) * tokens * asked.accumulation / flops
    share = work[0] / sum(work) if sum(work) else 1 / 3
    return asked.plan(
        tokens=tokens,
        rate=rate,
        compute=None if compute_s is None else (compute_s * share, compute_s * (1 - share)),
        has_room=streaming is not None,
        times=None if batch is None else _times(model, batch, loss, asked),
    )


def _times(model: torch.nn.Module, batch: Any, loss: Callable[[Any, Any], torch.Tensor] | None, asked: Asked) -> Times:
    """Records steps of the model. Errors: InvalidArgument for one that computes nothing here; ResourceExhausted for one
    whose gradients memory has no room for."""
    from ziggurat._plan.live_request import check_batch, runs_of  # importing ziggurat.torch does not wait for these
    from ziggurat._plan.recorded_times import bytes_beside, recorded_times

    check_batch(batch)
    if any(one.is_meta for one in model.parameters()):
        raise InvalidArgument("plan(batch, tokens=): a model on the meta device computes nothing: leave out the batch")
    needed, free = bytes_beside(model), free_bytes()
    if needed > free:
        raise ResourceExhausted(
            f"plan(batch, tokens=): steps of the model as it is take {size_text(needed)} beside its parameters and "
            f"activations, for gradients above all, and {size_text(free)} of memory are free: leave out the batch, and "
            "give compute_s= or flops="
        )
    return recorded_times(model, asked.division, runs_of(model, loss), batch)


_WITH_BATCH = {"loss", "machine", "accumulation", "ranks", "free_memory"}


def _refuse_offloads(model: torch.nn.Module, given: dict[str, Any]) -> None:
    """Errors: InvalidArgument for arguments of offload() beside a batch, and for a model that is offloaded."""
    usual: dict[str, Any] = plan.__kwdefaults__ or {}
    given["device"] = str(given["device"])
    others = [name for name, value in usual.items() if name not in _WITH_BATCH and given[name] != value]
    if others:
        raise InvalidArgument(f"plan(batch, {others[0]}=): with a batch leave out what is of offload() alone")
    if any(_streaming_of(param) is not None for param in model.parameters()):
        raise InvalidArgument("plan(): the model is offloaded: leave out the batch, and give tokens=")


def _streaming_of(param: torch.Tensor) -> Streaming | None:
    found = streaming_of(param)
    return None if found is None else found[0]


def _free(model: torch.nn.Module) -> int:
    """Returns what the run may take: what is free, and what the model takes until it is offloaded."""
    mappings = FileMappings()  # what lies in files takes none
    params = (param for param in model.parameters() if not param.is_meta and mappings.of(param) is None)
    return free_bytes() + buffer_bytes(model, made=True) + sum(param.nbytes for param in params)


def _work(model: torch.nn.Module, recomputes: bool) -> tuple[int, int]:
    """Returns the operations of a token in forward and in backward. A table of an embedding is looked
    up, unless another module computes with it."""
    tables = {
        param
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    computes = {
        param
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        for param in module.parameters(recurse=False)
        if param.dim() > 1
    }
    weights = computes | (set() if computes else tables)
    forward = sum(2 * param.numel() for param in weights)
    backward = sum(2 * param.numel() * (1 + param.requires_grad) for param in weights)
    return forward, backward + recomputes * forward


def _rate_of(drive: float | str | None) -> tuple[float, str] | None:
    if drive is None:
        return None
    rate = size_of(drive) if isinstance(drive, str) else float(drive)
    if not _SLOWEST_DRIVE <= rate < math.inf:
        raise InvalidArgument(f'plan(drive={drive!r}): give bytes a second, or a text like "1.2GB"')
    return rate, "as given"


def _require_counts(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"plan({name}={value!r}): give a whole number from 1 on")


def _require_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise InvalidArgument(f"plan({name}={value}): give more than 0")
