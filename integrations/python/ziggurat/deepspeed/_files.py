# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of a checkpoint: a file is whole and durable under its name, or does not
exist."""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat._native import DataLoss


def write(path: Path, content: Any) -> None:
    """Writes a file; `content` is text, or anything that ``torch.save`` takes."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        if isinstance(content, str):
            file.write(content.encode())
        else:
            _save(content, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)  # makes the names of files that this one refers to durable first
    new.replace(path)
    _sync(path.parent)


def _save(content: Any, file: Any) -> None:
    """Saves with the checksums that read() compares; a script may have turned them off."""
    options = getattr(torch.serialization, "get_crc32_options", None)  # since PyTorch 2.6
    if options is None or options():
        torch.save(content, file)
        return
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(content, file)
    finally:
        torch.serialization.set_crc32_options(False)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, and makes them durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def remove(there: Path) -> None:
    """Removes a file, or a folder with all its content."""
    if there.is_dir():
        shutil.rmtree(there)
    else:
        there.unlink()


def read(path: Path) -> Any:
    """Reads what ``torch.save`` wrote; tensors are the file's pages, read when they are used.

    The file may hold any object: open only checkpoints that you trust. Errors: DataLoss if a byte
    has changed since it was written.
    """
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive:
        _check(path)
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    try:  # PyTorch before 1.6 wrote these files, and other programs still do
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise DataLoss(f"{path} is damaged: {error}") from error


def _check(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataLoss(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise DataLoss(f"{path} is damaged in record {damaged}")


def read_state(folder: Path, names: Sequence[str]) -> dict[int, Any]:
    """Returns the joined content of the files in which the first format kept states. Tensors are
    the files' pages, read when they are used."""
    state: dict[int, Any] = {}
    for name in names:
        _check(folder / name)
        # weights_only admits plain data and tensors alone: these files run no code.
        state |= torch.load(folder / name, weights_only=True, mmap=True)
    return state
