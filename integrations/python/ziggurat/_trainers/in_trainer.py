# SPDX-License-Identifier: Apache-2.0
"""The optimizers of ziggurat.hf: what Trainer saves of their state, and how it loads it again.

Trainer asks for a state dict and stores it, and does not say where. A state that memory may have no
room for goes into a folder of the same checkpoint, written and read a chunk at a time, and the
state dict names that folder. So these look for Trainer's own call, which knows the checkpoint.
"""

from __future__ import annotations

import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from ziggurat._checkpoint.checkpoint import save_checkpoint
from ziggurat._checkpoint.checkpoint_load import load_checkpoint
from ziggurat._checkpoint.resume import random_states, set_random_states
from ziggurat._checkpoint.saved_states import states_in
from ziggurat._library.native import DataLoss, InvalidArgument, ResourceExhausted, Unimplemented
from ziggurat._memory.file_memory import empty_in_file, is_in_file
from ziggurat._memory.placement import has_store
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.sharing import several_ranks
from ziggurat._optimizer.state import Groups
from ziggurat._streaming.streaming import kept_by_engine, streaming_around

FOLDER = "ziggurat"  #: in a checkpoint of Trainer, and the key in optimizer.pt that names what is in it
_GROUPS = "param_groups"  #: the key of the groups in a state dict of torch.optim
_FRAMES_BETWEEN = 16  # at most, of Accelerate's, the model's and ours

_marked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose saves mark_saves() looks at


def checkpoint_of(call: Callable[..., Any], name: str) -> str | None:
    """Returns the checkpoint that Trainer's `call`, which has called this, has in its variable `name`.
    None if Trainer has not called."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_BETWEEN):
        if frame is None or frame.f_code is call.__code__:
            break
        frame = frame.f_back
    if frame is None or frame.f_code is not call.__code__:
        return None
    found = frame.f_locals.get(name)
    return None if found is None else os.fspath(found)


def mark_saves(model: torch.nn.Module) -> None:
    """Lets Trainer's saves of `model` begin by making the checkpoint of before, if they write over one, no
    checkpoint: Trainer refuses one without the file that it writes last, and a save that is killed would
    leave new weights beside an old state, or some shards of each."""
    if model not in _marked:
        _marked.add(model)
        model.register_state_dict_pre_hook(_begin_save)


def _begin_save(*_: Any) -> None:
    """Called before the model's values are read."""
    checkpoint = checkpoint_of(Trainer._save_checkpoint, "output_dir")
    if checkpoint is not None:
        Path(checkpoint, TRAINER_STATE_NAME).unlink(missing_ok=True)


class _Trained(torch.nn.Module):
    """Stands in a checkpoint for the model: has what its optimizer was given and no more. All else is among
    the weights, which Trainer saves itself."""

    #: A callback may freeze it again, as it did in the run that saved, and has not done so yet.
    untrained_has_no_state = True

    def __init__(self, optimizer: EngineOptimizer) -> None:
        super().__init__()
        # Also what was frozen since: it has a state, and training may go on with it.
        self.__dict__["_trained"] = [(name, param) for name, param, _ in optimizer._named()]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self._trained)


def _folder_of(checkpoint: str | None, name: str) -> Path:
    """Returns the folder `name` of a checkpoint. Errors: if it cannot be loaded from there."""
    if checkpoint is None:
        raise InvalidArgument(
            f"load_state_dict(): the state is not in optimizer.pt but in {name} beside it: give "
            "trainer.train() resume_from_checkpoint= that checkpoint of Trainer"
        )
    folder = Path(checkpoint) / name
    if not folder.is_dir():
        raise DataLoss(
            f"{checkpoint} is not whole: the optimizer's state was saved in {folder}, which is not "
            "there: resume from another checkpoint"
        )
    if several_ranks():
        raise Unimplemented(
            f"{checkpoint} has the optimizer's state in {folder}, which Trainer does not load on "
            "several ranks: go on with one, or load it with ziggurat.torch.load_checkpoint()"
        )
    return folder


