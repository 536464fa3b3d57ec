# SPDX-License-Identifier: Apache-2.0
"""Takes over training that another trainer began: its checkpoint becomes an engine's state.

No code in a checkpoint is run. Every name and shape is compared before anything is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ziggurat._foreign import dcp, state_dicts, universal, zero
from ziggurat._foreign.content import Content
from ziggurat._foreign.plan import Places, Plan
from ziggurat._library.native import DataLoss, InvalidArgument
from ziggurat._library.state_kinds import moments_of
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.rounding import rounded
from ziggurat._pytorch.dtensor import is_dtensor, local_of, local_part
from ziggurat._pytorch.names import listed, names_alone

Rename = Callable[[str], "str | None"]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """What a load found in the checkpoint, and what it did not find."""

    layout: str  #: describes the kind of checkpoint and its path
    #: values and state that the checkpoint lacks; such state starts from the beginning
    missing: list[str]
    #: names in the checkpoint for which the model or the optimizer has no place
    unexpected: list[str]
    #: settings of the checkpoint's groups (lr, betas, ...), which are not taken over
    param_groups: list[dict[str, Any]]


def load_foreign_checkpoint(
    optimizer: EngineOptimizer,
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
) -> ForeignCheckpoint:
    """Takes over the weights of `model`, and the masters, moments and steps of `optimizer`.

    ``path`` is what another trainer saved: a file of ``torch.save`` with the state dicts of model
    and optimizer; a folder of ``torch.distributed.checkpoint``; or a folder of DeepSpeed's, saved
    by any number of ranks with ZeRO stage 1, 2 or 3, or converted to a universal checkpoint.
    ``rename`` returns our name for each name in the checkpoint, or None for what is to be left
    out. The groups' settings stay as they are.

    All ranks call this; each reads `path` and keeps its part. State on NVMe becomes durable with
    the next step. Until that step the state is in memory, with 4 bytes per value.

    Errors: InvalidArgument if something is missing or unexpected, unless ``strict=False``, if a
    shape differs, and if a file has more than tensors and plain data. DataLoss if a file is
    damaged and, unless ``strict=False``, if a master does not round to the weight beside it. An
    error leaves everything unchanged, except that ``.distcp`` files are read last, when some state
    may have been written.
    """
    optimizer.share_offloaded()
    plan, content = optimizer._sharing.together(
        "load_foreign_checkpoint()", lambda: _planned(optimizer, model, Path(path), rename, strict)
    )
    _write(optimizer, plan)
    return ForeignCheckpoint(content.layout, plan.missing, plan.unexpected, content.groups)


def _planned(
    optimizer: EngineOptimizer,
    model: torch.nn.Module,
    path: Path,
    rename: Rename | None,
    strict: bool,
) -> tuple[Plan, Content]:
    """Decides what goes where. Errors: what does not fit."""
    try:
        content = _content_of(path)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise DataLoss(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}): it is "
            "damaged, or a version that is not supported wrote it. Copy it or save it again"
        ) from error
    places = Places(optimizer, model)
    if rename is not None:
        rename_content(content, rename)
    without_wrappers(content, places)
    plan = Plan(content, places)
    if plan.wrong_shapes:
        raise InvalidArgument(f"{content.layout}: {listed('other shapes', plan.wrong_shapes)}")
    if strict and (plan.missing or plan.unexpected):
        found = {"missing": plan.missing, "unexpected": plan.unexpected}
        words = "; ".join(listed(what, names) for what, names in found.items() if names)
        raise InvalidArgument(
            f"{content.layout}: {words}; give rename= if the names differ, or strict=False to load "
            "the rest"
        )
    if strict:
        _look_at_masters(plan)
    return plan, content


def _content_of(path: Path) -> Content:
    if path.is_file():
        return state_dicts.content_of(path)
    if not path.is_dir():
        raise InvalidArgument(f"{path} does not exist: give the file or folder of a checkpoint")
    if dcp.is_one(path):
        return dcp.content_of(path)
    if universal.is_one(path):
        return universal.content_of(path)
    if zero.is_one(path):
        return zero.content_of(path)
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            tag = (path / pointer).read_text().strip()
            if not tag or Path(tag).name != tag or not (path / tag).is_dir():
                raise InvalidArgument(
                    f"{path / pointer} names '{tag}', but {path} has no folder of that name"
                )
            return _content_of(path / tag)
    if (path / "manifest.json").is_file() or any(path.glob("step-*/manifest.json")):
        raise InvalidArgument(
            f"{path} is a checkpoint of the engine's own format: use load_checkpoint()"
        )
    raise InvalidArgument(
        f"{path} is no checkpoint that load_foreign_checkpoint() can read: give a file of "
        "torch.save, a folder "
        "with .metadata (torch.distributed.checkpoint), or a folder of DeepSpeed's with `latest` "
        "or with *_model_states.pt"
    )


def rename_content(content: Content, rename: Rename) -> None:
    def renamed(names: Iterable[Any]) -> dict[Any, Any]:
        new = {name: rename(name) if isinstance(name, str) else name for name in names}
        kept = Counter(name for name in new.values() if name is not None)
        if twice := [name for name, count in kept.items() if count > 1]:
            raise InvalidArgument(
                f"rename returns '{twice[0]}' for several names of the checkpoint: return a "
                "different name for each"
            )
        return {old: name for old, name in new.items() if name is not None}

    values, states = renamed(content.values), renamed(content.states)
    content.values = {values[old]: saved for old, saved in content.values.items() if old in values}
    content.states = {states[old]: state for old, state in content.states.items() if old in states}
    content.aliases = {name for name in map(rename, content.aliases) if name is not None}
    content.untrained = {name for name in map(rename, content.untrained) if name is not None}


def without_wrappers(content: Content, places: Places, *, wrapper: bool = True) -> None:
    """Removes from the names what torch.compile added, and a wrapper around the whole model
    (`wrapper`). Names that the model has as they are stay."""
    names = {name for name in (*content.values, *content.states) if isinstance(name, str)}
    if names <= places.targets.keys():
        return
    short = names_alone(sorted(names | content.aliases), wrapper=wrapper)
    rename_content(content, lambda name: places.name_here(name, short[name]))


def _look_at_masters(plan: Plan) -> None:
    """Compares masters with weights. Errors: DataLoss if a master does not round to the weight
    beside it, because it is then another parameter's, or of another step."""
    for saved in plan.values.values():
        if saved.weight is None:
            continue
        weight = saved.weight.read()
        made = saved.read().to(weight.dtype)
        if not ((made == weight) | (made.isnan() & weight.isnan())).all():
            raise DataLoss(
                f"the master in {saved.file} does not round to the weight in {saved.weight.file}: "
                "the files are not of one step, or this is a universal checkpoint of a run with "
                "round_robin_gradients, in which DeepSpeed's converter mixes parameters up. Give "
                "the original checkpoint, or strict=False to load the master all the same"
            )


