# SPDX-License-Identifier: Apache-2.0
"""The scripts for every optimizer that takes the place of torch.optim's; `make` makes the
optimizer.

A script is a function whose last argument is a folder; a table gives the arguments before it. It
returns if the outcome is right, with a remark or None. If the outcome is wrong, it raises Wrong,
with the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from field.jobs import DECAY, Wrong, check, job_of, train
from field.models import (
    check_decayed,
    check_fives,
    check_loaded,
    check_moments,
    gradients_of_pair,
    pair,
    values_of,
)

Make = Callable[..., Any]
Script = Callable[[Path], "str | None"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPACINGS = {"fp32": 2**-23, "bf16": 2**-8, "fp16": 2**-11}  # between numbers around 1
# Sizes around the widths of registers, and the size of report 4.
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257]
SIZES += [1000, 1023, 1024, 1025, 4097, 5001]


def as_by_formula(make: Make, report: str, folder: Path, **more: Any) -> None:
    job = job_of(report, **more)
    check(job, values_of(train(job, make)))


def every_size(
    make: Make, kind: str, folder: Path, sizes: Sequence[int] = SIZES
) -> None:
    """Checks that each step is within a rounding of the parameter's type.

    The right values are PyTorch's in fp32, from the same 16-bit gradients.
    """
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n).to(DTYPES[kind])) for n in sizes]
    exact = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer, right = make(params), torch.optim.AdamW(exact, lr=1e-2, weight_decay=DECAY)
    for step in range(3):
        for param, other in zip(params, exact, strict=True):
            torch.manual_seed(step)
            param.grad = torch.randn(param.shape).to(param.dtype)
            other.grad = param.grad.float()
        optimizer.step()
        right.step()
    for param, other in zip(params, exact, strict=True):
        apart = float((param.detach().float() - other.detach()).abs().max()) / SPACINGS[kind]
        # In fp32, the roundings within a step are larger than the rounding of its result.
        if not apart <= (8 if kind == "fp32" else 3):
            raise Wrong(
                f"a parameter of {param.numel()} elements differs from the right result by "
                f"{apart:.1f} spacings of {kind}"
            )


def loaded_late(make: Make, when: int, folder: Path) -> None:
    torch.manual_seed(6)
    layer = torch.nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = make(layer.parameters(), lr=1e-3)
    for step in range(3):
        if step == when:
            layer.load_state_dict({k: torch.full_like(v, 5) for k, v in layer.state_dict().items()})
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_fives(values_of(layer))


def first_moment(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    return optimizer.state[param]["exp_avg"]


def other_order(make: Make, folder: Path, moment: Callable[..., Any] = first_moment) -> None:
    params = pair(1)
    optimizer = make([(name, params[name]) for name in "ab"])
    for step in range(3):
        for name, gradient in gradients_of_pair(step).items():
            params[name].grad = gradient
        optimizer.step()
    others = pair(2)
    resumed = make([(name, others[name]) for name in "ba"])
    resumed.load_state_dict(optimizer.state_dict())
    check_moments(
        {name: moment(resumed, others[name]) for name in "ab"},
        {name: moment(optimizer, params[name]) for name in "ab"},
    )


def small_decays(make: Make, folder: Path) -> None:
    param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = make([param], lr=1e-3, weight_decay=0.1)
    for _ in range(400):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    check_decayed(param.detach())


def empty_sparse(make: Make, folder: Path) -> None:
    table = torch.nn.Embedding(4, 3, sparse=True)
    before = values_of(table)
    optimizer = make(table.parameters())
    table.weight.grad = torch.zeros(4, 3).to_sparse(1)
    optimizer.step()
    check_loaded(values_of(table), before)


def compiled_step(make: Make, folder: Path) -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = make(layer.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        before = values_of(layer)
        layer(torch.ones(2, 3)).sum().backward()
        step()
        optimizer.zero_grad()
        if any(torch.equal(a, b) for a, b in zip(values_of(layer), before, strict=True)):
            raise Wrong("a step changed no weight")
