# SPDX-License-Identifier: Apache-2.0
"""What a gradient of an offloaded model holds while the engine has its values, in a file."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ziggurat._dtypes import DTYPES
from ziggurat._gradient_content import Content, Slot, Taken
from ziggurat._memory import count_freed
from ziggurat._native import Engine, InvalidArgument


class _Opened(Protocol):
    engine: Engine
    summed: set[int]


class EngineContent(Content):
    """A gradient that is handed to the engine as backward makes it. Each use of its values reads
    them into memory of their own; one that writes them keeps that memory until the step."""

    def __init__(self, slot: Slot, made: torch.Tensor, opened: _Opened, index: int) -> None:
        super().__init__(slot, made)
        self._opened, self._index = opened, index
        self._own = None
        self._summands = 0  # in the engine
        self._hand_over(made)

    # The base has an attribute here.
    @property  # type: ignore[override]
    def part(self) -> torch.Tensor | None:
        return self._read() if self.at_engine else self._own

    @part.setter
    def part(self, part: torch.Tensor | None) -> None:
        self._own: torch.Tensor | None = part

    @property
    def at_engine(self) -> bool:
        return self._summands > 0

    @property
    def is_zero(self) -> bool:
        return not self.at_engine and super().is_zero

    def _hand_over(self, values: torch.Tensor) -> None:
        engine, index = self._opened.engine, self._index
        values = values.contiguous()
        if not self.at_engine and index in self._opened.summed:
            engine.discard_gradient(index)
        self._opened.summed.add(index)
        engine.add_gradient(index, DTYPES[values.dtype], values.data_ptr(), values.numel())
        self._summands += 1
        count_freed(values.nbytes)  # soon, when backward has no use for it any more

    def _read(self) -> torch.Tensor:
        """Returns what Content would have: the gradient as backward made it, or a sum in fp32."""
        values = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        self._opened.engine.read_gradient(self._index, values.data_ptr())
        return values if self._summands > 1 else values.to(self.dtype)

    def _drop(self) -> None:
        # A later summand, or the step, discards what the engine has.
        self._summands, self.scale = 0, None
        super()._drop()

    def settle(self) -> torch.Tensor:
        if self.at_engine:
            value = self.value()
            self._drop()
            self.part = value
        return super().settle()

    def add(self, other: Any, alpha: Any) -> None:
        if self.consumed:
            raise InvalidArgument(
                f"the gradient of parameter '{self.slot.name}' was in a file, and a step has consumed "
                "it, so that nothing can be added to it: call optimizer.zero_grad() after each step"
            )
        as_it_is = alpha == 1 and self.scale is None and other.dtype in DTYPES
        if as_it_is and self._own is None and other.shape == self.shape:
            self._hand_over(other)
            return
        if self.at_engine:
            part, scale = self.part, self.scale
            self._drop()
            self.part, self.scale = part, scale
        super().add(other, alpha)

    def take(self) -> Taken | None:
        if self.at_engine and not self.consumed:
            self.settle()
        return super().take()

    def consumed_by_step(self, keep: bool) -> None:
        # The engine has nothing of it after the step.
        super().consumed_by_step(keep and not self.at_engine)


def at_engine(grad: torch.Tensor | None) -> EngineContent | None:
    """Returns the content of a whole gradient whose values the engine has, or None."""
    content = getattr(grad, "_content", None)
    if type(content) is not EngineContent or content.consumed or grad._path:  # type: ignore
        return None
    return content if content.at_engine else None
