# SPDX-License-Identifier: Apache-2.0
"""Parameters that a checkpoint leaves out, because the files are there from which each run builds them:
the frozen base of a LoRA model. It has their names, shapes and types, and a print of their values.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch

from ziggurat._foreign.content import Saved
from ziggurat._library.dtypes import DTYPES
from ziggurat._memory.frozen_files import FileMappings, FileRange
from ziggurat._memory.memory import size_text
from ziggurat._pytorch.dtensor import is_dtensor
from ziggurat._streaming.streaming import is_away, streaming_of, values_of

# A print is of so many places, of so many elements each: reading all would take as long as saving it.
_PLACES, _ELEMENTS = 16, 64


class LeftOut:
    """Finds, for one checkpoint, what stays in files, and describes it."""

    def __init__(self) -> None:
        self._mappings = FileMappings()
        self._params: list[dict[str, Any]] = []
        self._size_bytes = 0

    def add(self, name: str, param: torch.Tensor) -> bool:
        """Leaves the parameter out if it stays in a file with a name, which has its values. Returns
        whether it does: what a script has written is in no file."""
        found = streaming_of(param)
        if found is None or param not in found[1].unit.unit.in_files:
            return False
        file = self._mappings.named(param)
        if file is None:
            return False
        # What was known before the file was cut, if it was.
        its = found[0].place_in_file(param) or self._mappings.of(param)
        self._size_bytes += param.nbytes
        self._params.append(
            {
                "name": name,
                "shape": list(param.shape),
                "dtype": DTYPES[param.dtype],
                "file": file,
                "print": _print_of(name, param, its),
            }
        )
        if its is not None:
            its.let_go()  # the pages around what was read
        return True

    def params(self) -> list[dict[str, Any]]:
        return self._params

    def facts(self) -> dict[str, Any]:
        """Returns what tools and people are told, under a manifest's name."""
        if not self._params:
            return {}
        files = sorted({one["file"] for one in self._params})
        told = {"in": "blob", "parameters": len(self._params), "size": size_text(self._size_bytes)}
        return {"left_in_files": told | {"files": files}}


def _print_of(name: str, param: torch.Tensor, file: FileRange | None) -> str:
    """Returns what tells one parameter's values from another's, of any type that has both exactly. It is
    of the values of some places alone. Errors: DataLoss, with the `name`, if the file that the parameter is
    mapped from does not have them."""
    flat = values_of(param).reshape(-1)
    count = flat.numel()
    found = hashlib.sha256(struct.pack("<q", count))
    last = max(count - _ELEMENTS, 0)
    begins = [last * place // (_PLACES - 1) for place in range(_PLACES)]
    if file is not None:
        places = torch.tensor(begins)[:, None] + torch.arange(_ELEMENTS)
        file.read_rows(name, places.reshape(-1), param.element_size())
    for begin in begins:
        # A copy: PyTorch lets nobody resize memory that a NumPy array had.
        some = flat[begin : begin + _ELEMENTS].to("cpu", torch.float32, copy=True)
        found.update(some.numpy().tobytes())
    return found.hexdigest()[:32]


class Compared:
    """Compares parameters with what was left out of a checkpoint."""

    def __init__(self) -> None:
        self._mappings = FileMappings()

    def differs(self, name: str, param: torch.Tensor, left: dict[str, Any] | None) -> bool:
        """Returns whether the parameter is seen to have other values than what was left out, if it was. What
        is divided among ranks is not looked at. Errors: DataLoss."""
        if left is None or is_dtensor(param):
            return False
        found = streaming_of(param)
        its = None if found is None else found[0].place_in_file(param)
        if its is None and not is_away(param):
            its = self._mappings.of(param)
        return _print_of(name, param, its) != left["print"]


def place_of(left: dict[str, Any]) -> Saved:
    """Returns what a plan knows of a parameter that was left out, whose values nothing reads."""
    return Saved(tuple(left["shape"]), Path(left["file"]), _read)


def _read() -> torch.Tensor:
    raise AssertionError("a checkpoint has no values of what was left out")
