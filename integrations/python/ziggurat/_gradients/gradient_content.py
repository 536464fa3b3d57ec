# SPDX-License-Identifier: Apache-2.0
"""What a gradient holds until a step consumes it: a tensor, and the factor to multiply it by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._pytorch.torch_private import in_backward

_HALVES = (torch.bfloat16, torch.float16)


class Taken(NamedTuple):
    """What a step consumes: ``tensor * scale``, or all zeros if there is no tensor."""

    tensor: torch.Tensor | None  # contiguous; in the gradient's type, or fp32
    scale: float


def count_write(part: torch.Tensor) -> None:
    """Raises the tensor's version, which shows that a copy begun earlier is out of date. PyTorch
    itself does not raise it below autograd, where gradients are added and c10d reduces them."""
    torch.autograd.graph.increment_version(part)


def count_writes(written: Sequence[torch.Tensor]) -> None:
    """Raises the version of each tensor by one."""
    try:
        torch.autograd.graph.increment_version(written)
    except (AttributeError, RuntimeError, TypeError):  # earlier versions take one tensor
        for one in written:
            torch.autograd.graph.increment_version(one)


class Slot:
    """A parameter as the hooks know it. Does not keep the parameter alive."""

    def __init__(self, name: str | Callable[[int], str], index: int) -> None:
        self._name = name
        self.index = index
        self.handle: Any = None
        # the memory of an earlier step's sum, used again to save fresh pages
        self.spare: torch.Tensor | None = None


    @property
    def name(self) -> str:
        return self._name if isinstance(self._name, str) else self._name(self.index)


class Content:
    """A gradient's value: ``part * scale``. Without a part it is zeros; without a scale the scale
    is 1."""

    def __init__(self, slot: Slot, part: torch.Tensor) -> None:
        self.slot = slot
        self.shape, self.dtype, self.device = part.shape, part.dtype, part.device
        self.home = part.device  #: where the part is
        self.wide = torch.float32 if part.dtype in _HALVES else part.dtype
        self.part: torch.Tensor | None = part
        self.scale: torch.Tensor | None = None
        self.consumed = False
        self.taken = False  # a step has taken the part and may still read it
        self.arrivals = 0  # how often backward has added to it since the last step

    def __del__(self) -> None:
        self._drop()

    @property
    def is_zero(self) -> bool:
        """Returns whether the gradient is known to be zero without reading any value."""
        return self.part is None and self.scale is None and not self.consumed

    def _drop(self) -> None:
        part, self.part, self.scale = self.part, None, None
        if part is not None and part.dtype != self.dtype and not self.taken:
            self.slot.spare = part  # the part is a sum, whose memory nobody else uses

    def check(self) -> None:
        if self.consumed:
            raise InvalidArgument(
                f"the step has consumed this gradient of parameter '{self.slot.name}': read or "
                "change it before optimizer.step(), and call zero_grad() after"
            )

    def consumed_by_step(self, keep: bool) -> None:
        self.taken = False
        self.arrivals = 0
        if not keep:
            self._drop()
            self.consumed = True

    def zero(self) -> None:
        self._drop()
        self.consumed = self.taken = False
        self.arrivals = 0

    def value(self) -> torch.Tensor:
        """Returns the value in the gradient's type, contiguous. It may be the part itself."""
        self.check()
        part = self.part
        if part is None:
            zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return zeros if self.scale is None else zeros * self.scale  # 0 * inf is nan
        value = part if self.scale is None else part * self.scale
        return value.to(self.dtype).contiguous()

    def settle(self) -> torch.Tensor:
        """Makes the value the part, and returns it, so that what is written to it stays."""
        value = self.value()
        if value is not self.part:
            self._drop()
            self.part = value
        elif self.taken:
            self.part = value = value.clone()
        self.scale, self.taken = None, False
        return value

    def multiply(self, factor: Any, inverse: bool) -> None:
        self.check()
        # The factor has the type in which PyTorch multiplies 16-bit gradients. It is copied,
        # because the caller may change it later.
        if isinstance(factor, torch.Tensor):
            factor = factor.to(self.wide, copy=True)
        else:
            factor = torch.tensor(factor, dtype=self.wide, device="cpu")
        if inverse:
            factor = factor.reciprocal()
        self.scale = factor if self.scale is None else self.scale * factor

    def add(self, other: Any, alpha: Any) -> None:
        if self.consumed:
            if not in_backward():
                self.check()
            self.zero()  # a backward starts from the beginning
        if self.part is None and self.scale is None:
            zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.home)
            self.part = zeros.add_(other, alpha=alpha)
            return
        part = self.value() if self.part is None else self.part
        if part.dtype != self.wide:
            part = self._memory_of_a_sum().copy_(part)
        elif self.taken:
            part = part.clone()
        self.taken = False
        if self.scale is not None:
            part.mul_(self.scale)
        self.part, self.scale = part.add_(other, alpha=alpha), None
        count_write(self.part)

    def _memory_of_a_sum(self) -> torch.Tensor:
        spare, self.slot.spare = self.slot.spare, None
        if spare is not None and (spare.shape, spare.device) == (self.shape, self.home):
            return spare
        return torch.empty(self.shape, dtype=self.wide, device=self.home)

    def take(self) -> Taken | None:
        if self.consumed:
            return None
        if self.part is not None:
            self.part = self.part.contiguous()
        scale = 1.0 if self.scale is None else float(self.scale)
        if self.part is None and not math.isfinite(scale):
            self.settle()
            scale = 1.0
        self.taken = True
        return Taken(self.part, scale)
