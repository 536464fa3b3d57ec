# SPDX-License-Identifier: Apache-2.0
"""plan() of a module that is not offloaded: what a step of it holds, from steps of a few rows, and where that fits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ziggurat._library.abi import call
from ziggurat._library.native import InvalidArgument
from ziggurat._memory.memory import bytes_of, free_bytes
from ziggurat._plan.live_page import Held, LivePlan, Room
from ziggurat._plan.live_request import Loss, check_batch, plain_module, runs_of
from ziggurat._plan.live_strategies import strategies
from ziggurat._plan.recorded_step import Moment, Runs, Step, bytes_of_storages, on_meta, recorded, tensors
from ziggurat._plan.recorded_update import optimizer_of, recorded_update
from ziggurat._plan.unchanged import kept
from ziggurat._units.units import ROOT, divide

_ROWS = (2, 3, 4)  # of the steps that are made: batch norm refuses one, and what grows with a square shows in three
_CHECKED = 7  # rows of a step that must be as those say
_MANY = 33  # and of another at most, if the batch has them: beyond 25 and 32 rows some kernels go another way
_NOISE = 64  # bytes by which it may differ


def live_plan(
    model: torch.nn.Module,
    batch: Any,
    optimizer: Any,
    *,
    loss: Loss | None = None,
    accumulation: int = 1,
    ranks: int = 1,
    machine: str | None = None,
    free_memory: int | str | None = None,
) -> LivePlan:
    """Returns what a step of `model` holds. plan() says what the arguments are."""
    model = plain_module(model)
    check_batch(batch)
    optimizer = optimizer_of(model, optimizer)
    update = recorded_update(optimizer)
    free = _free(model, optimizer) if free_memory is None else bytes_of("free_memory", free_memory)
    room = Room("this machine", free / ranks, 0.0) if machine is None else _room_of(machine)
    step, by, fixed = _recorded(model, runs_of(model, loss), batch)
    sizes = list(_by_storage(model.parameters()))
    by_dtype: dict[str, int] = {}
    for dtype, size_bytes, _ in sizes:
        by_dtype[dtype] = by_dtype.get(dtype, 0) + size_bytes
    unit, unit_bytes = _largest_unit(model)
    held = Held(
        params=sum(size_bytes for _, size_bytes, _ in sizes),
        trained=sum(size_bytes for _, size_bytes, trained in sizes if trained),
        buffers=sum(bytes_of_storages(model.buffers()).values()),
        batch=_bytes_of_views(tensors(batch)),
        state=update.state,
        beside_update=update.beside,
        moments=step.moments,
        saved=int(step.saved),
        saved_fixed=int(fixed),
        output=int(step.output),
        unit=unit_bytes,
        accumulation=accumulation,
    )
    fits, no_offload = strategies(model, type(optimizer).__name__, held, room, ranks)
    return LivePlan(
        params=sum(param.numel() for param in model.parameters()),
        trained=sum(param.numel() for param in model.parameters() if param.requires_grad),
        shared=_shared(model),
        by_dtype=by_dtype,
        optimizer=update.name,
        trains=model.training,
        rows=step.rows,
        by=by,
        largest_unit=unit,
        held=held,
        peak_bytes=held.peak_bytes,
        machine=room.name,
        ranks=ranks,
        strategies=fits,
        no_offload=no_offload,
    )


# -- a step of the whole batch, from steps of a few rows


def _recorded(model: torch.nn.Module, run: Runs, batch: Any) -> tuple[Step, str, float]:
    """Returns a step of the whole batch, how it was found, and what a forward saves of no rows."""
    rows = _rows_of(batch)
    if any(one.is_meta for one in (*model.parameters(), *tensors(batch))):
        return _of_shapes(model, run, batch, rows, "by shapes, without what kernels take for themselves")
    if _has_no_room(model, _free_here(model)):
        why = "since memory has no room for gradients and a copy of parameters"
        return _of_shapes(model, run, batch, rows, f"by shapes, {why}")
    try:
        with kept(model.parameters()):
            return _of_rows(model, run, batch, rows, _free_here(model))
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
    return _of_shapes(model, run, batch, rows, "by shapes, since memory has no room for a step")


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's allocator of host memory has no class of error of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _of_rows(model: torch.nn.Module, run: Runs, batch: Any, rows: int, free: int) -> tuple[Step, str, float]:
    """Does what _recorded() does, by steps that are made. `free`: what one may take."""
    if rows <= _CHECKED:
        return _of_all(model, run, batch, rows)
    try:
        recorded(model, run, _cut(batch, rows, _ROWS[0]), _ROWS[0])  # what modules keep from their first forward on
        *steps, check = [recorded(model, run, _cut(batch, rows, few), few) for few in (*_ROWS, _CHECKED)]
        many = min(rows, _MANY)
        if _is_as(steps, check) and max(one.held for one in _bound(check, many).moments) <= free:
            check = recorded(model, run, _cut(batch, rows, many), many)
    except InvalidArgument:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        # The model takes no part of this batch.
        return _of_all(model, run, batch, rows)
    text = f"by steps of {', '.join(map(str, _ROWS))} and {check.rows} rows"
    if _is_as(steps, check):
        return _at(steps, rows), text, _through([one.saved for one in steps], 0)
    # Kernels choose other blocks as the batch grows, or the model looks at its values.
    bound = _bound(check, rows)
    if max(one.held for one in bound.moments) <= free:
        return _of_all(model, run, batch, rows)
    return bound, f"{text}, of which no line follows: it is at most", 0.0


def _of_all(model: torch.nn.Module, run: Runs, batch: Any, rows: int) -> tuple[Step, str, float]:
    recorded(model, run, batch, rows)
    return recorded(model, run, batch, rows), f"by a step of {'its row' if rows == 1 else f'all {rows} rows'}", 0.0


def _of_shapes(model: torch.nn.Module, run: Runs, batch: Any, rows: int, by: str) -> tuple[Step, str, float]:
    moved = tree_map(lambda one: _apart(one, one.to("meta")) if isinstance(one, torch.Tensor) else one, _for_tree(batch))
    return on_meta(model, run, moved, rows), by, 0.0


def _for_tree(batch: Any) -> Any:
    return dict(batch) if hasattr(batch, "items") else batch


def _rows_of(batch: Any) -> int:
    return next((len(one) for one in tensors(batch) if one.dim()), 1)


def _cut(batch: Any, rows: int, few: int) -> Any:
    """Returns the first rows of each tensor that has as many as the batch."""

    def first(one: Any) -> Any:
        is_cut = isinstance(one, torch.Tensor) and one.dim() and len(one) == rows
        return _apart(one, one[:few]) if is_cut else one

    return tree_map(first, _for_tree(batch))


def _apart(one: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Returns `made` of `one`, with a gradient of its own if that gets one."""
    return made.detach().requires_grad_(one.requires_grad)


