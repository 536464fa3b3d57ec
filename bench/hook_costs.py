# SPDX-License-Identifier: Apache-2.0
"""Measures what Python takes of a step of an offloaded model beside its compute: the constants of
integrations/python/ziggurat/_plan/played_step.py. Models of 4 to 16 units with 2 to 12 tiny parameters each make
steps with and without offload(); the fastest of many counts, so that others on the machine do not.

    python bench/hook_costs.py

The engine's part of a call, to its reactor and back, is in these constants; what it waits for is not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import ziggurat.torch

STEPS = 400


class Took(NamedTuple):
    """Seconds of a step, the least of each part."""

    forward: float
    backward: float
    step: float


def model_of(units: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(1)
    blocks = (torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))) for _ in range(units))
    return torch.nn.Sequential(*blocks)


def timed(model: torch.nn.Module, step: Callable[[], object], zero_grad: Callable[[], object]) -> Took:
    batch = torch.zeros(2, 8)
    took = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        loss = model(batch).sum()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        step()
        ended = time.perf_counter()
        zero_grad()
        took.append((forward - begun, backward - forward, ended - backward))
    return Took(*(min(part) for part in zip(*took, strict=True)))


def measured() -> Iterator[tuple[int, int, Took]]:
    """Yields units, parameters, and what a step takes more than without offload()."""
    for units, layers in itertools.product((4, 8, 16), (1, 2, 6)):
        model = model_of(units, layers)
        plain = timed(model, lambda: None, model.zero_grad)
        names = [str(unit) for unit in range(units)]
        ziggurat.torch.offload(model, memory="8MiB", units=names)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3)
        ours = timed(model, optimizer.step, optimizer.zero_grad)
        optimizer.close()
        yield units, 2 * units * layers, Took(*(own - before for own, before in zip(ours, plain, strict=True)))


def main() -> None:
    torch.set_num_threads(1)
    found = list(measured())
    for part, of_units in (("forward", True), ("backward", True), ("step", False)):
        rows = torch.tensor([[units if of_units else 1, params] for units, params, _ in found], dtype=torch.float64)
        seconds = torch.tensor([getattr(took, part) for _, _, took in found], dtype=torch.float64)
        each, param = torch.linalg.lstsq(rows, seconds[:, None]).solution[:, 0].tolist()
        off = (rows @ torch.tensor([each, param], dtype=torch.float64) - seconds).abs().max()
        what = "a unit" if of_units else "a step"
        print(f"{part:<9} {what} {1e6 * each:6.1f} us, a parameter {1e6 * param:5.1f} us, off by {1e6 * float(off):.0f} us at most")


if __name__ == "__main__":
    main()
