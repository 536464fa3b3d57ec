# SPDX-License-Identifier: Apache-2.0
"""Computes a linear layer in tiles of its output features, of which one is brought at a time.

The weight stays one parameter, which the engine is lent as it is lent the table of an embedding: it lies in
PyTorch's memory, or in a file, and a tile is some rows of it, which are copied to an accelerator that computes. So
names, state_dict(), checkpoints, the optimizer's state and its groups know nothing of tiles, and a run may go on with
others. Were each tile a parameter of the engine, all of these would have to put parameters together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from ziggurat._library.native import InvalidArgument
from ziggurat._memory.file_memory import empty_in_file, let_pages_go
from ziggurat._memory.frozen_files import FileRange
from ziggurat._pytorch.subclass import TILED, subclass
from ziggurat._pytorch.torch_private import in_functional_transform, uncompiled

if TYPE_CHECKING:
    from ziggurat._streaming.pins import PinnedUnit
    from ziggurat._streaming.streaming import Streaming


class Tiled:
    """The tiles of one layer's weight, which is in `unit`."""

    def __init__(self, streaming: Streaming, unit: PinnedUnit) -> None:
        self._streaming, self._unit = streaming, unit
        self._name = next(held.name for held in unit.all_held if held.param is unit.unit.weight)
        self._rows = [slice(*rows) for rows in unit.unit.tiles]
        self._place: FileRange | None = None  # of the weight
        self._pieces: list[FileRange] = []
        # Whether memory has room for the next tile beside this one, and for all of them.
        self._reads_ahead = self._keeps_all = False
        self.read_bytes = 0  #: from the file, or the page cache

    def place(self, place: FileRange | None, spare_bytes: int, keeps_all: bool) -> None:
        """Tells where the weight lies in a file, if it does. The memory for units has `spare_bytes` more than
        the smallest that works. `keeps_all`: it has room for all tiles."""
        weight, tile_bytes = self._unit.unit.weight, self._unit.unit.tile_bytes
        self._place = place
        row_bytes = weight.nbytes // len(weight)
        self._pieces = [] if place is None else [
            place.part(rows.start * row_bytes, (rows.stop - rows.start) * row_bytes) for rows in self._rows
        ]
        self._reads_ahead = spare_bytes >= tile_bytes
        self._keeps_all = keeps_all

    def let_go(self) -> None:
        """Lets what a step has written of the weight leave this process's memory, if there is no room for all."""
        if self._place is not None and not self._keeps_all and self._unit.unit.weight.requires_grad:
            self._place.let_go()

    @property
    def rows(self) -> int:
        """Returns how many the largest tile has."""
        return max(rows.stop - rows.start for rows in self._rows)

    @property
    def folder_of_grad(self) -> str | None:
        """Returns the directory in which the gradient is made, as large as the weight. None: in memory."""
        opened = self._streaming.opened
        return None if opened is None or self._place is None else opened.store

    def require_rows(self, weight: torch.Tensor) -> None:
        """Errors: InvalidArgument if the weight has other rows than it was cut into."""
        rows = self._rows[-1].stop
        if len(weight) != rows:
            raise InvalidArgument(
                f"parameter '{self._name}' has {len(weight)} rows, but offload() has cut it into tiles when it had "
                f"{rows}: grow a vocabulary before offload()"
            )

    def each(self, is_brought: bool = True, backward: bool = False) -> Iterator[slice]:
        """Yields the rows of each tile, which are there until the next is asked for, if `is_brought`. A backward
        begins with the tile that the forward has ended with, and the other way round."""
        order = list(range(len(self._rows)))[:: -1 if backward else 1]
        if not self._pieces or not is_brought:
            yield from (self._rows[place] for place in order)
            return
        for place, following in zip(order, [*order[1:], None], strict=True):
            piece = self._pieces[place]
            with self._streaming.waited_for_units():
                self.read_bytes += piece.read(self._name)
            if following is not None and self._reads_ahead:
                self._pieces[following].expect()
            try:
                yield self._rows[place]
            finally:
                if not self._keeps_all:
                    piece.let_go()


