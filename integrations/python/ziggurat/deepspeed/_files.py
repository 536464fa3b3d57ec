# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: whole and durable under their name, or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ziggurat._optimizer import EngineOptimizer
from ziggurat._state import Groups

_CHUNK_BYTES = 1 << 30  # of state in memory at a time; the whole may be larger than memory
_FORMAT = 1


def write(path: Path, content: Any) -> None:
    """`content`: text, or what ``torch.save`` takes."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        if isinstance(content, str):
            file.write(content.encode())
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_state(
    folder: Path, optimizer: EngineOptimizer, names: Mapping[torch.Tensor, str]
) -> None:
    """The optimizer's groups and state, some parameters to a file; `names` are the module's."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    chunk: dict[int, Any] = {}
    size_bytes = chunks = 0
    for index, (_, param, _) in enumerate(optimizer._named()):
        state = optimizer.state_of(param)
        if state:
            chunk[index] = state
            size_bytes += sum(value.nbytes for value in state.values())
        if size_bytes >= _CHUNK_BYTES:
            write(new / f"state_{chunks}.pt", chunk)
            chunk, size_bytes, chunks = {}, 0, chunks + 1
    write(new / f"state_{chunks}.pt", chunk)
    groups = {
        "format": _FORMAT,
        "param_groups": Groups(optimizer).state_dict()["param_groups"],
        "names": [names.get(param, "") for _, param, _ in optimizer._named()],
        "chunks": chunks + 1,
    }
    write(new / "groups.pt", groups)
    shutil.rmtree(folder, ignore_errors=True)  # of a checkpoint with this tag that is replaced
    new.rename(folder)
    sync_folder(folder.parent)


def read_state(folder: Path) -> dict[str, Any]:
    """What ``load_state_dict()`` takes. Tensors are the file's pages, read when they are used."""
    groups = torch.load(folder / "groups.pt", weights_only=True)
    state: dict[int, Any] = {}
    for chunk in range(groups["chunks"]):
        # Plain data and tensors only: this file runs no code.
        state |= torch.load(folder / f"state_{chunk}.pt", weights_only=True, mmap=True)
    return {"state": state, "param_groups": groups["param_groups"], "names": groups["names"]}
