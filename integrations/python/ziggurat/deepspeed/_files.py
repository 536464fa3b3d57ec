# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: whole and durable under their name, or not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat._optimizer import EngineOptimizer

_CHUNK_BYTES = 1 << 30  # of state in memory at a time; the whole may be larger than memory


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
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_share(
    folder: Path, stem: str, optimizer: EngineOptimizer, share: int, shares: int
) -> list[str]:
    """The whole state of every `shares`-th parameter, from the one with number `share` on, some to
    a file, whose names are returned. They hold {number: state}."""
    written: list[str] = []
    chunk: dict[int, Any] = {}
    size_bytes = 0

    def flush() -> None:
        name = f"{stem}_{share}_of_{shares}_{len(written)}.pt"
        write(folder / name, chunk)
        written.append(name)

    for index, (_, param, _) in enumerate(optimizer._named()):
        state = optimizer.state_of(param) if index % shares == share else {}
        if state:
            chunk[index] = state
            size_bytes += sum(value.nbytes for value in state.values())
        if size_bytes >= _CHUNK_BYTES:
            flush()
            chunk, size_bytes = {}, 0
    if chunk:
        flush()
    return written


def read_state(folder: Path, names: Sequence[str]) -> dict[int, Any]:
    """What files hold together. Tensors are the files' pages, read when they are used."""
    state: dict[int, Any] = {}
    for name in names:
        # Plain data and tensors only: these files run no code.
        state |= torch.load(folder / name, weights_only=True, mmap=True)
    return state
