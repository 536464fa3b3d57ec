# SPDX-License-Identifier: Apache-2.0
"""What a gradient holds among ranks: this rank's slice of the mean, and what was not sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ziggurat._gradients.gradient_content import Content, Slot, Taken
from ziggurat._library.native import InvalidArgument
from ziggurat._pytorch.torch_private import in_backward
from ziggurat._ranks.ranks import Ranks


class Exchange(Protocol):
    ranks: Ranks

    def home_of(self, device: torch.device) -> torch.device: ...

    def in_host_memory(self, values: torch.Tensor) -> torch.Tensor: ...

    def gathered(self, content: SharedContent) -> torch.Tensor: ...

    def norms(self, contents: Sequence[SharedContent], order: float) -> torch.Tensor: ...


class SharedContent(Content):
    """A flat fp32 gradient ``slice * slice_scale``; ``part`` is this rank's alone, and not sent
    yet. Both are in host memory if units are brought to a GPU, which has no room for gradients.

    ``whole`` takes the place of the slice if somebody has written the gradient's values.
    """

    def __init__(self, slot: Slot, like: torch.Tensor, exchange: Exchange) -> None:
        super().__init__(slot, like)
        self.part = None
        self.exchange = exchange
        self.home = exchange.home_of(like.device)
        self.cut = exchange.ranks.cut(like.numel())
        self.slice: torch.Tensor | None = None
        self.slice_scale = torch.ones((), device=like.device)
        self.whole: torch.Tensor | None = None
        self.norms: dict[float, float] = {}  # norms already found, before scaling, by their order

    def own(self) -> torch.Tensor | None:
        """Returns this rank's slice, which the scale multiplies."""
        if self.whole is None:
            return self.slice
        return self.whole.reshape(-1)[self.exchange.ranks.own(self.shape.numel())]

    @property
    def is_zero(self) -> bool:
        return self.slice is self.whole is self.part is None and not self.consumed

    def check_sent(self) -> None:
        self.check()
        if self.part is not None:
            raise InvalidArgument(
                f"the gradient of parameter '{self.slot.name}' was not exchanged with the other "
                "ranks: leave no_sync() before the last backward of a step"
            )

    def to_send(self) -> Taken | None:
        """Returns what backward has made on this rank since the last exchange."""
        part, scale = self.part, self.scale
        self.part = self.scale = None
        return None if part is None else Taken(part, 1.0 if scale is None else float(scale))

    def receive(self, total: torch.Tensor) -> None:
        """Takes the ranks' sum of this rank's slice, and keeps its memory."""
        if self.consumed:
            self.zero()
        share = torch.tensor(1.0 / self.exchange.ranks.size, device=self.device)
        before = self.own()
        if before is None:
            self.slice, self.slice_scale = total, share
        else:
            # Adds in the new slice's memory, so that the older memory is let go bucket by bucket.
            earlier = before * self.slice_scale.to(before.device)
            self.slice = total.mul_(share.to(total.device)).add_(earlier.to(total.device, torch.float32))
            self.slice_scale = torch.ones((), device=self.device)
        self.whole = None
        self.norms.clear()
        self.taken = False

    def _drop(self) -> None:
        super()._drop()
        self.slice = self.whole = None
        self.norms.clear()

    def value(self) -> torch.Tensor:
        self.check_sent()
        return self.exchange.gathered(self) if self.whole is None else self.whole

    def settle(self) -> torch.Tensor:
        if self.whole is None or self.taken:
            self.whole = self.value().clone()
        self.slice, self.taken = None, False
        self.norms.clear()
        self.slice_scale = torch.ones((), device=self.device)
        return self.whole

    def multiply(self, factor: Any, inverse: bool) -> None:
        self.check_sent()
        if self.whole is not None:
            self.settle().mul_(1 / factor if inverse else factor)
            return
        factor = torch.as_tensor(factor, dtype=torch.float32, device=self.device)
        self.slice_scale = self.slice_scale * (factor.reciprocal() if inverse else factor)

    def add(self, other: Any, alpha: Any) -> None:
        if not in_backward():
            self.settle().add_(other, alpha=alpha)  # the script adds the same values on every rank
            return
        own = self.exchange.in_host_memory(other)
        if self.part is not None or self.consumed:
            super().add(own, alpha)
        elif alpha != 1:
            self.part = torch.mul(own, alpha)
        else:
            self.part = own.clone() if own is other else own

    def take(self) -> Taken | None:
        if self.consumed:
            return None
        self.check_sent()
        self.taken = True
        return Taken(self.own(), float(self.slice_scale))
