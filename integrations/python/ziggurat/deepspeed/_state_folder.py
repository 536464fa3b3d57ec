# SPDX-License-Identifier: Apache-2.0
"""Keeps the optimizer's state in a folder of a checkpoint. The folder has a checkpoint of the
engine's own format, which the engine writes and reads a few chunks at a time, with a hash of every
byte.

    FOLDER/step-000000010/   safetensors shards and their manifest, as `ziggurat ckpt` reads them
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat._checkpoint_load import AT_ONCE, read_values
from ziggurat._native import InvalidArgument, Unavailable
from ziggurat._native_checkpoint import Checkpoint, save_checkpoint
from ziggurat._opened import DTYPES, Opened, rounds_to, runtime_of
from ziggurat._optimizer import EngineOptimizer
from ziggurat._parts import Part
from ziggurat._ranks import Cut
from ziggurat._sharing import Divided
from ziggurat._state import MOMENTS


class Kept(NamedTuple):
    """What read() needs beside the folder, by each parameter's number in the state dict's
    groups."""

    names: dict[int, str]  #: names of the parameters in the folder
    steps: dict[int, int]


def write(
    optimizer: EngineOptimizer, folder: Path, resume: Mapping[str, Any], alone: bool
) -> Kept | None:
    """Writes the state. Returns None, and makes no folder, before the first step, when there is no
    state.

    All ranks that have a part of the state call this. If rank 0 is `alone` in it, rank 0 reads the
    other ranks' parts, and these need not do anything. Errors: those of the disk; nothing is left
    in the folder then.
    """

    def prepared() -> tuple[_Saving, dict[str, Any]]:
        saving = _Saving(optimizer, alone)
        return saving, saving.content(folder, resume) if saving.params else {}

    saving, content = prepared() if alone else _on_all(optimizer, "save_checkpoint()", prepared)
    if not content:
        return None
    engines = [opened.engine for opened in optimizer._opened]
    save_checkpoint(_runtime(optimizer), engines, [], b"", content)
    return saving.kept()


def _on_all(optimizer: EngineOptimizer, call: str, do: Callable[[], Any]) -> Any:
    """Returns what `do` returns, once it has succeeded on every rank, so that no rank continues
    where another cannot."""
    result = error = None
    try:
        result = do()
    except Exception as failed:
        error = failed
    if not optimizer._sharing.all_of(error is None):
        raise error or Unavailable(f"{call} failed on another rank; that rank's error says why")
    return result


def take_over(optimizer: EngineOptimizer) -> None:
    """Gives the engine a loaded state now that the next step would take over. All ranks call this
    if there is such a state."""
    optimizer.synchronize()
    if optimizer._to_load:
        _open(optimizer, list(optimizer._to_load))
    for opened in optimizer._opened:
        opened.settle()


def _open(optimizer: EngineOptimizer, with_state: Iterable[torch.Tensor]) -> None:
    """Opens engines for the trained parameters, and for frozen ones that have a state, as if these
    had been frozen later."""
    frozen = [param for param in with_state if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        optimizer.open()
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _runtime(optimizer: EngineOptimizer) -> Any:
    return optimizer._sharing.runtime(optimizer._workers(optimizer._order))


class _Saving:
    """Decides which part of an optimizer's state is stored where."""

    def __init__(self, optimizer: EngineOptimizer, alone: bool) -> None:
        self._optimizer = optimizer
        self._alone = alone and optimizer._sharing.ranks is not None
        if self._alone and optimizer._to_load:
            raise InvalidArgument(
                "save_checkpoint(): no step has used the loaded state yet, so all ranks must save "
                "it, but only some do: let all ranks call save_checkpoint(), or make a step first"
            )
        take_over(optimizer)
        self._names = {param: name for name, param, _ in optimizer._named()}
        self.params = [p for p in optimizer._order if p in optimizer._opened_with and p.numel() > 0]
        self._indices = {param: i for i, param in enumerate(self.params)}

    def content(self, folder: Path, resume: Mapping[str, Any]) -> dict[str, Any]:
        optimizer = self._optimizer
        params = [
            {"name": self._names[param], "shape": list(param.shape), "trained": True}
            for param in self.params
        ]
        return {
            "folder": os.path.abspath(folder),
            "step": max(opened.engine.generation for opened in optimizer._opened),
            "keep_last": 0,
            "keep_every": 0,
            "resume": dict(resume),
            "model": "deepspeed",
            "dtype": DTYPES[self.params[0].dtype],
            "placement": optimizer.placement,
            "params": params,
            "engines": [self._parts_of(opened) for opened in optimizer._opened],
            "values": [],
            "widened": True,  # one rank alone can load 8-bit codes, so they are widened
            "alone": self._alone,
            "others": list(self._others()) if self._alone else [],
        }

    def _parts_of(self, opened: Opened) -> list[dict[str, Any] | None]:
        sharing = self._optimizer._sharing
        return [
            {"param": self._indices[part.param]} | part.place()
            if part.param in self._indices and sharing.saves(part.param, trained=True)
            else None
            for part in opened.parts
        ]

    def _others(self) -> Iterator[dict[str, Any]]:
        """Yields the parts that other ranks have."""
        sharing = self._optimizer._sharing
        if not isinstance(sharing, Divided):
            raise InvalidArgument(
                "save_checkpoint(): FSDP2 has divided the parameters, so all ranks must save, but "
                "only some do: let all ranks call it"
            )
        for engine, opened in enumerate(self._optimizer._opened):
            for param in (param for param in opened.members if param in self._indices):
                cut = Cut(param.numel(), sharing.ranks.size)
                for rank in set(range(sharing.ranks.size)) - {sharing.ranks.rank}:
                    its = cut.of(rank)
                    if its.stop > its.start:
                        yield {
                            "engine": engine,
                            "rank": rank,
                            "name": opened._names_of[param],
                            "param": self._indices[param],
                            "first": its.start,
                            "count": its.stop - its.start,
                        }

    def kept(self) -> Kept:
        kept = Kept({}, {})
        for number, (name, param, _) in enumerate(self._optimizer._named()):
            if param in self._indices:
                kept.names[number] = name
                kept.steps[number] = self._optimizer._opened_with[param].steps_of(param)
        return kept


