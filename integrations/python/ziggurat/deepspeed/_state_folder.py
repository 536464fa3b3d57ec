# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state in a folder of a checkpoint: a checkpoint of the engine's own format, which
the engine writes and reads some chunks at a time, with the hash of every byte.

    FOLDER/step-000000010/   safetensors shards and their manifest, as `ziggurat ckpt` reads them
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat._checkpoint_load import AT_ONCE, read_values
from ziggurat._native import InvalidArgument, Unavailable
from ziggurat._native_checkpoint import Checkpoint, save_checkpoint
from ziggurat._opened import DTYPES, Opened, rounds_to, runtime_of
from ziggurat._optimizer import EngineOptimizer
from ziggurat._parts import Part
from ziggurat._ranks import Cut
from ziggurat._sharing import Divided
from ziggurat._state import MOMENTS


class Kept(NamedTuple):
    """What reading a folder needs beside it, by the number that each parameter has in the state
    dict's groups."""

    names: dict[int, str]  #: in the folder
    steps: dict[int, int]


def write(
    optimizer: EngineOptimizer, folder: Path, resume: Mapping[str, Any], alone: bool
) -> Kept | None:
    """What was taken over, to `folder`, which is there. None: there is no state before the first
    step.

    A call of all ranks that have a part of the state; where one is `alone` in it, it reads the
    others' parts, which need not do anything. Errors: InvalidArgument where these lack what their
    next step takes over first; those of the disk, and no file names then what is there.
    """

    def prepared() -> tuple[_Saving, dict[str, Any]]:
        if not folder.is_dir():
            raise InvalidArgument(
                f"save_checkpoint(): {folder}, which rank 0 has made, is not there for this rank: "
                "give all ranks one folder that they share, or set "
                "`checkpoint.use_node_local_storage`"
            )
        saving = _Saving(optimizer, alone)
        return saving, saving.content(folder, resume) if saving.params else {}

    if alone:
        _need_settled(optimizer)
        saving, content = prepared()
    else:
        saving, content = optimizer._sharing.together("save_checkpoint()", prepared)
    if not content:
        return None
    engines = [opened.engine for opened in optimizer._opened]
    save_checkpoint(runtime_with(optimizer), engines, [], b"", content)
    return saving.kept()


def _need_settled(optimizer: EngineOptimizer) -> None:
    """Behind take_over() of all ranks, or a step, all are: what one has taken over, it alone has."""
    optimizer.need_open()
    if optimizer._sharing.ranks is None:
        take_over(optimizer, "save_checkpoint()")
        return
    optimizer.synchronize()
    if optimizer._to_load:
        raise InvalidArgument(
            "save_checkpoint(): a state was loaded that no step has taken over yet, and not "
            "all ranks save: let all of them call it, or make a step before"
        )
    if names := [name for opened in optimizer._opened for name in opened.unsettled()]:
        raise InvalidArgument(
            f"save_checkpoint(): parameter '{names[0]}' was written since the newest step, and "
            "not all ranks save: the others take their masters from it only in the next step; "
            "let all of them call it, or make a step before"
        )


def take_over(optimizer: EngineOptimizer, call: str) -> None:
    """What a step would take over first, of parameters that were written and a state that was
    loaded, the engine has already. A call of all ranks."""
    optimizer.need_open()
    optimizer.synchronize()
    if optimizer._to_load:
        open_all(optimizer, list(optimizer._to_load))

    def settle() -> None:
        for opened in optimizer._opened:
            opened.settle()

    optimizer._sharing.together(call, settle)


def open_all(optimizer: EngineOptimizer, with_state: Iterable[torch.Tensor]) -> None:
    """What is trained, and what has a state though it is frozen now: as if it were frozen later."""
    frozen = [param for param in with_state if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        optimizer.open()
    finally:
        for param in frozen:
            param.requires_grad_(False)


def runtime_with(optimizer: EngineOptimizer) -> Any:
    return optimizer._sharing.runtime(optimizer._workers(optimizer._order))


class _Saving:
    """What of an optimizer's state goes where."""

    def __init__(self, optimizer: EngineOptimizer, alone: bool) -> None:
        self._optimizer = optimizer
        self._alone = alone and optimizer._sharing.ranks is not None
        self._names = {param: name for name, param, _ in optimizer._named()}
        self.params = [p for p in optimizer._order if p in optimizer._opened_with and p.numel() > 0]
        self._indices = {param: i for i, param in enumerate(self.params)}

    def content(self, folder: Path, resume: Mapping[str, Any]) -> dict[str, Any]:
        optimizer = self._optimizer
        params = [
            {"name": self._names[param], "shape": list(param.shape), "trained": True}
            for param in self.params
        ]
        return {
            "folder": os.path.abspath(folder),
            "step": max(opened.engine.generation for opened in optimizer._opened),
            "keep_last": 0,
            "keep_every": 0,
            "resume": dict(resume),
            "model": "deepspeed",
            "dtype": DTYPES[self.params[0].dtype],
            "placement": optimizer.placement,
            "params": params,
            "engines": [self._parts_of(opened) for opened in optimizer._opened],
            "values": [],
            "widened": True,  # codes of 8 bits go on with one rank alone
            "alone": self._alone,
            "others": list(self._others()) if self._alone else [],
        }

    def _parts_of(self, opened: Opened) -> list[dict[str, Any] | None]:
        sharing = self._optimizer._sharing
        return [
            {"param": self._indices[part.param]} | part.place()
            if part.param in self._indices and sharing.saves(part.param, trained=True)
            else None
            for part in opened.parts
        ]

    def _others(self) -> Iterator[dict[str, Any]]:
        """What other ranks have."""
        sharing = self._optimizer._sharing
        if not isinstance(sharing, Divided):
            raise InvalidArgument(
                "save_checkpoint(): the parameters are FSDP2's, and not all ranks save: let all "
                "of them call it"
            )
        for engine, opened in enumerate(self._optimizer._opened):
            for param in (param for param in opened.members if param in self._indices):
                cut = Cut(param.numel(), sharing.ranks.size)
                for rank in set(range(sharing.ranks.size)) - {sharing.ranks.rank}:
                    its = cut.of(rank)
                    if its.stop > its.start:
                        yield {
                            "engine": engine,
                            "rank": rank,
                            "name": opened._names_of[param],
                            "param": self._indices[param],
                            "first": its.start,
                            "count": its.stop - its.start,
                        }

    def kept(self) -> Kept:
        kept = Kept({}, {})
        for number, (name, param, _) in enumerate(self._optimizer._named()):
            if param in self._indices:
                kept.names[number] = name
                kept.steps[number] = self._optimizer._opened_with[param].steps_of(param)
        return kept


def masters(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's, in fp32, by its name there."""
    checkpoint = Checkpoint(runtime_of(1), os.path.abspath(folder))
    try:
        for index, tensor in enumerate(checkpoint.tensors):
            if tensor.array == "master":
                values = torch.empty(tensor.shape, dtype=torch.float32)
                checkpoint.read(index, 0, values.data_ptr(), values.numel())
                yield tensor.owner, values
    finally:
        checkpoint.close()
