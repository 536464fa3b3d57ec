# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the engine's own format, which `ziggurat ckpt` and other tools read: saved by any
number of ranks, loaded by any.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ziggurat._foreign._plan import Places
from ziggurat._native import InvalidArgument
from ziggurat._native_checkpoint import Values, save_checkpoint as save_natively
from ziggurat._opened import DTYPES, Opened
from ziggurat._optimizer import EngineOptimizer
from ziggurat._resume import random_states

MAGIC = b"ziggurat.torch 1\n"  # before what this package adds to a checkpoint


def save_checkpoint(
    folder: str | os.PathLike[str],
    optimizer: EngineOptimizer,
    model: torch.nn.Module,
    *,
    step: int | None = None,
    keep_last: int = 0,
    keep_every: int = 0,
    keep_best: bool = False,
    resume: Mapping[str, Any] | None = None,
    **kept: Any,
) -> str:
    """Saves `model`, and the state of `optimizer`, in ``FOLDER/step-NNNNNNNNN``, which is returned.
    Where another run, or one that this one left by loading an older checkpoint, has that name
    already, the directory's name ends with some digits of this run's line of history.

    Parameters' masters, moments and steps, buffers, groups' settings and random states; and what
    is given by name: objects with ``state_dict()``, as ``scheduler=scheduler, scaler=scaler``.
    `resume` says plain facts of the run for tools and people, by the names that
    ``ziggurat ckpt verify`` asks for: ``{"consumed_samples": 51200, "tokenizer": "gpt2"}``. `step` is the optimizer's steps if it
    is not given. Of this run's checkpoints in the folder the newest `keep_last` stay, and those of every
    `keep_every` steps; 0: all; what another run saved there always stays. With `keep_best` the best step's stays too, which `resume` names:
    ``{"best_metric": {"name": "loss", "step": 300, "value": 2.1}}``.

    Between two steps, a call of all ranks: each writes what it has, a chunk at a time, and training
    goes on when all of it is durable. Errors: InvalidArgument where the folder has this step
    already; ResourceExhausted for a full disk; nothing of the checkpoint is there then.
    """
    sharing, folder = optimizer._sharing, os.path.abspath(folder)
    optimizer.synchronize()
    optimizer.open()
    random = _of_all_ranks(optimizer, random_states())

    def prepared() -> tuple[_Saving, bytes, int, str]:
        saving = _Saving(optimizer, model)
        number = saving.steps_done() if step is None else int(step)
        content = saving.content() | {
            "folder": folder,
            "step": number,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_best": keep_best,
            "resume": _resume_facts(optimizer, resume, kept),
        }
        return saving, saving.blob(kept, random), number, json.dumps(content)

    saving, blob, number, content = sharing.together("save_checkpoint()", prepared)
    engines = [opened.engine for opened in optimizer._opened]
    save_natively(saving.runtime, engines, saving.values, blob, content)
    saved: str = sharing.decided(lambda: _saved_as(folder, f"step-{number:09}"))
    return saved


def _saved_as(folder: str, name: str) -> str:
    """What the checkpoint that was just made is called: ``latest`` was written for it."""
    with open(f"{folder}/latest", encoding="utf-8") as latest:
        saved = latest.read().strip()
    return f"{folder}/{saved if saved.startswith(name) else name}"