def _is_as(steps: list[Step], check: Step) -> bool:
    """Returns whether the same happens in all, moment by moment, and `check` is what follows from `steps`."""
    kinds = [[(moment.phase, moment.grads) for moment in step.moments] for step in (*steps, check)]
    if any(one != kinds[0] for one in kinds):
        return False
    said = _at(steps, check.rows)
    pairs = zip(said.moments, check.moments, strict=True)
    return all(abs(a.held - b.held) <= _NOISE for a, b in pairs)


def _at(steps: list[Step], rows: int) -> Step:
    moments = [
        Moment(_through([one.held for one in those], rows), those[0].grads, those[0].phase)
        for those in zip(*(step.moments for step in steps), strict=True)
    ]
    saved, output = ([getattr(step, name) for step in steps] for name in ("saved", "output"))
    return Step(rows, moments, _through(saved, rows), _through(output, rows))


def _through(values: list[float], rows: int) -> float:
    """Returns the value at so many rows of the parabola through what was found, which is a line for most."""
    first, middle, last = values
    beyond = rows - _ROWS[0]
    return first + beyond * (middle - first) + beyond * (beyond - 1) * (last - 2 * middle + first) / 2


def _bound(step: Step, rows: int) -> Step:
    """Returns no less than a step of so many rows takes, if nothing grows faster than the rows."""
    times = rows / step.rows
    moments = [Moment((one.held - one.grads) * times + one.grads, one.grads, one.phase) for one in step.moments]
    return Step(rows, moments, step.saved * times, step.output * times)


