# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints in the engine's own format, which `ziggurat ckpt` and other tools read. Any
number of ranks can save one, and any number can load it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from ziggurat._checkpoint.background_save import BackgroundSave, check_copied, limits, refuse_limits
from ziggurat._checkpoint.left_out import LeftOut
from ziggurat._checkpoint.resume import random_states
from ziggurat._exchange.parts import Part
from ziggurat._foreign.plan import Places
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import InvalidArgument
from ziggurat._library.native_checkpoint import Save, Values, save_checkpoint as save_natively
from ziggurat._memory.memory import free_bytes
from ziggurat._memory.placement import fits_half
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._streaming.streaming import is_away, values_of

MAGIC = b"ziggurat.torch 1\n"  # marks this package's part of a checkpoint's blob


def require_optimizer(call: str, optimizer: Any) -> None:
    """Errors: InvalidArgument if it is none of ours, as where the model is given first."""
    if not isinstance(optimizer, EngineOptimizer):
        raise InvalidArgument(
            f"{call}: a {type(optimizer).__name__} was given as the optimizer: give the folder, an optimizer of "
            "ziggurat.torch itself and the model, in this order"
        )


@overload
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
    background: Literal[False] = False,
    **kept: Any,
) -> str: ...


@overload
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
    background: Literal[True],
    bandwidth: float | None = None,
    stall_max: float | None = None,
    **kept: Any,
) -> BackgroundSave: ...


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
    background: bool = False,
    bandwidth: float | None = None,
    stall_max: float | None = None,
    **kept: Any,
) -> str | BackgroundSave:
    """Saves `model` and the state of `optimizer` in ``FOLDER/step-NNNNNNNNN``, and returns that
    path. The name may be taken already: by another run, or by steps that this run left when it
    loaded an older checkpoint. The new name then ends with some digits of this run's line of
    history.

    A checkpoint has the parameters' masters, moments and steps, the buffers, the groups' settings
    and the random states. It also has each object with ``state_dict()`` that is given by name, as
    in ``scheduler=scheduler, scaler=scaler``. `resume` adds plain facts about the run for tools
    and people, under the names that ``ziggurat ckpt verify`` asks for: ``{"consumed_samples":
    51200, "tokenizer": "gpt2"}``. `step` defaults to the optimizer's number of steps.

    Of an offloaded model, frozen parameters that stay in their own files are left out unless
    something has written them. Each run builds them from these files, and
    :func:`load_checkpoint` compares them with what it is told of them.

    Of this run's checkpoints in the folder the newest `keep_last` stay, and those of every
    `keep_every` steps; 0 keeps all. Checkpoints of other runs always stay. With `keep_best` the
    checkpoint of the best step stays too, which `resume` names: ``{"best_metric": {"name": "loss",
    "step": 300, "value": 2.1}}``.

    All ranks call this between two steps. Each rank writes its part, a chunk at a time, and
    training goes on when the whole checkpoint is durable. Errors: InvalidArgument if the folder
    already has this step, or the model is given as the optimizer; ResourceExhausted if the disk is
    full. A save that fails leaves nothing of the checkpoint.

    With `background` this returns a :class:`BackgroundSave` at once, and the checkpoint, which is
    of this step, is written while the next steps are made. What is in memory is copied only when a
    step would change it before it is saved, and takes at most half of the free memory. Beyond
    that, and for state on a drive of which the second step would overwrite what is not saved yet,
    steps wait; when they have waited `stall_max` seconds in all (60 by default), the save is given
    up and training goes on. `bandwidth` limits the bytes that each rank writes in a second, on
    average: a save that fell behind may catch up for a quarter of a second. A process that is
    killed leaves a whole checkpoint or none.
    """
    require_optimizer("save_checkpoint()", optimizer)
    sharing, folder = optimizer._sharing, os.path.abspath(folder)
    optimizer.finish_save()
    optimizer.synchronize()
    optimizer.open()
    random = _of_all_ranks(optimizer, random_states())

    def prepared() -> tuple[_Saving, bytes, int, str]:
        saving = _Saving(optimizer, model, None if background else folder)
        memory = saving.check_copied() if background else 0
        saving.take_values()
        number = saving.steps_done() if step is None else int(step)
        content = saving.content() | {
            "folder": folder,
            "step": number,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_best": keep_best,
            "resume": saving.left_out.facts() | _resume_facts(optimizer, resume, kept),
        }
        if background:
            content |= limits(bandwidth, stall_max, memory)
        else:
            refuse_limits(bandwidth, stall_max)
        return saving, saving.blob(kept, random), number, json.dumps(content)

    saving, blob, number, content = sharing.together("save_checkpoint()", prepared)
    engines = [opened.engine for opened in optimizer._opened]
    if background:
        native = Save(saving.runtime, engines, saving.values, blob, content, number)
        optimizer._save = BackgroundSave(native)
        return optimizer._save
    save_natively(saving.runtime, engines, saving.values, blob, content)
    saved: str = sharing.decided(lambda: _saved_as(folder, f"step-{number:09}"))
    return saved


