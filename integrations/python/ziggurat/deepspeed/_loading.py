# SPDX-License-Identifier: Apache-2.0
"""Loads what _checkpoint.py has saved: all ranks load the same save, or none does.

Some failures concern one rank alone, such as a folder that it does not see, or a damaged byte. Such
a failure is exchanged in the next call of all ranks, where every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ziggurat._library.native import InvalidArgument, Unavailable
from ziggurat._optimizer.sharing import Alone
from ziggurat._streaming.streaming import streaming_around
from ziggurat.deepspeed import _files, _optimizers
from ziggurat.deepspeed._checkpoint import MODULE
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._state_reading import reading_of

_CALL = "load_checkpoint()"
_FOREIGN = (
    "for a run that DeepSpeed began, call ziggurat.torch.load_foreign_checkpoint(engine.optimizer, "
    "engine.module, path) instead"
)


class _Found(NamedTuple):
    tag: str
    path: Path  #: the module's file
    state: dict[str, Any]

    @property
    def own(self) -> dict[str, Any]:
        """What ziggurat.deepspeed has written beside the module."""
        its: dict[str, Any] = self.state["ziggurat"]
        return its

    def __str__(self) -> str:
        """Describes the save; two ranks that have found the same save get the same text."""
        # Saves of earlier releases have no name.
        saved = f' ({self.own["save"]})' if "save" in self.own else ""
        return f'tag "{self.tag}" of step {self.own["global_steps"]}{saved}'


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
    # Each rank writes its part of a model that is divided.
    divided = engine.dp_world_size > 1 and streaming_around(list(engine.module.parameters())) is not None
    alone = engine.optimizer is None or (load_module_only and not divided)
    sharing = Alone() if alone else engine.optimizer._sharing
    with_scheduler = load_lr_scheduler_states and engine.lr_scheduler is not None

    def find() -> _Found | None:
        found = _found(Path(load_dir), tag, load_module_only)
        if found is not None and not load_module_only:
            _look_at_scheduler(found, with_scheduler)
        return found

    found = _agreed(sharing, find)
    if found is None:
        latest = Path(load_dir) / "latest"
        say(
            f"{_CALL}: {latest} does not exist, so nothing is loaded; give the tag of a checkpoint"
        )
        return None, None

    def load_module() -> None:
        if custom_load_fn is None:
            engine.module.load_state_dict(found.state["module"], strict=load_module_strict)
        else:
            custom_load_fn(src=found.state["module"], dst=engine.module)

    if alone or load_module_only or not load_optimizer_states:
        sharing.together(_CALL, load_module)
    else:
        _load_with_state(engine.optimizer, found, load_module)
    if load_module_only:
        return str(found.path), found.state.get("ziggurat", {}).get("client_state", {})
    _load_the_rest(engine, found, load_optimizer_states, with_scheduler)
    return str(found.path), found.own["client_state"]


def _found(load_dir: Path, tag: str | None, module_only: bool) -> _Found | None:
    """Returns the save in the folder, or None if there is no ``latest``."""
    if tag is None:
        latest = load_dir / "latest"
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    folder = load_dir / str(tag)
    path = folder / MODULE
    if not path.is_file():
        if any(folder.glob(f"zero_pp_rank_*_{MODULE}")):
            raise InvalidArgument(
                f"{_CALL}: {folder} is a checkpoint of DeepSpeed's stage 3: {_FOREIGN}"
            )
        raise InvalidArgument(
            f"{_CALL}: {path} does not exist: give the tag of a checkpoint that does"
        )
    found = _Found(str(tag), path, _files.read(path))
    if "ziggurat" not in found.state and not module_only:
        raise InvalidArgument(
            f"{_CALL}: {path} was not saved by ziggurat.deepspeed: give "
            f"load_module_only=True to load its module alone; {_FOREIGN}"
        )
    return found


def _look_at_scheduler(found: _Found, wanted: bool) -> None:
    if wanted and found.state["lr_scheduler"] is None:
        raise InvalidArgument(
            f"{_CALL}: {found.path} has no state of a scheduler, but the engine has one: give "
            "load_lr_scheduler_states=False"
        )


def _agreed(sharing: Alone, find: Callable[[], _Found | None]) -> _Found | None:
    """Returns what `find` finds on this rank, if all ranks find the same save.

    Errors: those of `find`; Unavailable with another rank's error; InvalidArgument if the ranks
    find different saves.
    """
    if sharing.ranks is None:
        return find()
    found = own = None
    try:
        found = find()
    except Exception as error:
        own = error
    said = "no `latest`" if found is None else str(found)
    every = sharing.told((said, None if own is None else f"{type(own).__name__}: {own}"))
    if own is not None:
        raise own
    for rank, (_, error) in enumerate(every):
        if error is not None:
            raise Unavailable(f"{_CALL} was given up, because rank {rank} failed: {error}")
    differing = {said: rank for rank, (said, _) in reversed(list(enumerate(every)))}
    if len(differing) > 1:
        by_rank = sorted((rank, said) for said, rank in differing.items())
        words = ", ".join(f"rank {rank} has found {said}" for rank, said in by_rank)
        raise InvalidArgument(
            f"{_CALL}: the ranks have found different saves: {words}. Give a tag= whose save all "
            "ranks have"
        )
    return found


def _load_with_state(optimizer: Any, found: _Found, load_module: Callable[[], None]) -> None:
    optimizer.synchronize()
    readings = []

    def prepare() -> None:
        optimizer.need_open()
        readings.append(reading_of(optimizer, found.path.parent, found.own))
        readings[0].prepare()

    try:
        optimizer._sharing.together(_CALL, prepare)
        optimizer._sharing.together(_CALL, load_module)
        readings[0].run()
    finally:
        for reading in readings:
            reading.close()


def _load_the_rest(
    engine: Any, found: _Found, optimizer_states: bool, scheduler_states: bool
) -> None:
    state, own = found.state, found.own
    if optimizer_states and engine.optimizer is not None:
        if engine.client_optimizer is not None and engine.client_optimizer is not engine.optimizer:
            _optimizers.share_groups(engine.optimizer, engine.client_optimizer)
        engine._scale.load_state_dict(state["loss_scale"])
    if scheduler_states:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    engine.global_steps = own["global_steps"]
    engine.global_samples = own["global_samples"]
    engine.skipped_steps = own["skipped_steps"]
