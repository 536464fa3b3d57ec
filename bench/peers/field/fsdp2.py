# SPDX-License-Identifier: Apache-2.0
"""The reports' scripts with fully_shard and torch.optim.AdamW on two ranks over gloo.

They save and load with torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from field.jobs import DECAY, GROUPS, LAYOUTS, Bag, Wrong, check, job_of, steps
from field.models import (
    Net,
    Pair,
    brief,
    check_decayed,
    check_fives,
    check_loaded,
    check_moments,
    check_tied,
    compiled,
    files_end_at,
    gradients_of_pair,
    said_of,
    step_of,
)
from field.scripts import Script
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model: torch.nn.Module, **settings: Any) -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, **settings)


def adamw(params: Any, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **({"lr": 1e-2, "weight_decay": DECAY} | settings))


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [whole(param) for param in model.parameters()]


def save(model: torch.nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=str(folder))


def load(model: torch.nn.Module, folder: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state)


def trained(report: str, **more: Any) -> Bag:
    job = job_of(report, **more)
    bag = sharded(Bag(job))
    steps(job, bag, adamw(bag.groups(job)))
    check(job, values_of(bag))
    return bag


def by_formula(report: str, folder: Path, **more: Any) -> None:
    trained(report, **more)


def compiled_names(what: str, folder: Path) -> None:
    model = compiled(sharded(Net(1)), what)
    saved = values_of(model)
    save(model, folder / "saved")
    other = sharded(Net(2))
    load(other, folder / "saved")
    check_loaded(values_of(other), saved)


def loaded_late(when: int, folder: Path) -> None:
    torch.manual_seed(6)
    layer = sharded(torch.nn.Linear(4, 4), mp_policy=BF16)
    optimizer = adamw(layer.parameters(), lr=1e-3)
    fives = {"weight": torch.full((4, 4), 5.0), "bias": torch.full((4,), 5.0)}
    for step in range(3):
        if step == when:
            set_model_state_dict(layer, dict(fives), options=StateDictOptions(full_state_dict=True))
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_fives(values_of(layer))


def moments(model: Pair, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: whole(optimizer.state[getattr(model, name)]["exp_avg"]) for name in "ab"}


def other_order(folder: Path) -> None:
    model = sharded(Pair(1))
    optimizer = adamw([model.a, model.b])
    for step in range(3):
        model(gradients_of_pair(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=str(folder / "saved"))
    other = sharded(Pair(2))
    resumed = adamw([other.b, other.a])
    state = get_optimizer_state_dict(other, resumed)
    dcp.load(state, checkpoint_id=str(folder / "saved"))
    set_optimizer_state_dict(other, resumed, state)
    check_moments(moments(other, resumed), moments(model, optimizer))


def tied(folder: Path) -> None:
    model = sharded(Net(1, tied=True))
    step_of(model, adamw(model.parameters()))
    saved = values_of(model)
    save(model, folder / "saved")
    other = sharded(Net(2, tied=True))
    load(other, folder / "saved")
    check_tied(other, saved, values_of(other))


def full_disk(folder: Path) -> str:
    model = sharded(Net(1, width=200))
    optimizer = adamw(model.parameters())
    failed, saved = None, []
    for step in range(1, 4):
        step_of(model, optimizer, step)
        if step == 1:
            saved = values_of(model)
            save(model, folder / "step-1")
        if step == 2:
            try:
                with files_end_at(100_000):
                    save(model, folder / "step-2")
            except BaseException as error:  # CheckpointException is no Exception
                failed = error
    said = said_of(failed)
    other = sharded(Net(2, width=200))
    newest = max(folder.glob("step-*"))
    try:
        load(other, newest)
    except BaseException as error:
        raise Wrong(f"{newest.name} stays and cannot be loaded: {brief(error)}{said}") from None
    check_loaded(values_of(other), saved)
    return said


def small_decays(folder: Path) -> None:
    layer = sharded(torch.nn.Linear(64, 64, bias=False), mp_policy=BF16)
    torch.nn.init.ones_(layer.weight)
    optimizer = adamw(layer.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(400):
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
    check_decayed(whole(layer.weight))


def other_layouts(what: str, folder: Path) -> None:
    bag = trained("13", what=what)
    save(bag, folder / "saved")
    saved = values_of(bag)
    other = sharded(Bag(job_of("13", what)))
    load(other, folder / "saved")
    check_loaded(values_of(other), saved)


CELLS: dict[str, dict[str, Script]] = {
    "1": {"": partial(by_formula, "1")},
    "2": {what: partial(by_formula, "2", what=what) for what in GROUPS},
    "5": {what: partial(compiled_names, what) for what in ("whole", "blocks")},
    "6": {f"after {n} steps": partial(loaded_late, n) for n in (0, 1)},
    "7": {"": other_order},
    "8": {"": tied},
    "9": {"": full_disk},
    "11": {f"norm {n:g}": partial(by_formula, "11", norm=n) for n in (2, 1, math.inf)},
    "12": {"": small_decays},
    "13": {what: partial(other_layouts, what) for what in LAYOUTS},
    "14": {"": partial(by_formula, "14")},
}
BESIDE_IT = "torch.optim makes the step"
NOT_RUN = {
    "4": BESIDE_IT,
    "10": "PyTorch alone has nothing that resumes a loader",
    "sparse": BESIDE_IT,
    "compiled": BESIDE_IT,
}
