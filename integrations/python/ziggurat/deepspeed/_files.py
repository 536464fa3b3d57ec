# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of a checkpoint: a file is whole and durable under its name, or does not
exist."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat._library.native import DataLoss

_AT_ONCE = 1 << 20  # bytes


def write(path: Path, content: Any) -> None:
    """Writes a file; `content` is text, or anything that ``torch.save`` takes."""
    publish(prepare(path, content), path)


def prepare(path: Path, content: Any) -> Path:
    """Writes the content for `path` under another name, makes it durable, and returns that name."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        if isinstance(content, str):
            file.write(content.encode())
        else:
            _save(content, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)  # makes the names of files that this one refers to durable first
    return new


def publish(new: Path, path: Path) -> None:
    """Gives a file that prepare() returned its own name."""
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
    has changed since it was written, in a record that has a checksum. All records that write()
    wrote have one.
    """
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive:
        return _checked(path, weights_only=False)
    try:  # PyTorch before 1.6 wrote these files, and other programs still do
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise DataLoss(f"{path} is damaged: {error}") from error


def _checked(path: Path, weights_only: bool) -> Any:
    """Reads an archive of records, once its bytes have been checked."""
    _check(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except RuntimeError as error:
        # Another error means that an object could not be made, though the bytes are whole.
        if "PytorchStreamReader" not in str(error):
            raise
        raise DataLoss(f"{path} is damaged in the table of records: {error}") from error


def _check(path: Path) -> None:
    """Checks the bytes of each record. Sizes, places and flags of records have no checksum, but
    damage in them shows when the records do not fit."""
    record = "the table of records"
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                record = f"record {info.filename}"
                with archive.open(info) as file:
                    # PyTorch writes 0 if a script has turned checksums off, so there is nothing to
                    # compare.
                    while info.CRC != 0 and file.read(_AT_ONCE):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeError, OSError) as error:
        # EINVAL: the table gives a record a place before the file's beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DataLoss(f"{path} is damaged in {record}: {error}") from error


def read_state(folder: Path, names: Sequence[str]) -> dict[int, Any]:
    """Returns the joined content of the files in which the first format kept states. Tensors are
    the files' pages, read when they are used."""
    state: dict[int, Any] = {}
    for name in names:
        # weights_only admits plain data and tensors alone: these files run no code.
        state |= _checked(folder / name, weights_only=True)
    return state
