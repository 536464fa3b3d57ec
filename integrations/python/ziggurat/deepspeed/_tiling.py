# SPDX-License-Identifier: Apache-2.0
"""TiledLinear: a linear layer in tiles, each a linear layer of its own, with DeepSpeed's signature
and names of parameters. In stage 3 each tile is a unit, so that no more than one has to be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinear(torch.nn.Module):
    """Does what ``torch.nn.Linear(in_features, out_features, bias)`` does, in ``in_splits`` times
    ``out_splits`` tiles. Sums over the tiles of the input are rounded once more for each tile.

    ``input_is_already_split``
        The forward gets a sequence of ``in_splits`` tensors.
    ``combine_out_splits``
        False: the forward returns a list of ``out_splits`` tensors.
    ``linear_cls``
        What a tile is made with, as ``linear_cls(inputs, outputs, bias=..., **kwargs)``.
    ``init_linear``
        A linear layer whose values are copied.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = torch.nn.Linear,
        init_linear: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise InvalidArgument(
                    f"TiledLinear(): {name}_splits={splits}: give a number from 1 to {name}_features={features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = torch.nn.ModuleList()
        for outputs in _sizes(self.out_parts):
            inputs = _sizes(self.in_parts)
            # A sum over the inputs' tiles has one bias.
            has_bias = [bias and i == in_splits - 1 for i in range(in_splits)]
            row = (linear_cls(n, outputs, bias=b, **kwargs) for n, b in zip(inputs, has_bias, strict=True))
            self.linears.append(torch.nn.ModuleList(row))
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def tiles(self) -> Iterator[torch.nn.Module]:
        for row in self.linears:
            yield from row

    def forward(self, input_: Any) -> Any:
        inputs: Sequence[torch.Tensor] = [input_]
        if self.in_splits > 1:
            inputs = input_ if self.input_is_already_split else input_.split(_sizes(self.in_parts), dim=-1)
            if len(inputs) != self.in_splits:
                raise InvalidArgument(
                    f"TiledLinear: the input is split into {len(inputs)} tensors, but in_splits={self.in_splits}"
                )
        outputs = [self._sum_of(row, inputs) for row in self.linears]
        return self._combined(outputs) if self.combine_out_splits else outputs

    def _sum_of(self, row: Any, inputs: Sequence[torch.Tensor]) -> Any:
        total, *others = (tile(part) for tile, part in zip(row, inputs, strict=True))
        for other in others:
            total = self._added(total, other)
        return total

    def _added(self, total: Any, other: Any) -> Any:
        return total + other

    def _combined(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: torch.nn.Module) -> None:
        """Copies the values of a linear layer of the same size."""
        weight, bias = other.get_parameter("weight"), getattr(other, "bias", None)
        if tuple(weight.shape) != (self.out_features, self.in_features) or self.use_bias != (bias is not None):
            raise InvalidArgument(
                f"copy_params_from(): the layer is {tuple(weight.shape)}, {'with' if bias is not None else 'without'} "
                f"a bias, but this one is {(self.out_features, self.in_features)}: give one that is alike"
            )
        for row, rows in zip(self.linears, pairwise(self.out_parts), strict=True):
            for tile, columns in zip(row, pairwise(self.in_parts), strict=True):
                tile.weight.copy_(weight[slice(*rows), slice(*columns)])
            if bias is not None:
                row[-1].bias.copy_(bias[slice(*rows)])


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear of layers that return ``(output, bias)``, as Megatron's do."""

    def _added(self, total: Any, other: Any) -> Any:
        return total[0] + other[0], total[1] if other[1] is None else other[1]

    def _combined(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = torch.cat([output for output, _ in outputs], dim=-1)
        return joined, torch.cat(biases, dim=-1) if biases else None


def _bounds(count: int, parts: int) -> list[int]:
    """Returns where parts of nearly one size begin, and where the last ends: the larger ones first."""
    size, rest = divmod(count, parts)
    return [i * size + min(i, rest) for i in range(parts + 1)]


def _sizes(bounds: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds)]
