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

from ziggurat._dtensor import is_dtensor
from ziggurat._dtypes import DTYPES
from ziggurat._foreign._content import Saved
from ziggurat._frozen_files import FileMappings
from ziggurat._memory import size_text
from ziggurat._streaming import streaming_of, values_of

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
        self._size_bytes += param.nbytes
        self._params.append(
            {
                "name": name,
                "shape": list(param.shape),
                "dtype": DTYPES[param.dtype],
                "file": file,
                "print": print_of(param),
            }
        )
        its = self._mappings.of(param)
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


def print_of(param: torch.Tensor) -> str:
    """Returns what tells one parameter's values from another's, of any type that has both exactly. It is
    of the values of some places alone."""
    flat = values_of(param).reshape(-1)
    count = flat.numel()
    found = hashlib.sha256(struct.pack("<q", count))
    last = max(count - _ELEMENTS, 0)
    for place in range(_PLACES):
        begin = last * place // (_PLACES - 1)
        some = flat[begin : begin + _ELEMENTS].to("cpu", torch.float32)
        found.update(some.numpy().tobytes())
    return found.hexdigest()[:32]


def differs(param: torch.Tensor, left: dict[str, Any] | None) -> bool:
    """Returns whether the parameter is seen to have other values than what was left out, if it was. What is
    divided among ranks is not looked at."""
    return left is not None and not is_dtensor(param) and print_of(param) != left["print"]


def place_of(left: dict[str, Any]) -> Saved:
    """Returns what a plan knows of a parameter that was left out, whose values nothing reads."""
    return Saved(tuple(left["shape"]), Path(left["file"]), _read)


def _read() -> torch.Tensor:
    raise AssertionError("a checkpoint has no values of what was left out")
