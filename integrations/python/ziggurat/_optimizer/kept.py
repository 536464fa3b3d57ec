# SPDX-License-Identifier: Apache-2.0
"""Parameters that the engine keeps, and slices of such, among those that it is lent."""

from __future__ import annotations

import torch

from ziggurat._exchange.parts import Part, Slice, flat
from ziggurat._library.native import Engine
from ziggurat._optimizer.device import InPlace
from ziggurat._pytorch.accelerator import Accelerator
from ziggurat._ranks.ranks import Ranks


class Kept(Part):
    """A whole parameter of an offloaded model: the engine keeps it, and brings it with `unit`, which
    only some steps use if it is `optional`."""

    def __init__(self, param: torch.Tensor, unit: int, optional: bool) -> None:
        super().__init__(param)
        self.unit = unit
        self.optional = optional


class KeptSlice(Kept, Slice):
    """This rank's slice of a parameter of an offloaded model, of which each rank's engine keeps one."""

    def __init__(self, param: torch.Tensor, unit: int, optional: bool, ranks: Ranks) -> None:
        Slice.__init__(self, param, ranks)
        self.unit = unit
        self.optional = optional
        # Has the slice's type and size, but no memory: the parameter is away as a rule.
        self._like = torch.empty(self.end - self.first_element(), dtype=param.dtype, device="cpu")
        self._like.untyped_storage().resize_(0)

    def memory(self) -> torch.Tensor:
        return self._like

    def values_here(self) -> torch.Tensor:
        """Returns the slice of a parameter that is not away."""
        return flat(self.param)[self.first_element() : self.end]


class AtEngine(InPlace):
    """The place of all parameters that one engine keeps."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        super().__init__()
        self._accelerator = accelerator  #: that has the gradients
        self.engine: Engine | None = None

    def gradient(self, index: int, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return part if self._accelerator is None else self._accelerator.to_host(part)

    def read(self, index: int, param: torch.Tensor) -> torch.Tensor:
        return param  # for its shape and type alone

    def values(self, index: int, param: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(param.shape, dtype=param.dtype, device="cpu")
        assert self.engine is not None
        self.engine.read_param(index, copy.data_ptr())
        return copy

    def write(self, index: int, param: torch.Tensor) -> None:
        pass
