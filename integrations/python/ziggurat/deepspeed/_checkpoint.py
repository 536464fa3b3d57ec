# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with DeepSpeed's calls and folders, in a format of our own.

    save_dir/latest                           the newest tag
    save_dir/TAG/mp_rank_00_model_states.pt   module, scheduler, counters, client_state, optimizer's
                                              groups, and the names of its state's files
    save_dir/TAG/ziggurat_state_...pt         the state of some parameters, as torch.optim has it

Ranks divide the state's files among them; no file belongs to a rank. That of the module is written
when all others are there, so it is what makes a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ziggurat._native import InvalidArgument
from ziggurat._state import Groups
from ziggurat.deepspeed import _files, _optimizers
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._meeting import Meeting

_MODULE = "mp_rank_00_model_states.pt"
_STATE = "ziggurat_state"
_FORMAT = 1
_FOREIGN = (
    "for a run that DeepSpeed began, call ziggurat.torch.load_foreign_checkpoint(engine.optimizer, "
    "engine.module, path) in place of it"
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
    folder = Path(save_dir) / tag
    step = engine.global_steps
    engine.saves[step] += 1
    with Meeting(f"save {engine.saves[step]} at step {step}", "save_checkpoint()", tag) as meeting:
        folder.mkdir(parents=True, exist_ok=True)
        # With storage of its own, the first rank of every host has all.
        if engine._config.use_node_local_storage:
            is_writer = engine.local_rank == 0
            files = _write_share(engine, folder, 0, 1) if is_writer else []
        else:
            is_writer = engine.global_rank == 0
            files = _write_shares(engine, folder, tag, meeting)
        if is_writer:
            state = _module_state(engine, client_state, exclude_frozen_parameters)
            state["ziggurat"]["files"] = files
            _files.write(folder / _MODULE, state)
            for file in folder.glob(f"{_STATE}_*.pt"):  # of what had this tag before
                if file.name not in files:
                    file.unlink()
            if save_latest:
                _files.write(Path(save_dir) / "latest", tag)
        if engine.global_rank == 0:
            meeting.end("")
        else:
            meeting.result_of(0)
    say(f"saved {folder}")


def _write_shares(engine: Any, folder: Path, tag: str, meeting: Meeting) -> list[str]:
    """Every rank its own; on rank 0 the files of all, and those of a rank that does not come."""
    ranks, own = engine.world_size, engine.global_rank
    files = _write_share(engine, folder, own, ranks) if meeting.claim(own) else []
    if own != 0:
        meeting.end(json.dumps(files))
        return []
    tags: dict[int, str] = {}
    for rank in meeting.others:
        word = meeting.word_of(rank)
        if word is not None or not meeting.claim(rank):
            tags[rank] = tag if word is None else word
            files += json.loads(meeting.result_of(rank))
        else:
            files += _write_share(engine, folder, rank, ranks)
    _look_at_tags(engine._config.tag_validation, tag, tags)
    return files


def _write_share(engine: Any, folder: Path, share: int, shares: int) -> list[str]:
    if engine.optimizer is None:
        return []
    stem = f"{_STATE}_{engine.global_steps}"
    return _files.write_share(folder, stem, engine.optimizer, share, shares)


def _tag(save_dir: str | Path, tag: str) -> str:
    if not str(save_dir) or not tag:
        raise InvalidArgument(f'save_checkpoint(): save_dir="{save_dir}", tag="{tag}": name both')
    return tag


def _look_at_tags(validation: str, tag: str, words: dict[int, str]) -> None:
    """As ``checkpoint.tag_validation`` says: "WARN", "FAIL" or "IGNORE"."""
    others = [f'"{word}" on rank {rank}' for rank, word in sorted(words.items()) if word != tag]
    if not others or validation == "IGNORE":
        return
    message = (
        f'save_checkpoint(): tag="{tag}" on rank 0, {", ".join(others)}: the parts lie in several '
        "folders, and none can be loaded: give the same tag on all ranks"
    )
    if validation == "FAIL":
        raise InvalidArgument(message)
    say(message)


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
    return {**client_state, **own}  # where scripts that open the file themselves look


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
            say(f"load_checkpoint(): {latest} is not there: nothing is loaded; a tag names one")
            return None, None
        tag = latest.read_text().strip()
    folder = Path(load_dir) / str(tag)
    path = folder / _MODULE
    if not path.is_file():
        if any(folder.glob(f"zero_pp_rank_*_{_MODULE}")):
            raise InvalidArgument(
                f"load_checkpoint(): {folder} is of DeepSpeed's stage 3: {_FOREIGN}"
            )
        raise InvalidArgument(
            f"load_checkpoint(): {path} is not there: give the tag of one that is"
        )
    # A client_state may hold any object: load only checkpoints that you trust.
    state = torch.load(path, map_location="cpu", weights_only=False)
    if custom_load_fn is None:
        engine.module.load_state_dict(state["module"], strict=load_module_strict)
    else:
        custom_load_fn(src=state["module"], dst=engine.module)
    if "ziggurat" not in state:
        if not load_module_only:
            raise InvalidArgument(
                f"load_checkpoint(): {path} is not one of ours: for its module alone give "
                f"load_module_only=True; {_FOREIGN}"
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
        state_of = _files.read_state(folder, own["files"])
        engine.optimizer.load_state_dict({"state": state_of, "param_groups": own["param_groups"]})
        if engine.client_optimizer is not None and engine.client_optimizer is not engine.optimizer:
            _optimizers.share_groups(engine.optimizer, engine.client_optimizer)
        engine._scale.load_state_dict(state["loss_scale"])
    if scheduler_states and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    engine.global_steps = own["global_steps"]
    engine.global_samples = own["global_samples"]
    engine.skipped_steps = own["skipped_steps"]


def save_16bit(engine: Any, path: Path, exclude_frozen_parameters: bool) -> None:
    """Rank 0's: every rank has whole parameters."""
    if engine.global_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        _files.write(path, state)
        say(f"saved {path}")