class InTrainer(EngineOptimizer):
    """An optimizer whose state is loaded after the weights. Trainer loads a checkpoint's weights,
    makes the optimizer, and then loads the optimizer's state."""

    _other_store = (
        "resume from ziggurat.hf.newest_step(trainer), from a checkpoint that has the whole state "
        '(state="full"), or train without resume_from_checkpoint into a new directory'
    )

    _goes_back = False  # whether to go back to the checkpoint once DDP is found
    #: what newest_step() has named, until Trainer goes on from it
    newest: Mapping[str, Any] | None = None

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Returns what Trainer stores as optimizer.pt."""
        checkpoint = checkpoint_of(Trainer._save_optimizer_and_scheduler, "output_dir")
        if checkpoint is None or self._by_reference or not self._opened or not self._takes_folder():
            return super().state_dict()
        folder = Path(checkpoint) / FOLDER
        Path(checkpoint, TRAINER_STATE_NAME).unlink(missing_ok=True)  # if nobody has read the weights
        if folder.exists():
            shutil.rmtree(folder)
        saved = save_checkpoint(folder, self, _Trained(self))
        state_dict = Groups(self).state_dict()
        # Elsewhere than torch.optim looks for them: it would begin without the state, and not say so.
        groups = {_GROUPS: state_dict.pop(_GROUPS)}
        return state_dict | {FOLDER: {"checkpoint": f"{FOLDER}/{Path(saved).name}"} | groups}

    def _takes_folder(self) -> bool:
        """Returns whether checkpoints have the state in a folder: that of an offloaded model, or what
        memory has no room for."""
        if several_ranks():  # of which Trainer lets one alone save
            return False
        if streaming_around(self._order) is not None:
            return True
        try:
            self.look_at_memory(param for param in self.state if param in self._opened_with)
        except ResourceExhausted:
            return True
        return False

    # Loading

    def open(self, *, resume: bool | str = False) -> None:
        if self.newest is not None and not resume:
            raise InvalidArgument(
                f"the optimizer has the newest step of the store {self._path}, but Trainer has begun "
                "another run: give trainer.train() resume_from_checkpoint= what newest_step() has "
                "returned, or call ziggurat.hf.train(trainer)"
            )
        # The older store stands until the checkpoint's state is durable.
        replaces = self._load is not None and self._path is not None and has_store(self._path)
        super().open(resume="never" if replaces and not resume else resume)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        named = state_dict.get(FOLDER, {})
        newest, self.newest = self.newest, None
        if newest is not None and newest == named:  # the engine has the state
            Groups(self).load_state_dict(state_dict)
            return
        if "checkpoint" in named:
            checkpoint = checkpoint_of(Trainer._load_optimizer_and_scheduler, "checkpoint")
            folder = _folder_of(checkpoint, named["checkpoint"])
            self._load_folder(folder, state_dict | {_GROUPS: named[_GROUPS]})
            return
        path = self._path
        if state_dict["state"] and self.engine is None and path is not None and has_store(path):
            if self._awaits_ddp():
                self._goes_back = True
            else:
                self._go_back()
        super().load_state_dict(state_dict)

    def _load_folder(self, folder: Path, groups: dict[str, Any]) -> None:
        if self._opened:
            self._give_folder(folder, groups)
            return
        Groups(self).load_state_dict(groups)
        random = random_states()  # Trainer loads its own, later
        try:
            load_checkpoint(folder, self, _Trained(self))
        finally:
            set_random_states(random)

    def _give_folder(self, folder: Path, groups: dict[str, Any]) -> None:
        """Gives the state to an optimizer that has trained, which has it in memory until the next step."""
        try:
            self.look_at_memory(self._opened_with)
        except ResourceExhausted as error:
            raise ResourceExhausted(
                f"memory has no room for the state in {folder} beside that of an optimizer that has "
                "trained already: make the model and Trainer again, and resume"
            ) from error
        with states_in(folder, self, _Trained(self)) as entries:
            # All is read twice, which is no more than what memory has room for: a script that goes on after an
            # error would train with the half that came before the damage.
            entries.verify()
            Groups(self).load_state_dict(groups)
            for opened in self._opened:
                self._give(opened, entries)

    def name_newest(self) -> dict[str, Any]:
        """Returns a state dict for a Trainer that goes on from the step that is in the open store."""
        store = {"store": os.path.abspath(str(self._path)), "ranks": 1}
        self.newest = store | {"generations": self._generations(), "checksum": None}
        return {"state": {}, FOLDER: self.newest}

    def ddp_attached(self) -> None:
        super().ddp_attached()
        if self._goes_back:
            self._goes_back = False
            self._go_back()

    def _go_back(self) -> None:
        """Goes back to the checkpoint in the store that exists: the run's next step replaces the
        store's state. Opening the store writes the parameters, so Trainer's loaded values are
        kept first; the engine takes those of an offloaded model, which may not fit twice."""
        entries, self._to_load = self._to_load, {}
        params = [param for _, param, _ in self._named() if kept_by_engine(param) is None]
        values = [(param, self._copy_of(param)) for param in params]
        self._model_has_values = True
        try:
            self.open(resume=True)
        finally:
            self._model_has_values = False
        with torch.no_grad():
            for param, value in values:
                param.copy_(value)
        if entries:
            for opened in self._opened:
                self._give(opened, entries)

    def _copy_of(self, param: torch.Tensor) -> torch.Tensor:
        """Returns a copy, of what lies in a file in another one."""
        if self._path is None or not is_in_file(param):
            return param.detach().clone()
        copy = empty_in_file(self._path, param)
        copy.copy_(param.detach())
        return copy

    def close_for_another(self) -> None:
        """Closes this, so that another optimizer goes on. The values of an offloaded model stay within
        reach, in files if memory has no room for them."""
        streaming = streaming_around(self._order)
        if streaming is None:
            self.close()
            return
        streaming.returns_to_files = True
        try:
            self.close()
        finally:
            streaming.returns_to_files = False


def in_trainer(kind: type[EngineOptimizer]) -> type[EngineOptimizer]:
    return type(kind.__name__, (InTrainer, kind), {})