def read(
    optimizer: EngineOptimizer, folder: Path, kept: Kept, param_groups: list[dict[str, Any]]
) -> None:
    """Gives `optimizer` the state in `folder` and the settings of `param_groups`, in place of its
    own. A parameter to which its master does not round becomes the master itself.

    All ranks call this. Errors: InvalidArgument if something does not fit; DataLoss, which names
    file and tensor, if a byte is damaged. After an error the optimizer keeps its old state.
    """
    optimizer.synchronize()

    def opened() -> _Reading:
        checkpoint = Checkpoint(_runtime(optimizer), os.path.abspath(folder))
        return _Reading(optimizer, checkpoint, kept, param_groups)

    reading: _Reading = _on_all(optimizer, "load_checkpoint()", opened)
    try:
        reading.run()
    finally:
        reading.checkpoint.close()


class _Reading:
    def __init__(
        self,
        optimizer: EngineOptimizer,
        checkpoint: Checkpoint,
        kept: Kept,
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._optimizer, self.checkpoint = optimizer, checkpoint
        self._state_dict = optimizer.in_order({"state": {}, "param_groups": param_groups})
        groups = self._state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            optimizer._load_groups(self._state_dict)  # PyTorch reports groups that do not fit
        numbers = [number for group in groups for number in group["params"]]
        named = zip(numbers, optimizer._named(), strict=True)
        self._numbers = {param: number for number, (_, param, _) in named}
        self._steps = kept.steps
        self._tensors: dict[str, dict[str, int]] = {}  # a tensor's index, by owner and array
        for index, tensor in enumerate(checkpoint.tensors):
            self._tensors.setdefault(tensor.owner, {})[tensor.array] = index
        self._owners = kept.names
        for name, param, _ in optimizer._named():
            self._look_at(name, param)

    def _arrays(self, param: torch.Tensor) -> dict[str, int]:
        """Returns the arrays of a parameter's state; empty if it has no state."""
        owner = self._owners.get(self._numbers.get(param, -1))
        return {} if owner is None else self._tensors[owner]

    def _look_at(self, name: str, param: torch.Tensor) -> None:
        arrays = self._arrays(param)
        kind = self._optimizer._kind
        if not arrays:
            return
        if missing := [moment for moment in MOMENTS[kind] if moment not in arrays]:
            raise InvalidArgument(
                f"load_checkpoint(): the state of parameter '{name}' has {', '.join(arrays)}, but "
                f"no {', '.join(missing)}: it is not the state of an optimizer of the kind {kind}"
            )
        shape = self.checkpoint.tensors[arrays["master"]].shape
        if shape != tuple(param.shape):
            raise InvalidArgument(
                f"load_checkpoint(): the state of parameter '{name}' has the shape {shape}, but "
                f"the parameter has {tuple(param.shape)}"
            )

    def run(self) -> None:
        if self.checkpoint.optimizer != self._optimizer._kind:
            self._give()
            return
        had_one = bool(self._optimizer._opened)
        if had_one:
            _on_all(self._optimizer, "load_checkpoint()", self._prove)
            let_go(self._optimizer)
        try:
            self._open()
        except BaseException:
            # a step that started from the beginning would train something else
            self._optimizer._closed = had_one
            raise
        self._optimizer._load_groups(self._state_dict)

    def _give(self) -> None:
        """Loads another optimizer's state through memory: AdamW can use Adam's."""
        state: dict[int, dict[str, Any]] = {}
        for param, number in self._numbers.items():
            arrays = self._arrays(param)
            if arrays:
                entry = {name: self._whole(index) for name, index in arrays.items()}
                state[number] = entry | {"step": torch.tensor(float(self._steps[number]))}
        self._optimizer.load_state_dict({**self._state_dict, "state": state})
        take_over(self._optimizer)

    def _whole(self, index: int) -> torch.Tensor:
        shape = self.checkpoint.tensors[index].shape
        return read_values(self.checkpoint, index, 0, math.prod(shape)).view(shape)

    def _prove(self) -> None:
        """Reads and checks every byte before the state that it replaces is let go."""
        for param in self._numbers:
            part = self._optimizer._sharing.part(param)
            for index in self._arrays(param).values():
                for _ in self._values(index, part):
                    pass

    def _values(self, index: int, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields this rank's part of tensor `index`, some at a time: the place of the first element
        in the part, and the values."""
        place, count = part.place(), part.memory().numel()
        if "box" in place:
            yield from self._rows(index, **place)
            return
        for begin in range(0, count, AT_ONCE):
            first, some = place["first"] + begin, min(AT_ONCE, count - begin)
            values = read_values(self.checkpoint, index, first, some)
            yield begin, values

    def _rows(
        self, index: int, offsets: list[int], box: list[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        shape = self.checkpoint.tensors[index].shape
        row, row_here = math.prod(shape[1:]), math.prod(box[1:])
        at_once = max(1, AT_ONCE // row)
        for begin in range(0, box[0], at_once):
            rows = min(at_once, box[0] - begin)
            values = read_values(self.checkpoint, index, (offsets[0] + begin) * row, rows * row)
            values = values.view(rows, *shape[1:])
            for dim in range(1, len(shape)):
                values = values.narrow(dim, offsets[dim], box[dim])
            yield begin * row_here, values.reshape(-1)

    def _open(self) -> None:
        optimizer = self._optimizer
        optimizer._to_load.clear()
        resume, optimizer._resume = optimizer._resume, None
        optimizer._load = self._load
        self._changed: list[tuple[Part, torch.Tensor]] = []
        try:
            _open(optimizer, [param for param in self._numbers if self._arrays(param)])
        finally:
            optimizer._load, optimizer._resume = None, resume
        with torch.no_grad():
            for part, values in self._changed:  # the next step makes its masters from these values
                part.memory().copy_(values)
        for opened in optimizer._opened:
            for param in opened.members:
                if opened.index(param) is None:
                    opened.set_steps(param, self._steps.get(self._numbers[param], 0))
        # A rank reads the other ranks' part of a parameter's state directly, so it waits here until
        # all of them have loaded it.
        optimizer._sharing.all_of(True)

    def _load(self, parts: Sequence[Part]) -> tuple[int, dict[str, Any]]:
        """Returns the checkpoint's handle and what to load from it, as Engine takes them. First
        keeps what a script has changed since the save, because the engine writes the
        parameters."""
        given, steps = [], []
        for part in parts:
            arrays = self._arrays(part.param)
            if not arrays:
                given.append(None)
                steps.append(0)
                continue
            if not self._is_rounded(part, arrays["master"]):
                self._changed.append((part, part.memory().detach().clone()))
            tensor = self.checkpoint.tensors[arrays["master"]]
            given.append({"name": tensor.owner, "shape": list(tensor.shape)} | part.place())
            steps.append(self._steps[self._numbers[part.param]])
        return self.checkpoint.handle, {"parts": given, "steps": steps, "weights_only": False}

    def _is_rounded(self, part: Part, master: int) -> bool:
        """Returns whether the engine rounds the checkpoint's master to the part."""
        values = part.memory().detach().cpu().reshape(-1)
        drawn = self._optimizer._settings.get("param_rounding") == "stochastic"
        return all(
            rounds_to(chunk, values[first : first + chunk.numel()], drawn)
            for first, chunk in self._values(master, part)
        )


def masters(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter's master, in fp32, by its name in the folder."""
    checkpoint = Checkpoint(runtime_of(1), os.path.abspath(folder))
    try:
        for index, tensor in enumerate(checkpoint.tensors):
            if tensor.array == "master":
                values = torch.empty(tensor.shape, dtype=torch.float32)
                checkpoint.read(index, 0, values.data_ptr(), values.numel())
                yield tensor.owner, values
    finally:
        checkpoint.close()


def let_go(optimizer: EngineOptimizer) -> None:
    """Removes the optimizer's state, from a drive too: the next step starts from the beginning. All
    ranks call this."""
    optimizer.synchronize()
    stores = [opened.store for opened in optimizer._opened if opened.store is not None]
    for opened in optimizer._opened:
        opened.close()
    optimizer._opened.clear()
    optimizer._opened_with.clear()
    optimizer._to_load.clear()
    optimizer._sharing.all_of(True)  # all ranks have closed stores that may be in one directory
    for store in stores:
        for file in Path(store).glob("rank*.ziggurat"):
            file.unlink(missing_ok=True)
    optimizer._sharing.all_of(True)
