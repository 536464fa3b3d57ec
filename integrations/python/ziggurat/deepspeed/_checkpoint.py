# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints with DeepSpeed's calls and folders; the optimizer's state is in the engine's
format.

    save_dir/latest                           the newest tag
    save_dir/TAG/mp_rank_00_model_states.pt   module, scheduler, counters, client_state, optimizer's
                                              groups, and the name of its state's folder
    save_dir/TAG/ziggurat_state_3_1a2b3c4d/   that folder (_state_folder.py); none before a step

The module's file makes a checkpoint valid. It gets its name when all that it refers to is durable;
then the tag's old checkpoint is removed. A save that is cut off leaves files that nothing refers
to, which the next save of that tag removes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ziggurat._native import InvalidArgument
from ziggurat._state import Groups
from ziggurat.deepspeed import _files, _optimizers, _state_folder
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._meeting import Meeting
from ziggurat.deepspeed._state_folder import Kept

_MODULE = "mp_rank_00_model_states.pt"
_STATE = "ziggurat_state"
_FORMAT = 2
_FOREIGN = (
    "for a run that DeepSpeed began, call ziggurat.torch.load_foreign_checkpoint(engine.optimizer, "
    "engine.module, path) instead"
)


def save(
    engine: Any,
    save_dir: str | Path,
    tag: str | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    tag = _tag(save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag))
    step = engine.global_steps
    engine.saves[step] += 1
    name = f"engine {engine.number}: save {engine.saves[step]} at step {step}"
    with Meeting(name, "save_checkpoint()", tag) as meeting:
        # If each host has storage of its own, the first rank of every host writes everything.
        of_hosts = engine._config.use_node_local_storage
        is_writer = (engine.local_rank if of_hosts else engine.global_rank) == 0
        chosen = {"tag": tag, "state": _new_name(step), "together": False}
        if not of_hosts:
            chosen = _chosen(engine, Path(save_dir), chosen, meeting)
        elif is_writer:
            _files.make_folder(Path(save_dir) / tag)
        folder = Path(save_dir) / chosen["tag"]
        kept = None
        if is_writer or chosen["together"]:
            kept = _write_state(engine, folder / chosen["state"], alone=not chosen["together"])
        if is_writer:
            state = _module_state(engine, client_state, exclude_frozen_parameters)
            state["ziggurat"] |= _as_saved(kept, chosen["state"])
            _files.write(folder / _MODULE, state)
            if save_latest:
                _files.write(Path(save_dir) / "latest", tag)
            _remove_what_was(folder, chosen["state"])
        if engine.global_rank == 0:
            meeting.end("")
        else:
            meeting.result_of(0)
    say(f"saved {folder}")


def _new_name(step: int) -> str:
    return f"{_STATE}_{step}_{secrets.token_hex(4)}"


def _chosen(
    engine: Any, save_dir: Path, own: dict[str, Any], meeting: Meeting
) -> dict[str, Any]:
    """Returns rank 0's tag, the name of the state's folder, and whether all ranks write the state
    together."""
    if engine.global_rank != 0:
        its: dict[str, Any] = json.loads(meeting.decision())
        return its
    if meeting.others:
        words = meeting.words()
        _look_at_tags(engine._config.tag_validation, own["tag"], words)
        divided = engine.optimizer is not None and engine.optimizer._sharing.ranks is not None
        everyone = divided and engine.optimizer._sharing.ranks.size == engine.world_size
        own = own | {"together": everyone and len(words) == len(meeting.others)}
    _files.make_folder(save_dir / own["tag"])  # makes the folder before other ranks rely on it
    meeting.decide(json.dumps(own))
    return own


def _write_state(engine: Any, folder: Path, alone: bool) -> Kept | None:
    if engine.optimizer is None:
        return None
    resume = {"consumed_samples": engine.global_samples}
    return _state_folder.write(engine.optimizer, folder, resume, alone)


def _as_saved(kept: Kept | None, folder: str) -> dict[str, Any]:
    if kept is None:
        return {"state": None}
    return {"state": {"folder": folder, "names": kept.names, "steps": kept.steps}}


def _remove_what_was(folder: Path, state: str) -> None:
    """Removes the tag's old checkpoint, and what saves that were cut off have left."""
    for there in (*folder.glob(f"{_STATE}_*"), *folder.glob(f".{_MODULE}.*.new")):
        if there.name == state:
            continue
        try:
            _files.remove(there)
        except OSError as error:  # goes on, because the new checkpoint is whole
            say(f"{there} could not be removed: {error}. The next save with this tag tries again")


def _tag(save_dir: str | Path, tag: str) -> str:
    if not str(save_dir) or not tag:
        raise InvalidArgument(f'save_checkpoint(): save_dir="{save_dir}", tag="{tag}": give both')
    return tag


