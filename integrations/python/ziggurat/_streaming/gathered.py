# SPDX-License-Identifier: Apache-2.0
"""gathered(): brings parameters of an offloaded model for other uses than its own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ziggurat._streaming.exports import Counts
from ziggurat._streaming.pins import PinnedUnit
from ziggurat._streaming.prints import Prints
from ziggurat._streaming.streaming import Streaming, streaming_of


@contextlib.contextmanager
def gathered(params: torch.Tensor | Iterable[torch.Tensor], *, write: bool = False) -> Iterator[None]:
    """Brings the units of offloaded parameters for the block, in which they are as ever. Others
    may be among them. What the block writes stays, and the next step makes masters of it, as of any
    parameter that was written. Writes that PyTorch does not count, as ``p.data.mul_(2)``, are found by
    reading the units before the block and after it; with `write` all of `params` count as written, and
    nothing is read. A graph that was made in the block must not be used after it. Errors: InvalidArgument
    if a NumPy array, another library or such a graph keeps their memory beyond it."""
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    with brought(given) as units:
        compared = [] if write else [unit for unit in units if unit.streaming.opened is not None]
        prints = Prints(held for unit in compared for held in unit.held)
        last = (unit for unit in units if unit.streaming.opened is not None and unit.pins == 1)
        counts = Counts(held for unit in last for held in unit.held)
        try:
            yield
            counts.require_no_others()
        finally:
            written = given if write else [held.param for held in prints.written()]
            torch.autograd.graph.increment_version(written)


@contextlib.contextmanager
def brought(params: Iterable[torch.Tensor], exact: bool = True) -> Iterator[list[PinnedUnit]]:
    """Is gathered() for a block that tells itself what it writes. Returns the units. Without `exact` they
    come as for a forward."""
    units: dict[PinnedUnit, Streaming] = {}
    for found in map(streaming_of, params):
        if found is not None:
            units[found[1].unit] = found[0]
    with contextlib.ExitStack() as pins:
        for unit, streaming in units.items():
            streaming.pin([unit], exact=exact)
            pins.callback(streaming.unpin, [unit])
            unit.prints = None
        yield list(units)