@torch.no_grad()
def _write(optimizer: EngineOptimizer, plan: Plan) -> None:
    what, sharing = "load_foreign_checkpoint()", optimizer._sharing

    def fill() -> None:
        for target, saved in plan.values.items():
            _copy(saved.read(), target)

    def write_states() -> None:
        for opened in optimizer._opened:
            opened.params_written()
            for param in opened.members:
                optimizer._to_load.pop(param, None)
                opened.masters.pop(param, None)
                _write_state(optimizer, opened, param, plan)

    optimizer.synchronize()
    sharing.together(what, fill)
    optimizer.open()
    # A rank reads the other ranks' part of a parameter's state directly, so together() makes it
    # wait here until all of them have loaded it.
    sharing.together(what, write_states)


def _copy(values: torch.Tensor, target: torch.Tensor) -> None:
    if values.is_floating_point():
        values = rounded(values.to(torch.float32), target.dtype)
    if is_dtensor(target):
        local_of(target).copy_(local_part(values, target))
    else:
        target.copy_(values)


def _write_state(
    optimizer: EngineOptimizer, opened: Opened, param: torch.Tensor, plan: Plan
) -> None:
    """Writes a parameter's state, one array in memory at a time."""
    moments, state = moments_of(optimizer._kind), plan.states.get(param)
    if state is not None:
        for kind in moments:
            opened.write_state(param, kind, state[kind].read())
        opened.set_steps(param, int(state["step"].read().item()) if "step" in state else 1)
        opened.loaded = True
    elif opened.loaded or opened.steps_of(param) > 0:
        first = optimizer._first_entry(param)
        for kind in moments:
            opened.write_state(param, kind, first[kind])
        opened.set_steps(param, 0)
        opened.loaded = True
    # Writes the fp32 values that a 16-bit parameter was just rounded from; params_written() took
    # the rounded ones as the master.
    if param.dtype != torch.float32 and param in plan.values:
        values = plan.values[param].read()
        if values.dtype != param.dtype:
            opened.write_state(param, "master", values)
            opened.loaded = True
