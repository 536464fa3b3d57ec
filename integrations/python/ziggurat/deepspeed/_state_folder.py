# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state in a folder of a checkpoint: a checkpoint of the engine's own format, which
the engine writes and reads some chunks at a time, with the hash of every byte.

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
    """What reading a folder needs beside it, by the number that each parameter has in the state
    dict's groups."""

    names: dict[int, str]  #: in the folder
    steps: dict[int, int]


def write(
    optimizer: EngineOptimizer, folder: Path, resume: Mapping[str, Any], alone: bool
) -> Kept | None:
    """None, and no folder: there is no state before the first step.

    A call of all ranks that have a part of the state; where rank 0 is `alone` in it, it reads the
    others' parts, which need not do anything. Errors: those of the disk, and nothing is there then.
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
    """What `do` returns, once it has on every rank: none goes on where another cannot."""
    result = error = None
    try:
        result = do()
    except Exception as failed:
        error = failed
    if not optimizer._sharing.all_of(error is None):
        raise error or Unavailable(f"{call}: another rank could not; its error says why")
    return result


def take_over(optimizer: EngineOptimizer) -> None:
    """What a step would take over first, of a state that was loaded, the engine has already. A call
    of all ranks where there is such a state."""
    optimizer.synchronize()
    if optimizer._to_load:
        _open(optimizer, list(optimizer._to_load))
    for opened in optimizer._opened:
        opened.settle()


def _open(optimizer: EngineOptimizer, with_state: Iterable[torch.Tensor]) -> None:
    """What is trained, and what has a state though it is frozen now: as if it were frozen later."""
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
    """What of an optimizer's state goes where."""

    def __init__(self, optimizer: EngineOptimizer, alone: bool) -> None:
        self._optimizer = optimizer
        self._alone = alone and optimizer._sharing.ranks is not None
        if self._alone and optimizer._to_load:
            raise InvalidArgument(
                "save_checkpoint(): a state was loaded that no step has taken over yet, and not "
                "all ranks save: let all of them call it, or make a step before"
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
            "widened": True,  # codes of 8 bits go on with one rank alone
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
        """What other ranks have."""
        sharing = self._optimizer._sharing
        if not isinstance(sharing, Divided):
            raise InvalidArgument(
                "save_checkpoint(): the parameters are FSDP2's, and not all ranks save: let all "
                "of them call it"
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
    """Gives `optimizer` the state in `folder` and the settings of `param_groups`, in place of what
    it has. Parameters that are not what their masters round to are masters themselves.

    A call of all ranks. Errors: InvalidArgument for what does not fit; DataLoss naming file and
    tensor for a damaged byte; the optimizer has what it had then.
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
            optimizer._load_groups(self._state_dict)  # PyTorch says what does not fit
        numbers = [number for group in groups for number in group["params"]]
        named = zip(numbers, optimizer._named(), strict=True)
        self._numbers = {param: number for number, (_, param, _) in named}
        self._steps = kept.steps
        self._tensors: dict[str, dict[str, int]] = {}  # by owner and array
        for index, tensor in enumerate(checkpoint.tensors):
            self._tensors.setdefault(tensor.owner, {})[tensor.array] = index
        self._owners = kept.names
        for name, param, _ in optimizer._named():
            self._look_at(name, param)

    def _arrays(self, param: torch.Tensor) -> dict[str, int]:
        """Of its state; empty: there is none."""
        owner = self._owners.get(self._numbers.get(param, -1))
        return {} if owner is None else self._tensors[owner]

    def _look_at(self, name: str, param: torch.Tensor) -> None:
        arrays = self._arrays(param)
        kind = self._optimizer._kind
        if not arrays:
            return
        if missing := [moment for moment in MOMENTS[kind] if moment not in arrays]:
            raise InvalidArgument(
                f"load_checkpoint(): parameter '{name}' has no {', '.join(missing)} but "
                f"{', '.join(arrays)}: it is the state of another optimizer than {kind}"
            )
        shape = self.checkpoint.tensors[arrays["master"]].shape
        if shape != tuple(param.shape):
            raise InvalidArgument(
                f"load_checkpoint(): the state of parameter '{name}' has the shape {shape}, and "
                f"the parameter {tuple(param.shape)}"
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
            self._optimizer._closed = had_one  # a step that began anew would train something else
            raise
        self._optimizer._load_groups(self._state_dict)

    def _give(self) -> None:
        """Another optimizer's, by way of memory: Adam's goes on as AdamW's."""
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
        """Every byte that will be read, while the state that it replaces is still there."""
        for param in self._numbers:
            part = self._optimizer._sharing.part(param)
            for index in self._arrays(param).values():
                for _ in self._values(index, part):
                    pass

    def _values(self, index: int, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Of tensor `index` what is here, some at a time: its first element, and the values."""
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
            for part, values in self._changed:  # the next step takes its masters from it
                part.memory().copy_(values)
        for opened in optimizer._opened:
            for param in opened.members:
                if opened.index(param) is None:
                    opened.set_steps(param, self._steps.get(self._numbers[param], 0))
        # A rank reads what others have of a parameter's state without their doing: not before they
        # have loaded it.
        optimizer._sharing.all_of(True)

    def _load(self, parts: Sequence[Part]) -> tuple[int, dict[str, Any]]:
        """As Engine takes it. The engine writes the parameters: what a script has changed since
        they were saved is kept first."""
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
        """Whether the part is what the engine rounds its master in the checkpoint to."""
        values = part.memory().detach().cpu().reshape(-1)
        drawn = self._optimizer._settings.get("param_rounding") == "stochastic"
        return all(
            rounds_to(chunk, values[first : first + chunk.numel()], drawn)
            for first, chunk in self._values(master, part)
        )


def masters(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's, in fp32, by its name there."""
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
    """It has no state any more, on a drive neither: the next step begins anew. A call of all
    ranks."""
    optimizer.synchronize()
    stores = [opened.store for opened in optimizer._opened if opened.store is not None]
    for opened in optimizer._opened:
        opened.close()
    optimizer._opened.clear()
    optimizer._opened_with.clear()
    optimizer._to_load.clear()
    optimizer._sharing.all_of(True)  # all have closed what may be in one directory
    for store in stores:
        for file in Path(store).glob("rank*.ziggurat"):
            file.unlink(missing_ok=True)
    optimizer._sharing.all_of(True)
