# SPDX-License-Identifier: Apache-2.0
"""The reports' scripts with torch.optim in one process."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from field.jobs import DECAY, GROUPS, LAYOUTS, Bag, Wrong, check, job_of, train
from field.models import (
    Net,
    brief,
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


def adamw(params: Any, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **({"lr": 1e-2, "weight_decay": DECAY} | settings))


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1.0)


def compiled_names(what: str, folder: Path, strict: bool = True) -> None:
    model = compiled(Net(1), what)
    torch.save(model.state_dict(), folder / "model.pt")
    other = Net(2)
    other.load_state_dict(torch.load(folder / "model.pt"), strict=strict)
    check_loaded(values_of(other), values_of(model))


def tied(folder: Path) -> None:
    model = Net(1, tied=True)
    step_of(model, adamw(model.parameters()))
    torch.save(model.state_dict(), folder / "model.pt")
    other = Net(2, tied=True)
    other.load_state_dict(torch.load(folder / "model.pt"))
    check_tied(other, values_of(model), values_of(other))


def full_disk(folder: Path) -> str:
    model = Net(1, width=200)
    optimizer = adamw(model.parameters())
    failed = None
    for step in range(1, 4):
        step_of(model, optimizer, step)
        if step == 1:
            torch.save(model.state_dict(), folder / "step-1.pt")
        if step == 2:
            try:
                with files_end_at(100_000):
                    torch.save(model.state_dict(), folder / "step-2.pt")
            except Exception as error:
                failed = error
    said = said_of(failed)
    try:
        torch.load(max(folder.glob("step-*.pt")))
    except Exception as error:
        raise Wrong(f"step-2.pt stays and cannot be loaded: {brief(error)}{said}") from None
    return said


def other_layouts(what: str, folder: Path) -> None:
    job = job_of("13", what)
    bag = train(job, adamw)
    check(job, values_of(bag))
    torch.save(bag.state_dict(), folder / "model.pt")
    other = Bag(job)
    other.load_state_dict(torch.load(folder / "model.pt"))
    check_loaded(values_of(other), values_of(bag))


def other_layouts_in_safetensors(what: str, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(train(job_of("13", what), adamw).state_dict(), folder / "model.safetensors")


WAYS = {"foreach": partial(adamw, foreach=True), "fused": partial(adamw, fused=True)}
CELLS: dict[str, dict[str, Script]] = {
    "1": {way: partial(as_by_formula, make, "1") for way, make in WAYS.items()},
    "2": {
        f"{what} ({way})": partial(as_by_formula, make, "2", what=what)
        for way, make in WAYS.items()
        for what in GROUPS
    },
    "4": {kind: partial(every_size, WAYS["fused"], kind) for kind in DTYPES},
    "5": {
        f"{what}{'' if strict else ' (strict=False)'}": partial(compiled_names, what, strict=strict)
        for what in ("whole", "blocks")
        for strict in (True, False)
    },
    "6": {f"after {n} steps": partial(loaded_late, adamw, n) for n in (0, 1)},
    "7": {"": partial(other_order, adamw)},
    "8": {"": tied},
    "9": {"": full_disk},
    "11": {f"norm {n:g}": partial(as_by_formula, adamw, "11", norm=n) for n in (2, 1, math.inf)},
    "12": {"": partial(small_decays, adamw)},
    "13": {
        f"{what} ({how})": partial(script, what)
        for how, script in {
            "torch.save": other_layouts,
            "safetensors": other_layouts_in_safetensors,
        }.items()
        for what in LAYOUTS
    },
    "14": {way: partial(as_by_formula, make, "14") for way, make in WAYS.items()},
    "sparse": {"": partial(empty_sparse, sgd)},
    "compiled": {"": partial(compiled_step, adamw)},
}
NOT_RUN = {"10": "PyTorch alone has nothing that resumes a loader"}
