# SPDX-License-Identifier: Apache-2.0
"""The reports' scripts with ziggurat.torch, and state in host memory."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from field.jobs import DECAY, GROUPS, LAYOUTS, Bag, Wrong, check, job_of, steps
from field.models import (
    Net,
    check_loaded,
    check_tied,
    compiled,
    files_end_at,
    said_of,
    step_of,
    values_of,
)
from field.scripts import (
    DTYPES,
    Script,
    as_by_formula,
    compiled_step,
    empty_sparse,
    every_size,
    loaded_late,
    other_order,
    small_decays,
)

import ziggurat.torch


def adamw(params: Any, **settings: Any) -> ziggurat.torch.AdamW:
    return ziggurat.torch.AdamW(params, **({"lr": 1e-2, "weight_decay": DECAY} | settings))


def sgd(params: Any) -> ziggurat.torch.SGD:
    return ziggurat.torch.SGD(params, lr=1.0)


def load(path: Any, model: torch.nn.Module) -> None:
    ziggurat.torch.load_checkpoint(path, adamw(model.parameters(), model=model), model)


def compiled_names(what: str, folder: Path) -> None:
    model = compiled(Net(1), what)
    optimizer = adamw(model.parameters(), model=model)
    step_of(model, optimizer)
    path = ziggurat.torch.save_checkpoint(folder, optimizer, model)
    other = Net(2)
    load(path, other)
    check_loaded(values_of(other), values_of(model))


def moment(optimizer: ziggurat.torch.AdamW, param: torch.Tensor) -> torch.Tensor:
    return optimizer.state_of(param)["exp_avg"]


def tied(folder: Path) -> None:
    model = Net(1, tied=True)
    optimizer = adamw(model.parameters(), model=model)
    step_of(model, optimizer)
    path = ziggurat.torch.save_checkpoint(folder, optimizer, model)
    other = Net(2, tied=True)
    load(path, other)
    check_tied(other, values_of(model), values_of(other))


def full_disk(folder: Path) -> str:
    model = Net(1, width=200)
    optimizer = adamw(model.parameters(), model=model)
    failed, saved = None, []
    for step in range(1, 4):
        step_of(model, optimizer, step)
        if step == 1:
            saved = values_of(model)
            ziggurat.torch.save_checkpoint(folder / "saves", optimizer, model)
        if step == 2:
            try:
                with files_end_at(100_000):
                    ziggurat.torch.save_checkpoint(folder / "saves", optimizer, model)
            except Exception as error:
                failed = error
    said = said_of(failed)
    other = Net(2, width=200)
    load(folder / "saves", other)
    check_loaded(values_of(other), saved)
    return said


def log_batches(folder: Path, stop_after: int | None = None) -> None:
    """Logs three epochs of five batches, from where the run was; ends abruptly after `stop_after`
    batches.

    A step that was not durable by then is made again, from the same batch at the same place.
    """
    torch.manual_seed(7)
    layer = torch.nn.Linear(1, 1)
    optimizer = adamw(layer.parameters(), placement=f"nvme:{folder}/store")
    loader = torch.utils.data.DataLoader(torch.arange(10.0).unsqueeze(1), 2, shuffle=True)
    resume = ziggurat.torch.Resume(optimizer, None, loader)
    taken = 0
    with (folder / "batches").open("a") as log:
        for _ in resume.epochs(3):
            for batch in resume:
                # leaves this batch without a step, so the batch must come again
                if taken == stop_after:
                    log.flush()
                    os._exit(0)
                layer(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(resume.epoch, resume.batch, batch.flatten().tolist(), file=log)
                taken += 1
    optimizer.close()


def second_epoch(folder: Path) -> None:
    stops = [3, 5, 7, 10, 12]
    for stop in stops:
        part = folder / f"stopped-{stop}"
        part.mkdir()
        child = os.fork()  # forks before this process has an engine
        if child == 0:
            try:
                log_batches(part, stop)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    whole = folder / "whole"
    whole.mkdir()
    log_batches(whole)
    right = set((whole / "batches").read_text().splitlines())
    for stop in stops:
        part = folder / f"stopped-{stop}"
        log_batches(part)
        if set((part / "batches").read_text().splitlines()) != right:
            raise Wrong(f"after a stop at {stop} batches the run continued with other batches")


def other_layouts(what: str, folder: Path) -> None:
    job = job_of("13", what)
    bag = Bag(job)
    optimizer = adamw(bag.groups(job), model=bag)
    steps(job, bag, optimizer)
    check(job, values_of(bag))
    path = ziggurat.torch.save_checkpoint(folder, optimizer, bag)
    other = Bag(job)
    for param in other.parameters():
        param.data = torch.zeros(param.shape)
    load(path, other)
    check_loaded(values_of(other), values_of(bag))


FORMATS = ["fp32", "bf16-moments", "split", "8bit", "bf16"]
CELLS: dict[str, dict[str, Script]] = {
    "1": {"": partial(as_by_formula, adamw, "1")},
    "2": {what: partial(as_by_formula, adamw, "2", what=what) for what in GROUPS},
    "4": {kind: partial(every_size, adamw, kind) for kind in DTYPES},
    "5": {what: partial(compiled_names, what) for what in ("whole", "blocks")},
    "6": {f"after {n} steps": partial(loaded_late, adamw, n) for n in (0, 1)},
    "7": {"": partial(other_order, adamw, moment=moment)},
    "8": {"": tied},
    "9": {"": full_disk},
    "10": {"": second_epoch},
    "11": {f"norm {n:g}": partial(as_by_formula, adamw, "11", norm=n) for n in (2, 1, math.inf)},
    "12": {one: partial(small_decays, partial(adamw, state_format=one)) for one in FORMATS},
    "13": {what: partial(other_layouts, what) for what in LAYOUTS},
    "14": {"": partial(as_by_formula, adamw, "14")},
    "sparse": {"": partial(empty_sparse, sgd)},
    "compiled": {"": partial(compiled_step, adamw)},
}
NOT_RUN: dict[str, str] = {}
