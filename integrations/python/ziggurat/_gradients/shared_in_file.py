# SPDX-License-Identifier: Apache-2.0
"""What a gradient among ranks holds while the engine has this rank's slice of it, in a file."""

from __future__ import annotations

import torch

from ziggurat._gradients.engine_content import EngineSums, HandedOver
from ziggurat._gradients.gradient_content import Slot
from ziggurat._gradients.shared_content import Exchange, SharedContent
from ziggurat._library.packing import TILE


class SharedInFile(HandedOver, SharedContent):
    """A gradient of which the ranks' sum of this rank's slice is handed to the engine when it has come.
    Each use of its values reads them. The bits are those of a slice that stays in memory, as a small one
    does: small parameters share records, so that a sum in a file would write others' too."""

    def __init__(
        self, slot: Slot, like: torch.Tensor, exchange: Exchange, sums: EngineSums, index: int
    ) -> None:
        self.sums, self.index = sums, index
        self._at_engine = False
        self._slice: torch.Tensor | None = None
        self._count = 0
        super().__init__(slot, like, exchange)

    # The base has an attribute here.
    @property  # type: ignore[override]
    def slice(self) -> torch.Tensor | None:
        return self.sums.read(self) if self.at_engine else self._slice

    @slice.setter
    def slice(self, values: torch.Tensor | None) -> None:
        # What the engine has is discarded when the next sum begins, or by the step.
        self._slice, self._at_engine = values, False

    @property
    def at_engine(self) -> bool:
        return self._at_engine

    @property
    def count(self) -> int:
        return self._count

    def check_for_step(self) -> None:
        self.check_sent()

    @property
    def factor(self) -> float:
        return float(self.slice_scale)

    def receive(self, total: torch.Tensor) -> None:
        if self._lost:
            self.check()
        again = self.at_engine and not self.consumed
        super().receive(total)
        if again:
            self.sums.say_second()
        self._hand_over()

    def _hand_over(self) -> None:
        values = self._slice
        if values is None:
            return
        if values.numel() < TILE:
            self._slice = values.clone()  # or the sums of a whole bucket would stay with it
            return
        self.sums.claim(self.index, self)
        self.sums.add(self, values)
        self._count = values.numel()
        self._slice, self._at_engine = None, True

    def bring_home(self) -> None:
        self.slice = self.sums.read(self)
