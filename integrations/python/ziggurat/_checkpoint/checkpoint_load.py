# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint of the engine's own format into a model and a new optimizer, however each of
them is divided among ranks.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ziggurat._checkpoint.checkpoint import MAGIC, require_optimizer
from ziggurat._checkpoint.left_out import Compared, place_of
from ziggurat._checkpoint.resume import set_random_states
from ziggurat._exchange.parts import Part
from ziggurat._foreign.content import Content, Saved, State, of_number
from ziggurat._foreign.load import Rename, rename_content, without_wrappers
from ziggurat._foreign.plan import Places, Plan
from ziggurat._library.native import InvalidArgument
from ziggurat._library.native_checkpoint import Checkpoint
from ziggurat._library.state_kinds import moments_of
from ziggurat._memory.file_memory import let_pages_go
from ziggurat._memory.frozen_files import copy_if_differs
from ziggurat._memory.memory import count_freed
from ziggurat._memory.progress import Progress
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.rounding import rounded
from ziggurat._pytorch.dtensor import is_dtensor, local_box, local_of
from ziggurat._pytorch.names import listed, names_alone, shown
from ziggurat._streaming.streaming import kept_by_engine

AT_ONCE = 1 << 20  # elements read into PyTorch's memory at a time


def read_values(checkpoint: Checkpoint, index: int, first: int, count: int) -> torch.Tensor:
    """Returns `count` elements of tensor `index` from `first` on, in fp32."""
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    checkpoint.read(index, first, values.data_ptr(), count)
    return values


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a load found in the checkpoint, and what it did not find."""

    path: str
    step: int
    #: values and state that the checkpoint lacks; such state starts from the beginning
    missing: list[str]
    #: names in the checkpoint for which the model or the optimizer has no place
    unexpected: list[str]
    resume: dict[str, Any]  #: the plain facts that were given when it was saved
    notes: list[str]  #: what was left as it was, with the reason


def load_checkpoint(
    path: str | os.PathLike[str],
    optimizer: EngineOptimizer,
    model: torch.nn.Module,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    weights_only: bool = False,
    **kept: Any,
) -> LoadedCheckpoint:
    """Loads the weights of `model`, and the masters, moments and steps of `optimizer`, from a
    checkpoint that :func:`save_checkpoint` or ``ziggurat train`` wrote.

    `path` is the checkpoint, or a folder whose newest whole checkpoint is loaded. Any number of
    ranks and any placement may have saved it. All ranks call this before the optimizer's first
    step, with the model wrapped as it will be trained, and each reads its part. The state is
    written to the store as it is read, a chunk at a time, and every byte is compared with its
    hash. The groups' settings and the objects given by name (as to :func:`save_checkpoint`) are
    restored; random states are restored only where the number of ranks is the same. `weights_only`
    loads the values alone, and training begins at step 0. ``rename`` returns our name for each
    name in the checkpoint, or None for what is left out.

    Errors: InvalidArgument if something is missing or unexpected, unless ``strict=False``, and if
    a shape differs; DataLoss, which names file and tensor, if a byte is damaged. Names and shapes
    are compared before anything is written.
    """
    require_optimizer("load_checkpoint()", optimizer)
    if optimizer._opened:
        raise InvalidArgument(
            "the optimizer already has a state: make a new optimizer, and call load_checkpoint() "
            "before its first step and before Resume"
        )
    if os.path.isfile(path):
        raise InvalidArgument(
            f"{path} is a file, but a checkpoint is a folder: use load_foreign_checkpoint() for a "
            "file that PyTorch or DeepSpeed saved"
        )
    optimizer.synchronize()
    optimizer.share_offloaded()
    runtime = optimizer._sharing.runtime(optimizer._workers(optimizer._order))
    opened: list[Checkpoint] = []

    def prepared() -> Loading:
        opened.append(Checkpoint(runtime, os.path.abspath(path)))
        loading = Loading(opened[0], optimizer, model, rename, strict, weights_only)
        loading.prepare(kept)
        return loading

    try:
        return optimizer._sharing.together("load_checkpoint()", prepared).run()
    finally:
        for checkpoint in opened:
            checkpoint.close()


class Loading:
    def __init__(
        self,
        checkpoint: Checkpoint,
        optimizer: EngineOptimizer,
        model: torch.nn.Module,
        rename: Rename | None,
        strict: bool,
        weights_only: bool,
    ) -> None:
        self._checkpoint, self._optimizer = checkpoint, optimizer
        self._strict, self._weights_only = strict, weights_only
        self._own = _own_of(checkpoint.blob)  # empty if another program saved the checkpoint
        self._notes: list[str] = []
        # a tensor's index in the checkpoint, by the id of its Saved
        self._tensors: dict[int, int] = {}
        # what is known of a parameter that is not in the checkpoint, by the id of its Saved
        self._left_out: dict[int, dict[str, Any]] = {}
        self._moments = moments_of(optimizer._kind)
        content = self._content()
        if getattr(model, "untrained_has_no_state", False):
            in_groups = {name for group in self._own.get("groups", []) for name in group["names"]}
            content.untrained = in_groups - self._own.get("steps", {}).keys()
        if rename is not None:
            rename_content(content, rename)
        places = Places(optimizer, model)
        without_wrappers(content, places, wrapper=False)
        if weights_only:
            places.trained = []
        self._places = places
        self._plan = Plan(content, places)
        self._kept_alive = content

    def prepare(self, kept: Mapping[str, Any]) -> None:
        """Compares the checkpoint with the model and the optimizer; writes nothing. Errors: what
        does not fit."""
        self._look_at_what_is_there()
        self._new_groups = None if self._weights_only else self._groups()
        self._kept = self._objects(kept)

    @property
    def states(self) -> Mapping[torch.Tensor, State]:
        return self._plan.states

    def index_of(self, saved: Saved) -> int | None:
        """Returns the tensor's index in the checkpoint, or None for what is not among its tensors."""
        return self._tensors.get(id(saved))

    def run(self) -> LoadedCheckpoint:
        """Loads the state, after prepare() has succeeded on all ranks."""
        groups, objects = self._new_groups, self._kept
        self._agree()
        self._optimizer._sharing.together("load_checkpoint()", self._fill)
        self._open()
        if groups is not None:
            for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
                group.update({k: v for k, v in settings.items() if k != "names"})
        for name, one in objects.items():
            one.load_state_dict(self._own["kept"][name])
        if not self._weights_only:
            self._set_random_states()
        checkpoint, plan = self._checkpoint, self._plan
        return LoadedCheckpoint(
            checkpoint.directory,
            checkpoint.step,
            plan.missing,
            plan.unexpected,
            checkpoint.resume,
            self._notes,
        )

    def _content(self) -> Content:
        """Lists what the checkpoint has by name; reads none of it yet."""
        checkpoint = self._checkpoint
        content = Content(f"the checkpoint {checkpoint.directory}")
        directory = Path(checkpoint.directory)
        for index, tensor in enumerate(checkpoint.tensors):
            if tensor.array.endswith(".scale"):
                continue
            saved = Saved(tensor.shape, directory, self._reader(index, tensor.shape))
            self._tensors[id(saved)] = index
            if tensor.array == "master":
                content.values[tensor.owner] = saved
            elif not self._weights_only:
                content.states.setdefault(tensor.owner, {})[tensor.array] = saved
        for name, state in content.states.items():
            state["master"] = content.values[name]
            state["step"] = of_number(self._steps_of(name), directory)
        for left in self._own.get("left_out", []):
            content.values[left["name"]] = saved = place_of(left)
            self._left_out[id(saved)] = left
        for name, value in self._own.get("others", {}).items():
            saved = Saved(tuple(value.shape), directory, lambda value=value: value)
            content.values[name] = saved
            if name in self._own["steps"] and not self._weights_only:
                # A trained parameter without elements has no state but its steps.
                content.states[name] = dict.fromkeys(("master", *self._moments), saved)
                content.states[name]["step"] = of_number(self._steps_of(name), directory)
        return content

    def _reader(self, index: int, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            return read_values(self._checkpoint, index, 0, math.prod(shape)).view(shape)

        return read

    def _steps_of(self, name: str) -> int:
        steps: dict[str, int] = self._own.get("steps", {})
        return steps.get(name, self._checkpoint.step)

    def _look_at_what_is_there(self) -> None:
        plan, layout = self._plan, f"the checkpoint {self._checkpoint.directory}"
        if plan.wrong_shapes:
            raise InvalidArgument(
                f"{layout} does not fit the model: {listed('other shapes', plan.wrong_shapes)}"
            )
        if self._strict and (plan.missing or plan.unexpected):
            found = {"missing": plan.missing, "unexpected": plan.unexpected}
            words = "; ".join(listed(what, names) for what, names in found.items() if names)
            raise InvalidArgument(
                f"{layout}: {words}; give rename= if the names differ, weights_only=True to load "
                "the values alone, or strict=False to load the rest"
            )
        self._look_at_what_was_left_out()

    def _look_at_what_was_left_out(self) -> None:
        left = {its: self._left_out.get(id(saved)) for its, saved in self._plan.values.items()}
        compared = Compared()
        differing = [its for its, one in left.items() if compared.differs(self._places.name_of(its), its, one)]
        others = [f"{self._places.name_of(its)} ({self._plan.values[its].file})" for its in differing]
        if others and self._strict:
            raise InvalidArgument(
                f"the checkpoint {self._checkpoint.directory} has no values of parameters that stayed in their "
                f"own files, and those of the model are others: {shown(others)}; build the model from the "
                "same files before load_checkpoint(), or give strict=False to train with the values that it has"
            )
        if others:
            self._notes.append(f"the model keeps values that are not those of the run: {shown(others)}")

    def _groups(self) -> list[dict[str, Any]] | None:
        """Returns the settings for each of the optimizer's groups, or None if the groups keep
        theirs."""
        saved: list[dict[str, Any]] = self._own.get("groups", [])
        names = [
            [self._places.name_of(param) for param in group["params"]]
            for group in self._optimizer.param_groups
        ]
        if names == [group["names"] for group in saved]:
            return saved
        short = names_alone([name for group in saved for name in group["names"]], wrapper=False)
        here = self._places.name_here
        if names == [[here(name, short[name]) for name in group["names"]] for group in saved]:
            return saved
        self._notes.append(
            "the settings of the groups stay as they are, because the "
            "checkpoint's groups have other parameters"
        )
        return None

    def _objects(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those objects of `kept` that the checkpoint has. Errors: InvalidArgument, which
        names the missing ones, if the load is strict."""
        saved = self._own.get("kept", {})
        if self._strict and (lacking := [name for name in kept if name not in saved]):
            has = ", ".join(saved) or "none"
            raise InvalidArgument(
                f"load_checkpoint(): the checkpoint has no state for {', '.join(lacking)}; it was "
                f"saved with {has}. Give strict=False to leave what is missing as it is"
            )
        return {name: one for name, one in kept.items() if name in saved}

    def _agree(self) -> None:
        """Checks that all ranks load the same checkpoint. Errors: InvalidArgument if they do
        not."""
        ranks = self._optimizer._sharing.ranks
        if ranks is None:
            return
        name = Path(self._checkpoint.directory).name.encode()
        every = ranks.gathered([zlib.crc32(name)])[:, 0].tolist()
        if len(set(every)) > 1:
            raise InvalidArgument(
                f"load_checkpoint(): rank {ranks.rank} found {self._checkpoint.directory}, but "
                "another rank found another checkpoint: give the path of one checkpoint, in a "
                "folder that all ranks share"
            )

    @torch.no_grad()
    def _fill(self) -> None:
        """Fills the parameters with their masters rounded to the parameters' types, and the
        buffers. Leaves out what the engine is going to keep: it reads that itself, and the
        memory here goes then."""
        trained = {param for param in self._places.ordered if param.requires_grad}
        read = {
            target: saved
            for target, saved in self._plan.values.items()
            if self._is_read(target, saved, trained)
        }
        sizes = {target: target.numel() * target.element_size() for target in read}
        with Progress("reading parameters of the checkpoint", sum(sizes.values())) as progress:
            for target, saved in read.items():
                self._fill_one(target, saved)
                progress.add(sizes[target])

    def _is_read(self, target: torch.Tensor, saved: Saved, trained: set[torch.Tensor]) -> bool:
        if target.numel() == 0 or id(saved) in self._left_out:
            return False
        kept = id(saved) in self._tensors and target in trained and kept_by_engine(target) is not None
        return not kept

    def _fill_one(self, target: torch.Tensor, saved: Saved) -> None:
        index = self._tensors.get(id(saved))
        if index is None:
            copy_if_differs(target, saved.read())
            return
        here = local_of(target) if is_dtensor(target) else target
        first = _first_of(target)
        if first is None:
            values = rounded(self._read_box(index, target), target.dtype)
            here.copy_(values.view(here.shape))
        else:
            self._read_into(here, index, first)

    def _read_into(self, here: torch.Tensor, index: int, first: int) -> None:
        """Reads the elements from `first` on, some at a time."""
        whole = here.is_contiguous()
        flat = here.view(-1) if whole else torch.empty(here.numel(), dtype=here.dtype)
        for begin in range(0, flat.numel(), AT_ONCE):
            some = flat[begin : begin + AT_ONCE]
            values = read_values(self._checkpoint, index, first + begin, some.numel())
            copy_if_differs(some, rounded(values, here.dtype))
            count_freed(3 * values.nbytes)  # with what rounding makes
        if not whole:
            here.copy_(flat.view(here.shape))
        let_pages_go(here)

    def _read_box(self, index: int, target: torch.Tensor) -> torch.Tensor:
        """Reads this rank's part of `target`, in fp32, where the part is no contiguous run of the
        whole."""
        values = read_values(self._checkpoint, index, 0, target.numel()).view(target.shape)
        for dim, (begin, size) in enumerate(zip(*local_box(target), strict=True)):
            values = values.narrow(dim, begin, size)
        return values.contiguous()

    def _open(self) -> None:
        optimizer = self._optimizer
        optimizer._to_load.clear()
        optimizer._load = self._load
        try:
            optimizer.open()
        finally:
            optimizer._load = None
        for opened in optimizer._opened:
            for param in opened.members:
                if opened.index(param) is None:
                    opened.set_steps(param, self._steps_here(param))
        # A rank reads the other ranks' part of a parameter's state directly, so it waits here until
        # all of them have loaded it.
        optimizer._sharing.all_of(True)

    def _steps_here(self, param: torch.Tensor) -> int:
        state = self._plan.states.get(param)
        return 0 if state is None else int(state["step"].read().item())

    def _load(self, parts: Sequence[Part]) -> tuple[int, dict[str, Any]]:
        """Returns the checkpoint's handle and what to load from it, as Engine takes them."""
        given, steps = [], []
        for part in parts:
            saved = self._plan.values.get(part.param)
            index = None if saved is None else self._tensors.get(id(saved))
            steps.append(self._steps_here(part.param))
            if index is None:
                given.append(None)
                continue
            tensor = self._checkpoint.tensors[index]
            given.append({"name": tensor.owner, "shape": list(tensor.shape)} | part.place())
        loaded = {"parts": given, "steps": steps, "weights_only": self._weights_only}
        return self._checkpoint.handle, loaded

    def _set_random_states(self) -> None:
        states = self._own.get("random")
        ranks = self._optimizer._sharing.ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        if states is None:
            return
        if len(states) != size:
            self._notes.append(
                "random states stay as they are, because the checkpoint has those of "
                f"{len(states)} ranks, but this job has {size}"
            )
            return
        set_random_states(states[rank])


def _first_of(target: torch.Tensor) -> int | None:
    """Returns where this rank's part begins in the whole, or None if the part is no contiguous
    run."""
    if not is_dtensor(target):
        return 0
    offsets, box = local_box(target)
    if box[1:] != list(target.shape[1:]):
        return None
    row = 1
    for size in box[1:]:
        row *= size
    return offsets[0] * row if box else 0


def _own_of(blob: bytes) -> dict[str, Any]:
    if not blob.startswith(MAGIC):
        return {}
    # weights_only admits plain data and tensors alone: loading a checkpoint runs no code.
    own: dict[str, Any] = torch.load(io.BytesIO(blob[len(MAGIC) :]), weights_only=True)
    return own
