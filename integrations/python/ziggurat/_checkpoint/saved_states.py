# SPDX-License-Identifier: Apache-2.0
"""Reads the state in a checkpoint parameter by parameter, for an optimizer that has a state already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

from ziggurat._checkpoint.checkpoint_load import Loading, read_values
from ziggurat._library.native import Engine, Param, Runtime
from ziggurat._library.native_checkpoint import Checkpoint
from ziggurat._library.state_kinds import has_codes
from ziggurat._memory.progress import Progress
from ziggurat._optimizer.optimizer import EngineOptimizer

_BLOCK = 256  # codes that share a scale: optimizer/eight_bit.h


class SavedStates(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """What ``torch.optim`` has in ``optimizer.state``, each entry read when it is asked for."""

    def __init__(
        self, runtime: Runtime, checkpoint: Checkpoint, loading: Loading, optimizer: EngineOptimizer
    ) -> None:
        self._checkpoint, self._loading = checkpoint, loading
        self._runtime, self._settings = runtime, optimizer._settings
        self._scales = {
            (tensor.owner, tensor.array.removesuffix(".scale")): index
            for index, tensor in enumerate(checkpoint.tensors)
            if tensor.array.endswith(".scale")
        }

    def __getitem__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state, tensors = self._loading.states[param], self._checkpoint.tensors
        read, codes = {}, {}
        for name, saved in state.items():
            at = self._loading.index_of(saved)
            if name == "master" and param.dtype == torch.float32:
                continue  # the weights, which come from elsewhere
            if at is not None and tensors[at].type == "U8":
                codes[name] = tensors[at].owner
            else:
                read[name] = saved.read()
        return read | (self._decoded(param, codes) if codes else {})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._loading.states)

    def __len__(self) -> int:
        return len(self._loading.states)

    def verify(self) -> None:
        """Reads all of it once and keeps nothing. Errors: DataLoss, which names file and tensor, if a byte is
        damaged."""
        total_bytes = sum(param.nbytes for param in self)
        with Progress("reading the checkpoint's state, to verify it", total_bytes) as progress:
            for param in self:
                self[param]
                progress.add(param.nbytes)

    def _decoded(self, param: torch.Tensor, codes: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Returns the values that 8-bit codes stand for, by the array's name; `codes` has the parameter's name in
        the checkpoint. An engine for this parameter alone loads them, because engines know blocks and scales."""
        owner, shape, settings = next(iter(codes.values())), tuple(param.shape), dict(self._settings)
        for other in ("host_memory", "state_rounding", "param_rounding"):
            settings.pop(other, None)
        settings |= {"state_format": "fp32", "placement": "optimizer=host", "resume": "new", "progress": False}
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        engine = Engine(
            self._runtime,
            [Param(owner, shape, "fp32", values.data_ptr(), 0)],
            settings,
            kept=values,
            load=(
                self._checkpoint.handle,
                {"parts": [{"name": owner, "shape": list(shape), "first": 0}], "steps": [1], "weights_only": False},
            ),
        )
        try:
            decoded = {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name in codes}
            for name, into in decoded.items():
                engine.read_state(0, name, into.data_ptr(), into.numel())
        finally:
            engine.close()
        if has_codes(self._settings["state_format"]):
            for name, into in decoded.items():
                self._keep_scales(owner, name, into)
        return decoded

    def _keep_scales(self, owner: str, name: str, values: torch.Tensor) -> None:
        """Lets the engine make the same codes of the values again. A block's scale is its largest magnitude, and no
        code stands for -scale: the lowest stands for slightly less (optimizer/eight_bit.h)."""
        at = self._scales.get((owner, name))
        count = -(-values.numel() // _BLOCK)
        if at is None or self._checkpoint.tensors[at].shape != (count,):
            return  # blocks of several parameters: a code may move by one
        scales = read_values(self._checkpoint, at, 0, count)
        whole = values.numel() // _BLOCK
        first, last = values.view(-1).split([whole * _BLOCK, values.numel() - whole * _BLOCK])
        _reach(first.view(-1, _BLOCK), scales[:whole])
        _reach(last.view(1, -1), scales[whole:])


def _reach(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Sets the lowest value of each block, which is a row, to -scale where no magnitude is the scale."""
    if blocks.numel() == 0:
        return
    rows = (blocks.abs().amax(dim=1) < scales).nonzero().view(-1)
    blocks[rows, blocks[rows].argmin(dim=1)] = -scales[rows]


@contextlib.contextmanager
def states_in(
    path: str | os.PathLike[str], optimizer: EngineOptimizer, model: torch.nn.Module
) -> Iterator[SavedStates]:
    """Yields the states in a checkpoint that :func:`save_checkpoint` wrote, for an optimizer that has
    one already. Errors: those of :func:`load_checkpoint`."""
    runtime = optimizer._sharing.runtime(optimizer._workers(optimizer._order))
    checkpoint = Checkpoint(runtime, os.fspath(path))
    try:
        loading = Loading(checkpoint, optimizer, model, None, strict=True, weights_only=False)
        loading.prepare({})
        yield SavedStates(runtime, checkpoint, loading, optimizer)
    finally:
        checkpoint.close()
