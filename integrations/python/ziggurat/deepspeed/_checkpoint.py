# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints with DeepSpeed's calls and folders; the optimizer's state is in the engine's
format.

    save_dir/latest                           the newest tag
    save_dir/TAG/mp_rank_00_model_states.pt   module, scheduler, counters, client_state, optimizer's
                                              groups, the save's name and that of its state's folder
    save_dir/TAG/ziggurat_state_3_1a2b3c4d/   that folder (_state_folder.py); none before a step

The module's file makes a checkpoint valid. It gets its name when all that it refers to is durable,
on all hosts if each has storage of its own; then the tag's old checkpoint is removed. A save that
is cut off leaves files that nothing refers to, which the next save of that tag removes.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat._library.native import InvalidArgument
from ziggurat._optimizer.state import Groups
from ziggurat.deepspeed import _files, _state_folder
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._meeting import Meeting, tell, told
from ziggurat.deepspeed._state_folder import Kept

MODULE = "mp_rank_00_model_states.pt"
_STATE = "ziggurat_state"
_FORMAT = 2


class _Chosen(NamedTuple):
    """What rank 0 decides about a save."""

    tag: str
    state: str  #: the name of the state's folder, which only this save uses
    writers: list[int]  #: the ranks that write a checkpoint, each with the whole state
    everyone: bool  #: whether all ranks take part in the save
    together: bool  #: whether each rank writes its own part of the state


def begin(engine: Any) -> None:
    """Prepares for the first save. If each host has storage of its own, the first rank of every
    host writes everything, so each rank tells its local rank."""
    if _is_of_hosts(engine):
        tell(f"engine {engine.number}: local rank", str(engine.local_rank))


def _is_of_hosts(engine: Any) -> bool:
    return engine.world_size > 1 and engine._config.use_node_local_storage


def _writers(engine: Any) -> list[int]:
    if not _is_of_hosts(engine):
        return [0]
    local = told(f"engine {engine.number}: local rank")
    return sorted({0} | {rank for rank, its in enumerate(local) if its == "0"})


def save(
    engine: Any,
    save_dir: str | Path,
    tag: str | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    step = engine.global_steps
    tag = f"global_step{step}" if tag is None else str(tag)
    if engine.global_rank != 0:
        # Before the ranks meet, because rank 0 then counts on this one in calls of all ranks.
        _look_at_names(save_dir, tag)
    engine.saves[step] += 1
    name = f"engine {engine.number}: save {engine.saves[step]} at step {step}"
    with Meeting(name, "save_checkpoint()", tag) as meeting:
        if engine.global_rank == 0:
            _look_at_names(save_dir, tag)  # the other ranks hear of an error here
            chosen = _chosen(engine, tag, meeting)
            # Makes the folder before other ranks look for it.
            writes = _claims(engine, Path(save_dir), chosen)
            meeting.decide(json.dumps(chosen))
        else:
            chosen = _Chosen(*json.loads(meeting.decision()))
        if chosen.everyone and engine.optimizer is not None:
            _state_folder.take_over(engine.optimizer, "save_checkpoint()")
        if engine.global_rank != 0:  # may fail, so not before a call of all ranks
            writes = _claims(engine, Path(save_dir), chosen)
        folder = Path(save_dir) / chosen.tag
        kept = _write_state(engine, folder / chosen.state, chosen, writes)
        if writes:
            state = _module_state(engine, client_state, exclude_frozen_parameters)
            state["ziggurat"] |= {"save": chosen.state} | _as_saved(kept, chosen.state)
            new = _files.prepare(folder / MODULE, state)
        # The old checkpoint is replaced only when the new one is durable on all hosts.
        others = [rank for rank in chosen.writers if rank != engine.global_rank]
        meeting.prepared()
        for rank in others:
            meeting.wait_prepared(rank)
        if writes:
            _files.publish(new, folder / MODULE)
            if save_latest:
                _files.write(Path(save_dir) / "latest", chosen.tag)
        meeting.end("")
        for rank in others:
            meeting.result_of(rank)
    if writes:
        _remove_what_was(folder, "" if kept is None else chosen.state)
    say(f"saved {folder}")


def _look_at_names(save_dir: str | Path, tag: str) -> None:
    if not str(save_dir) or not tag:
        raise InvalidArgument(f'save_checkpoint(): save_dir="{save_dir}", tag="{tag}": give both')


def _chosen(engine: Any, tag: str, meeting: Meeting) -> _Chosen:
    """Returns what rank 0 decides about the save."""
    writers = _writers(engine)
    words = meeting.words() if writers == [0] else meeting.words_of_all()
    _look_at_tags(engine._config.tag_validation, tag, words)
    everyone = len(words) == len(meeting.others)
    ranks = None if engine.optimizer is None else engine.optimizer._sharing.ranks
    divided = ranks is not None and ranks.size == engine.world_size
    together = everyone and divided and writers == [0]
    return _Chosen(tag, _new_name(engine.global_steps), writers, everyone, together)


def _claims(engine: Any, save_dir: Path, chosen: _Chosen) -> bool:
    """Returns whether this rank writes a checkpoint. Of the writers that see one folder, because
    hosts may share it, the first to make the state's folder in it writes."""
    if engine.global_rank not in chosen.writers:
        return False
    _files.make_folder(save_dir / chosen.tag)
    try:
        (save_dir / chosen.tag / chosen.state).mkdir()
    except FileExistsError:
        return False
    return True


def _new_name(step: int) -> str:
    return f"{_STATE}_{step}_{secrets.token_hex(4)}"


def _write_state(engine: Any, folder: Path, chosen: _Chosen, writes: bool) -> Kept | None:
    optimizer = engine.optimizer
    if optimizer is None or not (writes or chosen.together):
        return None
    resume = {"consumed_samples": engine.global_samples}
    return _state_folder.write(optimizer, folder, resume, alone=not chosen.together)


def _as_saved(kept: Kept | None, folder: str) -> dict[str, Any]:
    if kept is None:
        return {"state": None}
    return {"state": {"folder": folder, "names": kept.names, "steps": kept.steps}}


def _remove_what_was(folder: Path, state: str) -> None:
    """Removes the tag's old checkpoint, and what saves that were cut off have left: all but the
    folder `state`."""
    for there in (*folder.glob(f"{_STATE}_*"), *folder.glob(f".{MODULE}.*.new")):
        if there.name == state:
            continue
        try:
            _files.remove(there)
        except OSError as error:  # goes on, because the new checkpoint is whole
            say(f"{there} could not be removed: {error}. The next save with this tag tries again")


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


def save_16bit(engine: Any, path: Path, exclude_frozen_parameters: bool) -> None:
    """Saves the module from rank 0, which reads what other ranks have of it; they need not wait."""
    if engine.global_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        _files.write(path, state)
        say(f"saved {path}")
