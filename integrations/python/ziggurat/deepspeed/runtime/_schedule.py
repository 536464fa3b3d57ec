# SPDX-License-Identifier: Apache-2.0
"""The base of the schedules, which sets what the engine computes (optimizer/schedule.h)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ziggurat._library.abi import InvalidArgument, call

Rate = float | Sequence[float]


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside a wrapper. Errors: InvalidArgument if there is no optimizer."""
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(one, torch.optim.Optimizer):
            return one
    raise InvalidArgument(
        f"a schedule needs a torch.optim.Optimizer, not {type(optimizer).__name__}"
    )


def positive(name: str, count: Any) -> int:
    if not isinstance(count, int) or count <= 0:
        raise InvalidArgument(f"{name}={count}: give a whole number from 1")
    return count


class Schedule:
    """Sets the rates of the curves whose parameters a subclass has."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = unwrapped(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def _curve(self, group: int) -> dict[str, Any]:
        """Returns the curve of a group: DeepSpeed's name of it, and all its parameters."""
        raise NotImplementedError

    def _scheduled(self) -> list[Any]:
        """Returns what each group's curve sets after ``last_batch_iteration``."""
        return [self._at(self._curve(i)) for i in range(len(self.optimizer.param_groups))]

    def _at(self, curve: dict[str, Any]) -> Any:
        numbers = {key: its if isinstance(its, bool | int | str) else float(its) for key, its in curve.items()}
        steps = max(0, int(self.last_batch_iteration) + 1)
        return call("ziggurat_schedule", json.dumps(numbers).encode(), steps)

    def get_lr(self) -> list[float]:
        """Returns the rates after ``last_batch_iteration``, which is -1 before the first step."""
        return [its.learning_rate for its in self._scheduled()]

    def get_last_lr(self) -> list[float]:
        """Returns the rates that are set now."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one iteration, or to the given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the iteration; the optimizer's groups hold the rates."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _begin(self) -> None:
        """Sets the rates of the first step, unless a run goes on, whose groups hold them."""
        if self.last_batch_iteration == -1:
            self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def for_each_group(self, name: str, value: Rate) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * count
        if len(value) != count:
            raise InvalidArgument(
                f"{name} has {len(value)} values, but the optimizer has {count} groups: give one "
                "value, or one for each group"
            )
        return list(value)