def _resume_facts(
    optimizer: EngineOptimizer, given: Mapping[str, Any] | None, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """By the names of a manifest: where the checkpoint has what a run goes on with."""
    facts: dict[str, Any] = {"rng": {"in": "blob", "ranks": _ranks(optimizer)}}
    facts["loss_scale"] = {"in": "blob"} if "scaler" in kept else None
    facts["best_metric"] = None
    if "scheduler" in kept:
        facts["schedule"] = {"in": "blob", "class": type(kept["scheduler"]).__name__}
    else:
        facts["schedule"] = {"lr": [float(group["lr"]) for group in optimizer.param_groups]}
    return facts | dict(given or {})


def _ranks(optimizer: EngineOptimizer) -> int:
    ranks = optimizer._sharing.ranks
    return 1 if ranks is None else ranks.size


class _Saving:
    """What of a model and its optimizer goes where in a checkpoint."""

    def __init__(self, optimizer: EngineOptimizer, model: torch.nn.Module) -> None:
        if not optimizer._opened:
            raise InvalidArgument("save_checkpoint(): the optimizer trains no parameter")
        for opened in optimizer._opened:
            opened.settle()
        self._optimizer, self._model = optimizer, model
        sharing = optimizer._sharing
        self.runtime = sharing.runtime(optimizer._workers(optimizer._order))
        self._places = Places(optimizer, model)
        self._params: list[dict[str, Any]] = []
        self._indices: dict[torch.Tensor, int] = {}
        self._value_parts: list[dict[str, Any]] = []
        self._held: list[torch.Tensor] = []  # host memory of `values`
        self.values: list[Values] = []
        self._others: dict[str, torch.Tensor] = {}  # what is no tensor of this format
        for name, target in self._places.targets.items():
            if self._places.name_of(target) == name:
                self._add(name, target)

    def _add(self, name: str, target: torch.Tensor) -> None:
        trained = target in self._optimizer._opened_with
        if target.numel() == 0:  # of a DTensor too
            self._others[name] = torch.empty(target.shape, dtype=target.dtype)
            return
        if not trained and target.dtype not in DTYPES:
            self._others[name] = target.detach().cpu()
            return
        self._indices[target] = len(self._params)
        param = {"name": name, "shape": list(target.shape), "trained": trained}
        self._params.append(param if trained else param | {"dtype": DTYPES[target.dtype]})
        sharing = self._optimizer._sharing
        if trained or not sharing.saves(target, trained=False):
            return
        part = sharing.whole_or_shard(target)
        held = part.memory().detach().to("cpu").contiguous()
        if held.numel() == 0:
            return
        self._held.append(held)
        self.values.append(Values(DTYPES[held.dtype], held.data_ptr(), held.numel()))
        self._value_parts.append({"param": self._indices[target]} | part.place())

    def _parts_of(self, opened: Opened) -> list[dict[str, Any] | None]:
        parts: list[dict[str, Any] | None] = []
        for part in opened.parts:
            index = self._indices.get(part.param)
            if index is None or not self._optimizer._sharing.saves(part.param, trained=True):
                parts.append(None)
            else:
                parts.append({"param": index} | part.place())
        return parts

    def content(self) -> dict[str, Any]:
        first = next(iter(self._optimizer._opened_with))
        return {
            "model": type(self._model).__name__,
            "dtype": DTYPES[first.dtype],
            "placement": self._optimizer.placement,
            "params": self._params,
            "engines": [self._parts_of(opened) for opened in self._optimizer._opened],
            "values": self._value_parts,
        }

    def _steps(self) -> dict[str, int]:
        return {
            self._places.name_of(param): opened.steps_of(param)
            for param, opened in self._optimizer._opened_with.items()
        }

    def steps_done(self) -> int:
        return max(opened.engine.generation for opened in self._optimizer._opened)

    def blob(self, kept: Mapping[str, Any], random: list[Any]) -> bytes:
        """Plain data and tensors only: whoever loads it runs no code."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"names": [self._places.name_of(param) for param in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        memory = io.BytesIO(MAGIC)
        memory.seek(len(MAGIC))
        state = {
            "steps": self._steps(),
            "groups": groups,
            "others": self._others,
            "random": random,
            "kept": {name: one.state_dict() for name, one in kept.items()},
        }
        torch.save(state, memory)
        return memory.getvalue()


def _of_all_ranks(optimizer: EngineOptimizer, own: Any) -> list[Any]:
    ranks = optimizer._sharing.ranks
    if ranks is None:
        return [own]
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    return every