# -- the model's own bytes, and the machine's


def _by_storage(params: Iterable[torch.Tensor]) -> Iterator[tuple[str, int, bool]]:
    """Yields the type and the bytes of each storage, and whether it is trained."""
    found: dict[int, tuple[str, int, bool]] = {}
    for param in params:
        for address, size_bytes in bytes_of_storages([param]).items():
            before = found.get(address)
            trains = param.requires_grad or (before is not None and before[2])
            found[address] = (str(param.dtype).removeprefix("torch."), size_bytes, trains)
    yield from found.values()


def _bytes_of_views(found: Iterable[torch.Tensor]) -> int:
    """Returns what a batch takes, of which the storages may be a whole data set's."""
    views: dict[int, int] = {}
    its = list({id(one): one for one in found}.values())
    for one in its:
        for address in bytes_of_storages([one]):
            views[address] = views.get(address, 0) + one.nbytes
    return sum(min(size_bytes, views[address]) for address, size_bytes in bytes_of_storages(its).items())


def _shared(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of parameters that another module has already."""
    seen: set[int] = set()
    found = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in seen:
            found.append(name)
        seen.add(id(param))
    return tuple(found)


def _largest_unit(model: torch.nn.Module) -> tuple[str, int]:
    units = divide(model, "auto", checks=False).units
    sizes = [(sum(param.nbytes for _, param in unit.params), unit.name) for unit in units]
    size_bytes, name = max(sizes, default=(0, ROOT))
    return name, size_bytes


def _free(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns what a run may take on this machine: what is free, and what it has already."""
    kept = [value for its in optimizer.state.values() for value in its.values() if isinstance(value, torch.Tensor)]
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    here = [one for one in (*model.parameters(), *model.buffers(), *kept, *grads) if not one.is_meta]
    return sum(bytes_of_storages(here).values()) + _free_here(model)


def _has_no_room(model: torch.nn.Module, free: int) -> bool:
    """Returns whether this machine lacks room for what each step of plan() itself takes beside activations."""
    grads: dict[str, int] = {}
    copies = 0
    for param in model.parameters():
        copies += param.nbytes
        grads[param.device.type] = grads.get(param.device.type, 0) + param.nbytes * param.requires_grad
    if set(grads) <= {"cpu"}:
        return copies + grads.get("cpu", 0) > free
    return copies + grads.get("cpu", 0) > free_bytes() or grads.get("cuda", 0) > free


def _free_here(model: torch.nn.Module) -> int:
    """Returns what a step of plan() itself may take of this machine, where the model computes."""
    gpus = {param.device for param in model.parameters() if param.device.type == "cuda"}
    if not gpus:
        return free_bytes()
    cached = sum(torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu) for gpu in gpus)
    return cached + int(sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus))


def _room_of(machine: str) -> Room:
    """Errors: InvalidArgument for a machine that is not known, with the names of those that are."""
    found = json.loads(call("ziggurat_plan", json.dumps({"machine": machine}).encode()))
    host = found["host_bytes"] * found["host_share"]
    if found["one_memory"]:
        return Room(found["machine"], host, 0.0)
    device = found["device_bytes"] - found["context_bytes"]
    return Room(found["machine"], device, host / found["gpus"], found["margin"], gpu=True)
