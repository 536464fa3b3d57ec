# SPDX-License-Identifier: Apache-2.0
"""Files of ``torch.save``, read without running what is in them.

PyTorch's restricted unpickler makes tensors and plain data. Of DeepSpeed's classes it makes empty
ones of ours by the same names, so that DeepSpeed need not be there; of any other, none.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from ziggurat._native import DataLoss, InvalidArgument

_ZIP = b"PK\x03\x04"  # as torch.save writes since PyTorch 1.6


def _stub(name: str, base: type = object) -> Any:
    """An empty class that pickles know as `name`."""
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module, "__qualname__": short})


# What DeepSpeed 0.19.8 puts beside tensors and plain data; ``deepspeed.utils`` and
# ``deepspeed.checkpoint`` are where earlier versions had them.
_DEEPSPEED = [
    _stub("deepspeed.runtime.zero.config.ZeroStageEnum", int),
    _stub("deepspeed.utils.tensor_fragment.fragment_address"),
    _stub("deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    _stub("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    _stub("deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]
KNOWN = tuple(f"{known.__module__}.{known.__qualname__}" for known in _DEEPSPEED)


def load(path: Path) -> Any:
    """What ``torch.save`` wrote to `path`; tensors are its pages, read when they are used.

    Errors: InvalidArgument for a class that is not read, naming it; DataLoss for a damaged file.
    """
    with path.open("rb") as file:
        _look_at_start(file, path)
    return _loaded(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True), path)


def load_from(file: IO[bytes], path: Path) -> Any:
    """The same of an archive in memory that was part of `path`."""
    _look_at_start(file, path)
    file.seek(0)
    return _loaded(lambda: torch.load(file, map_location="cpu", weights_only=True), path)


def _look_at_start(file: IO[bytes], path: Path) -> None:
    # Older formats are not given to PyTorch: before 2.6 they could run code all the same.
    if file.read(len(_ZIP)) != _ZIP:
        raise InvalidArgument(
            f"{path}: is not an archive as torch.save has written it since PyTorch 1.6: load the "
            "file where it was made, and save it anew"
        )


def _loaded(load: Callable[[], Any], path: Path) -> Any:
    try:
        with _known():
            return load()
    except pickle.UnpicklingError as error:
        raise InvalidArgument(refusal(path, str(error))) from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise DataLoss(
            f"{path}: cannot be read ({first}): it is damaged or was cut: copy or save it again"
        ) from error


def refusal(path: Path, words: str) -> str:
    """Of PyTorch's `words` what says which class it was."""
    named = re.search(r"GLOBAL (\S+)", words)
    if named is None:
        detail = words.partition("WeightsUnpickler error:")[2].strip() or words
        first = detail.partition("\n")[0]
        return f"{path}: has more than tensors and plain data, so it is not read: {first}"
    said = f"{path}: has a {named[1]}, which is neither a tensor nor plain data, so it is not read"
    if "is blocked" in words:
        return f"{said}: it would run code; do not load this file"
    return (
        f"{said}: save the checkpoint without it, or if you trust the file, call "
        f"torch.serialization.add_safe_globals([{named[1]}]) before"
    )


@contextlib.contextmanager
def _known() -> Iterator[None]:
    within = getattr(torch.serialization, "safe_globals", None)
    if within is None:  # PyTorch 2.4
        torch.serialization.add_safe_globals(_DEEPSPEED)
        yield
        return
    with within(_DEEPSPEED):
        yield