def compute_in_tiles(module: torch.nn.Linear, tiled: Tiled) -> None:
    """Makes forwards and backwards of `module` use a tile of its weight after the other."""
    module.__dict__[TILED] = tiled
    module.__class__ = _made(type(module))


@functools.cache
def _made(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        # torch.func's transforms have rules for PyTorch's own operations.
        if in_functional_transform():
            its: torch.Tensor = original.forward(self, input)
            return its
        device = input.device.type
        casts = torch.is_autocast_enabled(device) and input.is_floating_point() and input.dtype != torch.float64
        if casts:  # here, so that what it saves has autocast's type, and its gradient is rounded to that
            input = input.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            found: torch.Tensor = _Linear.apply(input, self.weight, self.bias, self.__dict__[TILED], casts)
        return found

    return subclass(original, {"forward": uncompiled(forward)})


class _Linear(torch.autograd.Function):
    """torch.nn.functional.linear(). The weight is cast to input's type if autocast `casts`."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiled: Tiled, casts: bool
    ) -> torch.Tensor:
        ctx.tiled, ctx.dtypes = tiled, (weight.dtype, None if bias is None else bias.dtype)
        ctx.home = weight.device  # the CPU, also where an accelerator computes
        # As PyTorch's: what is frozen needs no input, and an input without a gradient no weight.
        ctx.save_for_backward(
            input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
        )
        tiled.require_rows(weight)
        ctx.like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        output = input.new_empty(*input.shape[:-1], len(weight))
        used = input.dtype if casts else None
        own = None if bias is None else bias.to(input.device, used or bias.dtype)
        for rows in tiled.each():
            # Not into `output` itself: products into a part of a tensor may have other bits.
            output[..., rows] = linear(
                input, weight[rows].to(input.device, used or weight.dtype), None if own is None else own[rows]
            )
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum_to_size(flat.shape[1]).to(ctx.home, ctx.dtypes[1])
        if torch.is_grad_enabled():  # create_graph: a backward of this one may come
            whole = None if input is None else flat.t() @ input.reshape(-1, input.shape[-1])
            whole = None if whole is None else whole.to(ctx.home, ctx.dtypes[0])
            of_input = None if weight is None else grad @ weight.to(grad.device, grad.dtype)
            return of_input, whole, of_bias, None, None
        of_input, of_weight = _gradients(ctx, flat, input, weight)
        if of_input is not None:
            of_input = of_input.view(*grad.shape[:-1], -1)
        return of_input, of_weight, of_bias, None, None


def _gradients(
    ctx: Any, flat: torch.Tensor, input: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of the flattened input and of the weight, as far as they are needed."""
    total: torch.Tensor | None = None
    of_weight = None if input is None else empty_gradient(ctx.tiled, ctx.like)
    rows_of_input = None if input is None else input.reshape(-1, input.shape[-1])
    for rows in ctx.tiled.each(is_brought=weight is not None, backward=True):
        own = flat[:, rows]
        if of_weight is not None and rows_of_input is not None:
            of_weight[rows] = own.t() @ rows_of_input
            let_pages_go(of_weight)
        if weight is not None:
            total = _added(total, own, weight[rows].to(flat.device, flat.dtype))
    # The sum over tiles is in fp32, and rounded once.
    return None if total is None else total.to(flat.dtype), of_weight


def _added(total: torch.Tensor | None, grad: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    if total is None:
        return (grad @ tile).to(wide)
    if wide == grad.dtype:
        return total.addmm_(grad, tile)
    # Products of 16 bits are several times as fast as those of fp32, but are not summed in fp32.
    return total.add_(grad @ tile)


def empty_gradient(tiled: Tiled, like: torch.Tensor) -> torch.Tensor:
    """Returns memory for the weight's gradient, or a file if the weight lies in one. Errors: ResourceExhausted."""
    folder = tiled.folder_of_grad
    if folder is not None:
        return empty_in_file(folder, like)
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")
