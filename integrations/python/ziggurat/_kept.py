# SPDX-License-Identifier: Apache-2.0
"""A parameter that the engine keeps, among those that it is lent."""

from __future__ import annotations

import torch

from ziggurat._device import InPlace
from ziggurat._native import Engine
from ziggurat._parts import Part


class Kept(Part):
    """A whole parameter of an offloaded model: the engine keeps it, and brings it with `unit`, which
    only some steps use if it is `optional`."""

    def __init__(self, param: torch.Tensor, unit: int, optional: bool) -> None:
        super().__init__(param)
        self.unit = unit
        self.optional = optional


class AtEngine(InPlace):
    """The place of all parameters that one engine keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None

    def read(self, index: int, param: torch.Tensor) -> torch.Tensor:
        return param  # for its shape and type alone

    def values(self, index: int, param: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(param.shape, dtype=param.dtype, device="cpu")
        assert self.engine is not None
        self.engine.read_param(index, copy.data_ptr())
        return copy

    def write(self, index: int, param: torch.Tensor) -> None:
        pass
