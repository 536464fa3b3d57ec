# SPDX-License-Identifier: Apache-2.0
"""Jobs for AdamW with gradients that we make, so that every library gets the same ones, and the
right results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DECAY = 0.01
BETAS = (0.9, 0.999)
EPSILON = 1e-8
# Three steps in fp32 stay within a few roundings of float64. The errors in the reports are 1e-2 a
# step.
TOLERANCE = 1e-5


class Wrong(Exception):
    """An outcome that is not right, with the number. Other exceptions are the library's own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Tensors that AdamW trains with gradients that we make, the same ones for every library."""

    tensors: Sequence[Tensor]
    groups: Sequence[Sequence[int]] = ((),)  # indices of tensors; an empty group means all of them
    rates: Sequence[float] = (1e-2,)  # of each group
    frozen: Sequence[int] = ()
    clip: float | None = None
    norm: float = 2.0
    micro: int = 1  # batches per step
    steps: int = 3

    def members(self) -> list[list[int]]:
        everything = list(range(len(self.tensors)))
        return [list(group) or everything for group in self.groups]

    def trained(self) -> list[int]:
        return [i for i in range(len(self.tensors)) if i not in self.frozen]

    def gradients(self, step: int, batch: int) -> list[Tensor]:
        """Returns the gradients of one batch, not yet divided by the number of batches in a
        step."""
        torch.manual_seed(100 * step + batch)
        scale = (1.0, 30.0, 0.3)[step % 3]  # makes steps differ if they are not clipped
        return [scale * torch.randn(tensor.shape) for tensor in self.tensors]


GROUPS = ("empty", "frozen", "one element")
LAYOUTS = ("channels_last", "transposed")


def job_of(report: str, what: str = "", norm: float = 2.0) -> Job:
    torch.manual_seed(7)
    if report == "1":
        return Job([torch.randn(33), torch.empty(0, 10)], clip=1.0)
    if report == "2":  # `what` is the content of a second group
        other = {"empty": torch.empty(0), "frozen": torch.ones(5), "one element": torch.randn(1)}
        frozen = [1] if what == "frozen" else []
        return Job([torch.randn(9), other[what]], [[0], [1]], [1e-2, 0.5], frozen)
    if report == "11":
        return Job([torch.randn(8, 8), torch.randn(8)], clip=0.1, norm=norm)
    if report == "13":
        last = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
        return Job([{"channels_last": last, "transposed": torch.randn(4, 6).t()}[what]])
    assert report == "14"
    return Job([torch.randn(6, 6), torch.randn(6)], clip=0.1, micro=4)


class Bag(torch.nn.Module):
    """The tensors of a job as parameters, with a loss whose gradients are the job's."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        for index, tensor in enumerate(job.tensors):
            trained = index not in job.frozen
            self.register_parameter(f"p{index}", torch.nn.Parameter(tensor.clone(), trained))

    def groups(self, job: Job) -> list[dict[str, Any]]:
        params = list(self.parameters())
        return [
            {"params": [params[i] for i in members], "lr": rate}
            for members, rate in zip(job.members(), job.rates, strict=True)
        ]

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((p.float() * g).sum() for p, g in pairs if p.requires_grad)


def expected(job: Job) -> list[Tensor]:
    """Returns the right result of a job, by AdamW's formula in float64."""
    values = [tensor.double().contiguous() for tensor in job.tensors]
    first = [torch.zeros_like(value) for value in values]
    second = [torch.zeros_like(value) for value in values]
    for step in range(1, job.steps + 1):
        batches = [job.gradients(step, batch) for batch in range(job.micro)]
        sums = [sum(parts).double() / job.micro for parts in zip(*batches, strict=True)]
        if job.clip is not None:
            flat = torch.cat([sums[i].flatten() for i in job.trained()])
            scale = min(1.0, job.clip / float(torch.linalg.vector_norm(flat, job.norm)))
            sums = [scale * gradient for gradient in sums]
        for members, rate in zip(job.members(), job.rates, strict=True):
            for i in set(members).intersection(job.trained()):
                first[i] = BETAS[0] * first[i] + (1 - BETAS[0]) * sums[i]
                second[i] = BETAS[1] * second[i] + (1 - BETAS[1]) * sums[i] ** 2
                root = (second[i] / (1 - BETAS[1] ** step)).sqrt() + EPSILON
                move = first[i] / (1 - BETAS[0] ** step) / root
                values[i] = values[i] * (1 - rate * DECAY) - rate * move
    return values


def check(job: Job, found: Sequence[Tensor]) -> None:
    rows = zip(job.tensors, found, expected(job), strict=True)
    for index, (start, value, right) in enumerate(rows):
        if value.shape != right.shape:
            raise Wrong(f"tensor {index} has the shape {tuple(value.shape)} after the steps")
        if value.numel() == 0:
            continue
        if bad := int((~value.isfinite()).sum()):
            raise Wrong(f"{bad} of {value.numel()} numbers of tensor {index} are not finite")
        apart = float((value.double() - right).abs().max())
        if apart > TOLERANCE:
            still = ", because no step changed it" if torch.equal(value, start) else ""
            raise Wrong(f"tensor {index} differs from the right result by {apart:.1e}{still}")


def train(job: Job, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> Bag:
    """Trains in one process, like a script with an optimizer but no engine."""
    bag = Bag(job)
    optimizer = make(bag.groups(job))
    steps(job, bag, optimizer)
    return bag


def steps(job: Job, bag: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(1, job.steps + 1):
        for batch in range(job.micro):
            (bag(job.gradients(step, batch)) / job.micro).backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(bag.parameters(), job.clip, job.norm)
        optimizer.step()
        optimizer.zero_grad()
