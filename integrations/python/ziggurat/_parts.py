# SPDX-License-Identifier: Apache-2.0
"""What of a parameter this process's engine has: all of it, a slice, or FSDP2's local shard."""

from __future__ import annotations

from typing import Any

import torch

from ziggurat._dtensor import is_dtensor, local_box, local_of, local_part
from ziggurat._gradient import GradientHooks
from ziggurat._gradient_content import Taken
from ziggurat._ranks import Cut, Ranks


class Part:
    """All of it."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param

    def memory(self) -> torch.Tensor:
        """The part's elements as they are now; its version is the parameter's."""
        return self.param

    def take(self, hooks: GradientHooks) -> Taken | None:
        """The part's gradient in the step to come, lent until consumed()."""
        return hooks.take(self.param)

    def consumed(self, hooks: GradientHooks) -> None:
        hooks.consumed(self.param)

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        """The part of `values`, which are of the whole parameter."""
        return values

    def place(self) -> dict[str, Any]:
        """Where in the whole it is, as checkpoints say it."""
        return {"first": 0}


class Slice(Part):
    """This rank's of a parameter that every rank has."""

    def __init__(self, param: torch.Tensor, ranks: Ranks) -> None:
        super().__init__(param)
        self._slice = Cut(param.numel(), ranks.size).of(ranks.rank)

    def memory(self) -> torch.Tensor:
        return self.param.detach().view(-1)[self._slice]

    def take(self, hooks: GradientHooks) -> Taken | None:
        taken = super().take(hooks)
        if taken is None or taken.tensor is None or hooks.is_shared(self.param):
            return taken
        return Taken(self.of_whole(taken.tensor), taken.scale)  # assigned, the same on every rank

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().reshape(-1)[self._slice]

    def place(self) -> dict[str, Any]:
        return {"first": self._slice.start}


class Shard(Part):
    """What this process has of a DTensor."""

    def memory(self) -> torch.Tensor:
        return local_of(self.param.detach())

    def of_whole(self, values: torch.Tensor) -> torch.Tensor:
        return local_of(values) if is_dtensor(values) else local_part(values, self.param)

    def place(self) -> dict[str, Any]:
        offsets, box = local_box(self.param)
        return {"offsets": offsets, "box": box}


class Nothing(Part):
    """In place of parts where a rank has none: it takes part in steps all the same."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1))

    def take(self, hooks: GradientHooks) -> Taken | None:
        return None
