# SPDX-License-Identifier: Apache-2.0
"""Keeps the optimizer's state in a folder of a checkpoint. The folder has a checkpoint of the
engine's own format, which the engine writes and reads a few chunks at a time, with a hash of every
byte.

    FOLDER/step-000000010/   safetensors shards and their manifest, as `ziggurat ckpt` reads them
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import InvalidArgument
from ziggurat._library.native_checkpoint import Checkpoint, save_checkpoint
from ziggurat._optimizer.opened import Opened, runtime_of
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.sharing import Divided


class Kept(NamedTuple):
    """What a reading needs beside the folder, by each parameter's number in the state dict's
    groups."""

    names: dict[int, str]  #: names of the parameters in the folder
    steps: dict[int, int]


def write(
    optimizer: EngineOptimizer, folder: Path, resume: Mapping[str, Any], alone: bool
) -> Kept | None:
    """Writes the state, which the engine has taken over, to `folder`, which exists. Returns None
    before the first step, when there is no state.

    All ranks that have a part of the state call this. If one rank is `alone` in it, it reads the
    other ranks' parts, and these need not do anything. Errors: InvalidArgument if the other ranks'
    next step would take over a change first; those of the disk, and then no file refers to what
    was written.
    """

    def prepared() -> tuple[_Saving, dict[str, Any]]:
        if not folder.is_dir():
            raise InvalidArgument(
                f"save_checkpoint(): rank 0 has made {folder}, but this rank does not see it: "
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
    """Checks that a rank that saves alone reads what the other ranks would save. After take_over()
    on all ranks, or after a step, this is so; what one rank takes over alone, the others lack.
    Errors: InvalidArgument."""
    optimizer.need_open()
    if optimizer._sharing.ranks is None:
        take_over(optimizer, "save_checkpoint()")
        return
    optimizer.synchronize()
    if optimizer._to_load:
        raise InvalidArgument(
            "save_checkpoint(): no step has used the loaded state yet, so all ranks must save "
            "it, but only some do: let all ranks call save_checkpoint(), or make a step first"
        )
    if names := [name for opened in optimizer._opened for name in opened.unsettled()]:
        raise InvalidArgument(
            f"save_checkpoint(): parameter '{names[0]}' or its state was written since the newest "
            "step, so all ranks must save, but only some do. The other ranks may take it over only "
            "in the next step: let all ranks call save_checkpoint(), or make a step first"
        )


def take_over(optimizer: EngineOptimizer, call: str) -> None:
    """Gives the engine now what the next step would take over first: parameters that somebody has
    written, and a loaded state. All ranks call this."""
    optimizer.need_open()
    optimizer.synchronize()
    if optimizer._to_load:
        open_all(optimizer, list(optimizer._to_load))

    def settle() -> None:
        for opened in optimizer._opened:
            opened.settle()

    optimizer._sharing.together(call, settle)


def open_all(optimizer: EngineOptimizer, with_state: Iterable[torch.Tensor]) -> None:
    """Opens engines for the trained parameters, and for frozen ones that have a state, as if these
    had been frozen later."""
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
    """Decides which part of an optimizer's state is stored where."""

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
            "widened": True,  # one rank alone can load 8-bit codes, so they are widened
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
        """Yields the parts that other ranks have."""
        sharing = self._optimizer._sharing
        if not isinstance(sharing, Divided):
            raise InvalidArgument(
                "save_checkpoint(): FSDP2 has divided the parameters, so all ranks must save, but "
                "only some do: let all ranks call it"
            )
        for engine, opened in enumerate(self._optimizer._opened):
            for param in (param for param in opened.members if param in self._indices):
                cut = sharing.ranks.cut(param.numel())
                for shard in set(range(sharing.ranks.shards)) - {sharing.ranks.shard}:
                    its = cut.of(shard)
                    if its.stop > its.start:
                        yield {
                            "engine": engine,
                            "rank": sharing.ranks.with_shard(shard),
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
    """Yields each parameter's master, in fp32, by its name in the folder."""
    checkpoint = Checkpoint(runtime_of(1), os.path.abspath(folder))
    try:
        for index, tensor in enumerate(checkpoint.tensors):
            if tensor.array == "master":
                values = torch.empty(tensor.shape, dtype=torch.float32)
                checkpoint.read(index, 0, values.data_ptr(), values.numel())
                yield tensor.owner, values
    finally:
        checkpoint.close()
