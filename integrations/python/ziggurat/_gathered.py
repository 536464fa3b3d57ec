# SPDX-License-Identifier: Apache-2.0
"""gathered(): brings parameters of an offloaded model for other uses than its own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ziggurat._pins import PinnedUnit
from ziggurat._streaming import Streaming, streaming_of


@contextlib.contextmanager
def gathered(params: torch.Tensor | Iterable[torch.Tensor], *, write: bool = False) -> Iterator[None]:
    """Brings the units of offloaded parameters for the block, in which they are as ever. Others
    may be among them. What the block writes stays, also without `write` if PyTorch counts it, as it
    does not for ``p.data.mul_(2)``; the next step makes masters of it, as of any parameter that was
    written. What NumPy or another library keeps of their memory must not be used after the block,
    and so must no graph that was made in it."""
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    units: dict[PinnedUnit, Streaming] = {}
    for found in map(streaming_of, given):
        if found is not None:
            units[found[1].unit] = found[0]
    with contextlib.ExitStack() as pins:
        for unit, streaming in units.items():
            streaming.pin([unit])
            pins.callback(streaming.unpin, [unit])
        yield
        if write:
            torch.autograd.graph.increment_version(given)
