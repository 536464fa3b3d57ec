# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a linear layer whose weight is there a tile at a time (_streaming/tiled_linear.py).

A forward goes through the tiles once and sums each token's softmax as it goes (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). A backward goes through them again, and makes each tile's
logits anew, with the gradients. Were the chunks of tokens outside, each of them would read all tiles twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear

from ziggurat._library.native import Unimplemented
from ziggurat._losses.logits import How, change, undo_change
from ziggurat._memory.file_memory import let_pages_go
from ziggurat._streaming.tiled_linear import Tiled, empty_gradient


def loss_in_tiles(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counted: torch.Tensor,
    targets: torch.Tensor,
    divisor: torch.Tensor,
    how: How,
    tiled: Tiled,
) -> torch.Tensor:
    """Returns the loss of the rows `counted` of `hidden`, whose words are `targets`."""
    loss: torch.Tensor = _TiledCrossEntropy.apply(hidden, weight, bias, counted, targets, divisor, how, tiled)
    return loss


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counted: torch.Tensor,
        targets: torch.Tensor,
        divisor: torch.Tensor,
        how: How,
        tiled: Tiled,
    ) -> torch.Tensor:
        tiled.require_rows(weight)
        largest, sums, of_labels = (torch.zeros(len(counted), dtype=how.wide, device=hidden.device) for _ in range(3))
        largest.fill_(-torch.inf)
        for rows in tiled.each():
            tile = _Tile(weight, bias, rows, how, hidden.device)
            for part in _parts(len(counted), how):
                logits, _ = tile.logits(hidden[counted[part]], trains=False)
                inside, at = tile.labels(targets[part])
                of_labels[part][inside] = logits[inside, at]
                top = torch.maximum(largest[part], logits.amax(1))
                # Where all logits so far are -inf, as of words that a bias bans, the sum stays 0.
                zero = top.masked_fill(top == -torch.inf, 0)
                sums[part] *= (largest[part] - zero).exp_()
                sums[part] += logits.sub_(zero.unsqueeze(1)).exp_().sum(1)
                largest[part] = top
                del logits  # or it would be there beside the next
        total = sums.log_().add_(largest)
        ctx.how, ctx.tiled = how, tiled
        ctx.save_for_backward(hidden, weight, bias, counted, targets, divisor, total)
        return (total - of_labels).sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise Unimplemented(
                "chunked_cross_entropy() of a weight in tiles has gradients that have none themselves: call "
                "backward() without create_graph, or use torch.nn.functional.cross_entropy()"
            )
        hidden, weight, bias, counted, targets, divisor, total = ctx.saved_tensors
        how, tiled, wanted = ctx.how, ctx.tiled, ctx.needs_input_grad
        # Without a token there is no gradient, as in PyTorch.
        factor = grad / torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        where = {"dtype": how.wide, "device": hidden.device}
        of_hidden = torch.zeros(len(counted), weight.shape[1], **where) if wanted[0] else None
        of_weight = empty_gradient(tiled, weight) if wanted[1] else None
        of_bias = torch.zeros(len(weight), **where) if wanted[2] else None
        for rows in tiled.each(backward=True):
            tile = _Tile(weight, bias, rows, how, hidden.device)
            of_tile = torch.zeros(tile.weight.shape, **where) if wanted[1] else None
            for part in _parts(len(counted), how):
                used = hidden[counted[part]].to(how.dtype)
                found = tile.of_logits(used, targets[part], total[part])
                if of_bias is not None:
                    of_bias[rows] += found.sum(0)
                narrow = found.to(how.dtype)
                del found
                if of_hidden is not None:
                    of_hidden[part] += narrow @ tile.weight
                if of_tile is not None:
                    of_tile += narrow.t() @ used
            if of_weight is not None and of_tile is not None:
                of_weight[rows] = of_tile.mul_(factor)
                let_pages_go(of_weight)
        made = None
        if of_hidden is not None:
            made = torch.zeros_like(hidden)
            made[counted] = of_hidden.mul_(factor).to(hidden.dtype)
        scaled = None if of_bias is None else of_bias.mul_(factor).to(bias.device, bias.dtype)
        return made, of_weight, scaled, None, None, None, None, None


def _parts(tokens: int, how: How) -> Iterator[slice]:
    """Yields the chunks of tokens."""
    for begin in range(0, tokens, how.chunk):
        yield slice(begin, min(begin + how.chunk, tokens))


class _Tile:
    """Some rows of the weight, in the products' type and where they are computed."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rows: slice, how: How, device: torch.device
    ) -> None:
        self.weight, self._how = weight[rows].to(device, how.dtype), how
        self._bias = None if bias is None else bias[rows].to(device, how.dtype)
        self._rows = rows

    def logits(self, hidden: torch.Tensor, trains: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the logits of some tokens for the tile's words, and what change() returns."""
        with torch.autocast(self.weight.device.type, enabled=False):
            logits = linear(hidden.to(self._how.dtype), self.weight, self._bias).to(self._how.wide)
        return logits, change(logits, self._how, trains)

    def labels(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which of the tokens have their word in the tile, and at which places."""
        inside = ((targets >= self._rows.start) & (targets < self._rows.stop)).nonzero().squeeze(1)
        return inside, targets[inside] - self._rows.start

    def of_logits(self, hidden: torch.Tensor, targets: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of the sum of the losses for what linear() has made, where `total` are the
        logarithms of the tokens' sums over all words."""
        found, slope = self.logits(hidden, trains=True)
        found.sub_(total.unsqueeze(1)).exp_()
        inside, at = self.labels(targets)
        found[inside, at] -= 1
        undo_change(found, self._how, slope)
        return found
