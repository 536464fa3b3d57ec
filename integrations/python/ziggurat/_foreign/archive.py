# SPDX-License-Identifier: Apache-2.0
"""Reads files of ``torch.save`` without running code in them.

PyTorch's restricted unpickler makes tensors and plain data. For DeepSpeed's classes it makes empty
classes of ours with the same names, so that DeepSpeed need not be installed. It makes no other
class.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from ziggurat._library.native import DataLoss, InvalidArgument

_ZIP = b"PK\x03\x04"  # how an archive begins that torch.save has written since PyTorch 1.6


def _stub(name: str, base: type = object) -> Any:
    """Returns an empty class that pickles know as `name`."""
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module, "__qualname__": short})


# The classes that DeepSpeed 0.19.8 stores beside tensors and plain data; earlier versions had them
# in ``deepspeed.utils`` and ``deepspeed.checkpoint``.
_DEEPSPEED = [
    _stub("deepspeed.runtime.zero.config.ZeroStageEnum", int),
    _stub("deepspeed.utils.tensor_fragment.fragment_address"),
    _stub("deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    _stub("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    _stub("deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]
KNOWN = tuple(f"{known.__module__}.{known.__qualname__}" for known in _DEEPSPEED)


def load(path: Path) -> Any:
    """Returns what ``torch.save`` wrote to `path`. Tensors are the file's pages, read when they are
    used.

    Errors: InvalidArgument, which names the class, for a class that is not read; DataLoss if the
    file is damaged.
    """
    with path.open("rb") as file:
        _look_at_start(file, path)
    return _loaded(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True), path)


def load_from(file: IO[bytes], path: Path) -> Any:
    """Returns the content of an archive in memory that was part of `path`."""
    _look_at_start(file, path)
    file.seek(0)
    return _loaded(lambda: torch.load(file, map_location="cpu", weights_only=True), path)


def _look_at_start(file: IO[bytes], path: Path) -> None:
    # PyTorch gets no older formats, because before version 2.6 it could run code from them.
    if file.read(len(_ZIP)) != _ZIP:
        raise InvalidArgument(
            f"{path} is not in the format that torch.save has written since PyTorch 1.6: load the "
            "file where it was made, and save it again with a newer PyTorch"
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
            f"{path} cannot be read ({first}): it is damaged or cut short. Copy it or save it again"
        ) from error


def refusal(path: Path, words: str) -> str:
    """Returns an error's text that names the class in PyTorch's `words`."""
    named = re.search(r"GLOBAL (\S+)", words)
    if named is None:
        detail = words.partition("WeightsUnpickler error:")[2].strip() or words
        first = detail.partition("\n")[0]
        return f"{path} holds more than tensors and plain data, so it was not loaded: {first}"
    said = f"{path} holds a {named[1]}, neither a tensor nor plain data, so it was not loaded"
    if "is blocked" in words:
        return f"{said}: loading it would run code, so do not use this file"
    return (
        f"{said}: save the checkpoint without it, or, if you trust the file, first call "
        f"torch.serialization.add_safe_globals([{named[1]}])"
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
