# SPDX-License-Identifier: Apache-2.0
"""Gradients in 8 or 4 bits while ranks exchange them (qgZ of ZeRO++, Wang et al. 2023, section 4.3): the
engine encodes and sums them, in blocks of 256 elements with one scale each.

Each rank encodes its gradients once, and whoever sums a part decodes them in the order of ranks, in fp32.
Where ranks are on several nodes, the ranks of a node sum first, and these sums are encoded again and sent to
one rank of each other node, so that less leaves a node. So the bits depend on how many ranks a node has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ziggurat._library import native
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import InvalidArgument, Runtime, Unimplemented
from ziggurat._ranks.cuts import BLOCK

BITS = (4, 8)


class Grid(NamedTuple):
    """The ranks by nodes, of which each has `within` consecutive ones."""

    nodes: int
    within: int

    @property
    def has_two_levels(self) -> bool:
        return self.nodes > 1 and self.within > 1


def grid_of(size: int, ranks_per_node: int | None, what: str) -> Grid:
    """Errors: InvalidArgument if `size` ranks do not fill nodes of so many; `what` is what needs nodes."""
    within = min(size, ranks_per_node or size)
    if within < 1 or size % within != 0:
        raise InvalidArgument(
            f"{what} cannot be used, because {size} ranks do not fill nodes of {ranks_per_node}: give ranks_per_node= "
            "a divisor of the number of ranks"
        )
    return Grid(size // within, within)


def padded(count: int) -> int:
    """Returns how many elements whole blocks have for `count`."""
    return -(-count // BLOCK) * BLOCK


class Codes:
    """Encodes and sums rows of gradients, with the engine's workers."""

    def __init__(self, bits: int, grid: Grid, runtime: Runtime) -> None:
        self.bits, self.grid = bits, grid
        self._runtime = runtime

    def bytes_of(self, count: int) -> int:
        return native.quantized_bytes(self.bits, count)

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes the codes of each row of `values` to the beginning of that row of `codes`."""
        rows, count = values.shape
        if count > 0:
            native.quantize(
                self._runtime,
                self.bits,
                DTYPES[values.dtype],
                _address(values),
                rows,
                count,
                _address(codes),
                codes.stride(0),
            )

    def sum(self, codes: torch.Tensor, total: torch.Tensor) -> None:
        """Sums the rows of codes, in their order, to `total` in fp32."""
        if len(total) > 0:
            native.sum_quantized(
                self._runtime, self.bits, _address(codes), len(codes), codes.stride(0), _address(total), len(total)
            )


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu":
        raise Unimplemented(
            f"quantized_gradients encodes gradients in host memory only, but they are on {tensor.device}: leave it out"
        )
    return tensor.data_ptr()
