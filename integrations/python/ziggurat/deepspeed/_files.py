# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: whole and durable under their name, or not there."""

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

from ziggurat._native import DataLoss

_AT_ONCE = 1 << 20  # bytes


def write(path: Path, content: Any) -> None:
    """`content`: text, or what ``torch.save`` takes."""
    publish(prepare(path, content), path)


def prepare(path: Path, content: Any) -> Path:
    """What is to be `path`, durable under another name, which is returned."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        if isinstance(content, str):
            file.write(content.encode())
        else:
            _save(content, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)  # what the file speaks of has its name before it
    return new


def publish(new: Path, path: Path) -> None:
    new.replace(path)
    _sync(path.parent)


def _save(content: Any, file: Any) -> None:
    """With the checksums that read() compares, which a script may have turned off."""
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
    """And those that it is in: durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def remove(there: Path) -> None:
    """A file, or a folder with all that is in it."""
    if there.is_dir():
        shutil.rmtree(there)
    else:
        there.unlink()


def read(path: Path) -> Any:
    """What ``torch.save`` wrote; tensors are the file's pages, read when they are used.

    It may hold any object: open only checkpoints that you trust. Errors: DataLoss where a byte is
    another one than was written, of records that have a checksum: all that write() wrote have.
    """
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive:
        return _checked(path, weights_only=False)
    try:  # as PyTorch before 1.6 wrote, and others still do
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise DataLoss(f"{path}: is not what was written: {error}") from error


def _checked(path: Path, weights_only: bool) -> Any:
    """Of an archive of records."""
    _check(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except RuntimeError as error:  # an object that cannot be made of whole bytes is another error
        if "PytorchStreamReader" not in str(error):
            raise
        raise DataLoss(f"{path}: its table of records is not what was written: {error}") from error


def _check(path: Path) -> None:
    """No checksum holds the sizes, places and flags of records: they show where they do not fit."""
    record = "table of records"
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                record = f"record {info.filename}"
                with archive.open(info) as file:
                    # PyTorch writes 0 where a script has turned checksums off: nothing to compare.
                    while info.CRC != 0 and file.read(_AT_ONCE):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the file
            raise
        raise DataLoss(f"{path}: its {record} is not what was written: {error}") from error


def read_state(folder: Path, names: Sequence[str]) -> dict[int, Any]:
    """What files hold together that the first format kept states in. Tensors are the files' pages,
    read when they are used."""
    state: dict[int, Any] = {}
    for name in names:
        # Plain data and tensors only: these files run no code.
        state |= _checked(folder / name, weights_only=True)
    return state