def _look_at_tags(validation: str, tag: str, words: dict[int, str]) -> None:
    """Compares the ranks' tags as ``checkpoint.tag_validation`` asks: "WARN", "FAIL" or
    "IGNORE"."""
    others = [f'"{word}" on rank {rank}' for rank, word in sorted(words.items()) if word != tag]
    if not others or validation == "IGNORE":
        return
    message = f'save_checkpoint(): the tags differ: "{tag}" on rank 0, {", ".join(others)}'
    if validation == "FAIL":
        raise InvalidArgument(f"{message}. Give the same tag on all ranks")
    say(f"{message}. Everything is saved under the tag of rank 0")


def _module_state(
    engine: Any, client_state: dict[str, Any], exclude_frozen_parameters: bool
) -> dict[str, Any]:
    scheduler, optimizer = engine.lr_scheduler, engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    trained = [] if optimizer is None else [param for _, param, _ in optimizer._named()]
    own = {
        "module": engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scale": engine._scale.state_dict(),
        "ziggurat": {
            "format": _FORMAT,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "world_size": engine.world_size,
            "frozen": [n for n, p in engine.module.named_parameters() if not p.requires_grad],
            "client_state": client_state,
            "param_groups": [] if optimizer is None else _groups_of(optimizer),
            "names": [names.get(param, "") for param in trained],
        },
    }
    return {**client_state, **own}  # scripts that open the file themselves look here


def _groups_of(optimizer: Any) -> Any:
    return Groups(optimizer).state_dict()["param_groups"]


def load(
    engine: Any,
    load_dir: str | Path,
    tag: str | None,
    *,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
    custom_load_fn: Callable[..., Any] | None,
) -> tuple[str | None, dict[str, Any] | None]:
    if tag is None:
        latest = Path(load_dir) / "latest"
        if not latest.is_file():
            say(
                f"load_checkpoint(): {latest} does not exist, so nothing is loaded; give the tag "
                "of a checkpoint"
            )
            return None, None
        tag = latest.read_text().strip()
    folder = Path(load_dir) / str(tag)
    path = folder / _MODULE
    if not path.is_file():
        if any(folder.glob(f"zero_pp_rank_*_{_MODULE}")):
            raise InvalidArgument(
                f"load_checkpoint(): {folder} is a checkpoint of DeepSpeed's stage 3: {_FOREIGN}"
            )
        raise InvalidArgument(
            f"load_checkpoint(): {path} does not exist: give the tag of a checkpoint that does"
        )
    state = _files.read(path)
    if custom_load_fn is None:
        engine.module.load_state_dict(state["module"], strict=load_module_strict)
    else:
        custom_load_fn(src=state["module"], dst=engine.module)
    if "ziggurat" not in state:
        if not load_module_only:
            raise InvalidArgument(
                f"load_checkpoint(): {path} was not saved by ziggurat.deepspeed: give "
                f"load_module_only=True to load its module alone; {_FOREIGN}"
            )
        return str(path), {}
    if not load_module_only:
        _load_the_rest(engine, folder, state, load_optimizer_states, load_lr_scheduler_states)
    return str(path), state["ziggurat"]["client_state"]


def _load_the_rest(
    engine: Any, folder: Path, state: dict[str, Any], optimizer_states: bool, scheduler_states: bool
) -> None:
    own = state["ziggurat"]
    if optimizer_states and engine.optimizer is not None:
        _load_state(engine.optimizer, folder, own)
        if engine.client_optimizer is not None and engine.client_optimizer is not engine.optimizer:
            _optimizers.share_groups(engine.optimizer, engine.client_optimizer)
        engine._scale.load_state_dict(state["loss_scale"])
    if scheduler_states and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    engine.global_steps = own["global_steps"]
    engine.global_samples = own["global_samples"]
    engine.skipped_steps = own["skipped_steps"]


def _load_state(optimizer: Any, folder: Path, own: dict[str, Any]) -> None:
    if own["format"] == 1:
        state_of = _files.read_state(folder, own["files"])
        optimizer.load_state_dict({"state": state_of, "param_groups": own["param_groups"]})
        _state_folder.take_over(optimizer)
    elif own["state"] is None:
        _state_folder.let_go(optimizer)
        groups = {"state": {}, "param_groups": own["param_groups"]}
        optimizer._load_groups(optimizer.in_order(groups))
    else:
        its = own["state"]
        kept = Kept(its["names"], its["steps"])
        _state_folder.read(optimizer, folder / its["folder"], kept, own["param_groups"])


def save_16bit(engine: Any, path: Path, exclude_frozen_parameters: bool) -> None:
    """Saves the module from rank 0, because every rank has whole parameters."""
    if engine.global_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        _files.write(path, state)
        say(f"saved {path}")
