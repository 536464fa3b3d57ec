# SPDX-License-Identifier: Apache-2.0
"""Reads the state in a checkpoint parameter by parameter, for an optimizer that has a state already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

from ziggurat._checkpoint_load import Loading
from ziggurat._foreign._content import State
from ziggurat._native_checkpoint import Checkpoint
from ziggurat._optimizer import EngineOptimizer


class _States(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """What ``torch.optim`` has in ``optimizer.state``, each entry read when it is asked for."""

    def __init__(self, states: Mapping[torch.Tensor, State]) -> None:
        self._states = states

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: saved.read() for name, saved in self._states[param].items()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


@contextlib.contextmanager
def states_in(
    path: str | os.PathLike[str], optimizer: EngineOptimizer, model: torch.nn.Module
) -> Iterator[Mapping[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yields the states in a checkpoint that :func:`save_checkpoint` wrote, for an optimizer that has
    one already. Errors: those of :func:`load_checkpoint`."""
    checkpoint = Checkpoint(optimizer._sharing.runtime(optimizer._workers(optimizer._order)), os.fspath(path))
    try:
        loading = Loading(checkpoint, optimizer, model, None, strict=True, weights_only=False)
        loading.prepare({})
        yield _States(loading.states)
    finally:
        checkpoint.close()
