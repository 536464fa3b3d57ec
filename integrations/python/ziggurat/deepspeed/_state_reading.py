# SPDX-License-Identifier: Apache-2.0
"""Reads an optimizer's state from a checkpoint, in place of the state that the optimizer has.

Each rank calls prepare() by itself, which checks every byte and everything that has to fit while
the old state still exists. All ranks call run().
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat._checkpoint.checkpoint_load import AT_ONCE, read_values
from ziggurat._exchange.parts import Part
from ziggurat._library.native import InvalidArgument
from ziggurat._library.native_checkpoint import Checkpoint
from ziggurat._library.state_kinds import moments_of
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.rounding import draws_params, rounds_to
from ziggurat._streaming.gathered import brought
from ziggurat.deepspeed import _files
from ziggurat.deepspeed._letting_go import let_go, or_lost
from ziggurat.deepspeed._state_folder import Kept, open_all, runtime_with, take_over

_CALL = "load_checkpoint()"


def reading_of(
    optimizer: EngineOptimizer, folder: Path, own: Mapping[str, Any]
) -> FolderReading | FilesReading | NoReading:
    """Returns the reading for a tag's folder; `own` is what the module's file says about the
    state."""
    if own["format"] == 1:
        return FilesReading(optimizer, folder, own)
    if own["state"] is None:
        return NoReading(optimizer, own)
    its = own["state"]
    kept = Kept(its["names"], its["steps"])
    return FolderReading(optimizer, folder / its["folder"], kept, own["param_groups"])


def _fitting(optimizer: EngineOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict in the optimizer's order. Errors: PyTorch's, if the groups do not
    fit."""
    ordered = optimizer.in_order(state_dict)
    groups = ordered["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        optimizer._load_groups(ordered)  # PyTorch reports groups that do not fit
    return ordered


class NoReading:
    """Reads a checkpoint from before the first step, so training starts from the beginning."""

    def __init__(self, optimizer: EngineOptimizer, own: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._state_dict = {"state": {}, "param_groups": own["param_groups"]}

    def prepare(self) -> None:
        self._state_dict = _fitting(self._optimizer, self._state_dict)

    def run(self) -> None:
        with or_lost(self._optimizer):
            let_go(self._optimizer, _CALL)
        self._optimizer._load_groups(self._state_dict)

    def close(self) -> None:
        pass


class FilesReading:
    """Reads a state in the first format."""

    def __init__(self, optimizer: EngineOptimizer, folder: Path, own: Mapping[str, Any]) -> None:
        self._optimizer, self._folder, self._own = optimizer, folder, own
        self._state_dict: dict[str, Any] = {}

    def prepare(self) -> None:
        state = _files.read_state(self._folder, self._own["files"])
        state_dict = {"state": state, "param_groups": self._own["param_groups"]}
        self._optimizer._entries(_fitting(self._optimizer, state_dict))
        self._state_dict = state_dict

    def run(self) -> None:
        optimizer = self._optimizer
        optimizer._sharing.together(_CALL, lambda: optimizer.load_state_dict(self._state_dict))
        take_over(optimizer, _CALL)

    def close(self) -> None:
        pass


class FolderReading:
    """Reads a checkpoint in the engine's format. A parameter to which its master does not round
    becomes the master itself."""

    def __init__(
        self,
        optimizer: EngineOptimizer,
        folder: Path,
        kept: Kept,
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._optimizer = optimizer
        self._state_dict = _fitting(optimizer, {"state": {}, "param_groups": param_groups})
        groups = self._state_dict["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        named = zip(numbers, optimizer._named(), strict=True)
        self._numbers = {param: number for number, (_, param, _) in named}
        self._steps = kept.steps
        self._owners = kept.names
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.checkpoint = Checkpoint(runtime_with(optimizer), os.path.abspath(folder))
        self._tensors: dict[str, dict[str, int]] = {}  # a tensor's index, by owner and array
        for index, tensor in enumerate(self.checkpoint.tensors):
            self._tensors.setdefault(tensor.owner, {})[tensor.array] = index

    def close(self) -> None:
        self.checkpoint.close()

    def prepare(self) -> None:
        """Checks the state. Errors: InvalidArgument if something does not fit; DataLoss, which
        names file and tensor, if a byte is damaged."""
        for name, param, _ in self._optimizer._named():
            self._look_at(name, param)
        if self._optimizer._opened:
            self._prove()

    def _arrays(self, param: torch.Tensor) -> dict[str, int]:
        """Returns the arrays of a parameter's state; empty if it has no state."""
        owner = self._owners.get(self._numbers.get(param, -1))
        return {} if owner is None else self._tensors[owner]

    def _look_at(self, name: str, param: torch.Tensor) -> None:
        arrays = self._arrays(param)
        kind = self._optimizer._kind
        if not arrays:
            return
        if missing := [moment for moment in moments_of(kind) if moment not in arrays]:
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
        optimizer = self._optimizer
        if self.checkpoint.optimizer != optimizer._kind:
            self._give()
            return
        self._keep_changed()
        had_one = bool(optimizer._opened)
        if had_one:
            # Checks the parameters before the old state is given up, because open() may refuse
            # them.
            optimizer._sharing.before_open([(str(n), param) for param, n in self._numbers.items()], [])
        with or_lost(optimizer):
            if had_one:
                let_go(optimizer, _CALL)
            self._open()
        optimizer._load_groups(self._state_dict)

    def _give(self) -> None:
        """Loads another optimizer's state through memory: AdamW can use Adam's."""
        optimizer = self._optimizer

        def give() -> None:
            state: dict[int, dict[str, Any]] = {}
            for param, number in self._numbers.items():
                arrays = self._arrays(param)
                if arrays:
                    entry = {name: self._whole(index) for name, index in arrays.items()}
                    state[number] = entry | {"step": torch.tensor(float(self._steps[number]))}
            optimizer.load_state_dict({**self._state_dict, "state": state})

        optimizer._sharing.together(_CALL, give)
        take_over(optimizer, _CALL)

    def _whole(self, index: int) -> torch.Tensor:
        shape = self.checkpoint.tensors[index].shape
        return read_values(self.checkpoint, index, 0, math.prod(shape)).view(shape)

    def _prove(self) -> None:
        """Reads and checks every byte before the state that it replaces is let go."""
        for param in self._numbers:
            part = self._optimizer._part(param)  # which may be away
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

    def _keep_changed(self) -> None:
        """Keeps the parameters that a script has changed since the save, because the engine writes
        the parameters: here this rank's part, and then what the ranks gather. A parameter that was
        changed on one rank counts as changed on all ranks, as if one rank had all of it."""
        optimizer = self._optimizer
        with_state = [param for param in self._numbers if self._arrays(param)]
        parts = [optimizer._sharing.part(param) for param in with_state]

        def changed() -> list[bool]:
            masters = [self._arrays(part.param)["master"] for part in parts]
            return [not self._is_rounded(*one) for one in zip(parts, masters, strict=True)]

        sharing = optimizer._sharing
        on_any = sharing.any_of(sharing.together(_CALL, changed))
        self._changed = []
        for param in (param for param, its in zip(with_state, on_any, strict=True) if its):
            with brought([param]):
                self._changed.append((param, sharing.values(param).clone()))

    def _is_rounded(self, part: Part, master: int) -> bool:
        """Returns whether the engine rounds the checkpoint's master to the part."""
        drawn = draws_params(self._optimizer._settings)
        with brought([part.param]):
            values = part.memory().detach().cpu().reshape(-1)
            return all(
                rounds_to(chunk, values[first : first + chunk.numel()], drawn)
                for first, chunk in self._values(master, part)
            )

    def _open(self) -> None:
        optimizer = self._optimizer
        optimizer._to_load.clear()
        resume, optimizer._resume = optimizer._resume, None
        optimizer._load = self._load
        try:
            open_all(optimizer, [param for param in self._numbers if self._arrays(param)])
        finally:
            optimizer._load, optimizer._resume = None, resume
        for param, values in self._changed:  # the next step makes its masters from these values
            with brought([param]), torch.no_grad():
                optimizer._sharing.values(param).copy_(values)
        for opened in optimizer._opened:
            for param in opened.members:
                if opened.index(param) is None:
                    opened.set_steps(param, self._steps.get(self._numbers[param], 0))
        # A rank reads the other ranks' part of a parameter's state directly, so it waits here until
        # all of them have loaded it.
        optimizer._sharing.all_of(True)

    def _load(self, parts: Sequence[Part]) -> tuple[int, dict[str, Any]]:
        """Returns the checkpoint's handle and what to load from it, as Engine takes them."""
        given, steps = [], []
        for part in parts:
            arrays = self._arrays(part.param)
            if not arrays:
                given.append(None)
                steps.append(0)
                continue
            tensor = self.checkpoint.tensors[arrays["master"]]
            given.append({"name": tensor.owner, "shape": list(tensor.shape)} | part.place())
            steps.append(self._steps[self._numbers[part.param]])
        return self.checkpoint.handle, {"parts": given, "steps": steps, "weights_only": False}
