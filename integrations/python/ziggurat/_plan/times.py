# SPDX-License-Identifier: Apache-2.0
"""What was recorded of a forward and a backward of a model (recorded_times.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ENTER, LEAVE, BEGIN, END, GRADIENT, BACKWARD, DONE = "enter", "leave", "begin", "end", "gradient", "backward", "done"


class Happened(NamedTuple):
    """Something in a step, and the seconds since what happened before."""

    what: str
    of: int  #: the entry of the division, or the parameter's number in the model
    seconds: float


@dataclass(frozen=True)
class Times:
    """A forward and a backward in their order."""

    happened: tuple[Happened, ...]
    params: tuple[torch.nn.Parameter, ...]  #: by the numbers of GRADIENT
    threads: int  #: of PyTorch
    add_s_per_byte: float  #: of a gradient that is added to another one, by its bytes
    norm_s_per_byte: float  #: of a gradient whose norm is asked for, and that is scaled

    def seconds_of(self, *, backward: bool) -> float:
        names = [one.what for one in self.happened]
        begins = names.index(BACKWARD) + 1
        part = self.happened[begins:] if backward else self.happened[:begins]
        return sum(one.seconds for one in part)
