# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with DeepSpeed's calls and folders, in a format of our own.

    save_dir/latest                               the newest tag
    save_dir/TAG/mp_rank_00_model_states.pt       module, scheduler, counters, client_state (rank 0)
    save_dir/TAG/ziggurat_rank_0_of_1_optimizer/  the state that a rank has: every rank its own

``latest`` names a checkpoint once every rank has written its part.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed import _files, _optimizers
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._meeting import Meeting

_MODULE = "mp_rank_00_model_states.pt"
_OWN = ("module", "lr_scheduler", "loss_scale", "ziggurat")


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
    engine.saves += 1
    # With storage of its own, every host has a module.
    local = engine._config.use_node_local_storage
    is_writer = (engine.local_rank if local else engine.global_rank) == 0
    with Meeting(f"save {engine.saves}", "save_checkpoint()", word=tag) as meeting:
        folder.mkdir(parents=True, exist_ok=True)
        if engine.optimizer is not None:
            names = {param: name for name, param in engine.module.named_parameters()}
            _files.write_state(_part(engine, folder), engine.optimizer, names)
        if is_writer:
            state = _module_state(engine, client_state, exclude_frozen_parameters)
            _files.write(folder / _MODULE, state)
        if engine.global_rank == 0:
            meeting.wait_for_others()
            _look_at_tags(engine._config.tag_validation, tag, meeting.words())
        if is_writer and save_latest:
            _files.write(Path(save_dir) / "latest", tag)
    say(f"saved {folder}")


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


def _part(engine: Any, folder: Path) -> Path:
    return folder / f"ziggurat_rank_{engine.global_rank}_of_{engine.world_size}_optimizer"


def _module_state(
    engine: Any, client_state: dict[str, Any], exclude_frozen_parameters: bool
) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    own = {
        "module": engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scale": engine._scale.state_dict(),
        "ziggurat": {
            "format": 1,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "world_size": engine.world_size,
            "frozen": [n for n, p in engine.module.named_parameters() if not p.requires_grad],
            "client_state": client_state,
        },
    }
    return {**client_state, **own}  # where scripts that open the file themselves look


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
                f"load_checkpoint(): {path} is not one of ours, and has a module alone: give "
                "load_module_only=True"
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
        part = _part(engine, folder)
        if not part.is_dir():
            raise InvalidArgument(
                f"load_checkpoint(): {part} is not there: {own['world_size']} ranks have saved "
                f"this checkpoint, and there are {engine.world_size}: start as many, or give "
                "load_optimizer_states=False"
            )
        read = _files.read_state(part)
        del read["names"]
        engine.optimizer.load_state_dict(read)
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