def _saved_as(folder: str, name: str) -> str:
    """Returns the path of the checkpoint that was just made, which ``latest`` names."""
    with open(f"{folder}/latest", encoding="utf-8") as latest:
        saved = latest.read().strip()
    return f"{folder}/{saved if saved.startswith(name) else name}"


def _resume_facts(
    optimizer: EngineOptimizer, given: Mapping[str, Any] | None, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Says, under a manifest's names, where the checkpoint holds what a run needs to go on."""
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
    """Decides which part of a model and its optimizer is stored where in a checkpoint. Copies of what is
    away and not trained are files in `folder`, if there is one and memory has little room for them."""

    def __init__(self, optimizer: EngineOptimizer, model: torch.nn.Module, folder: str | None) -> None:
        if not optimizer._opened:
            raise InvalidArgument(
                "save_checkpoint(): the optimizer trains no parameter, so there is no state to save"
            )
        for opened in optimizer._opened:
            opened.settle()
        self._optimizer, self._model = optimizer, model
        sharing = optimizer._sharing
        self.runtime = sharing.runtime(optimizer._workers(optimizer._order))
        self._places = Places(optimizer, model)
        self._params: list[dict[str, Any]] = []
        self._indices: dict[torch.Tensor, int] = {}
        self._untrained: list[Part] = []
        self._value_parts: list[dict[str, Any]] = []
        self._held: list[torch.Tensor] = []  # keeps alive the host memory that `values` points to
        self.values: list[Values] = []
        self._others: dict[str, torch.Tensor] = {}  # tensors that the engine's format cannot hold
        self.left_out = LeftOut()
        self._folder = folder
        for name, target in self._places.targets.items():
            if self._places.name_of(target) == name:
                self._add(name, target)

    def check_copied(self) -> int:
        """Returns the memory that is left for the state when values that nobody trains are copied. Errors:
        InvalidArgument if they take more than a save may."""
        copied_bytes = sum(part.memory().nbytes for part in self._untrained)
        return check_copied(copied_bytes, self._away_bytes())

    def _away_bytes(self) -> int:
        return sum(part.memory().nbytes for part in self._untrained if is_away(part.memory()))

    def take_values(self) -> None:
        """Finds the values of what nobody trains, and copies what of it is away."""
        folder = self._folder
        if folder is None or fits_half(self._away_bytes(), free_bytes()):
            folder = None
        else:
            os.makedirs(folder, exist_ok=True)
        for part in self._untrained:
            held = values_of(part.memory(), folder).to("cpu").contiguous()
            if held.numel() == 0:
                continue
            self._held.append(held)
            self.values.append(Values(DTYPES[held.dtype], held.data_ptr(), held.numel()))
            self._value_parts.append({"param": self._indices[part.param]} | part.place())

    def _add(self, name: str, target: torch.Tensor) -> None:
        trained = target in self._optimizer._opened_with
        if target.numel() == 0:  # a DTensor becomes a plain tensor too
            self._others[name] = torch.empty(target.shape, dtype=target.dtype)
            return
        if not trained and target.dtype not in DTYPES:
            self._others[name] = target.detach().cpu()
            return
        if not trained and self.left_out.add(name, target):
            return
        self._indices[target] = len(self._params)
        param = {"name": name, "shape": list(target.shape), "trained": trained}
        self._params.append(param if trained else param | {"dtype": DTYPES[target.dtype]})
        sharing = self._optimizer._sharing
        if not trained and sharing.saves(target, trained=False):
            self._untrained.append(sharing.whole_or_shard(target))

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
        """Holds only plain data and tensors, so that loading it runs no code."""
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
            "left_out": self.left_out.params(),
            "random": random,
            "kept": {name: one.state_dict() for name, one in kept.items()},
        }
        torch.save(state, memory)
        return memory.getvalue()


def _of_all_ranks(optimizer: EngineOptimizer, own: Any) -> list[Any]:
    ranks = optimizer._sharing.ranks
    if ranks is None:
        return [own]
    return ranks.told(own, "save_checkpoint()")
