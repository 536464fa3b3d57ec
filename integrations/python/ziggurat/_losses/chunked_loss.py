# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a linear layer's output that is never there as a whole.

A chunk of tokens at a time: logits, loss, and at once the gradients, so that nothing of the
vocabulary's size is kept for backward but the gradient of the weight; or, of few tokens, those of
the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._losses.logits import How, change, undo_change
from ziggurat._losses.tiled_loss import loss_in_tiles
from ziggurat._pytorch.torch_private import keeps_graph, uncompiled
from ziggurat._streaming.gathered import brought
from ziggurat._streaming.streaming import tiled_of

CHUNK_BYTES = 256 << 20  #: what a chunk may take if no size is given
_LOGIT_BYTES = 16  # what a chunk takes at most for each token and word of the vocabulary


def default_chunk(vocabulary: int) -> int:
    """Returns how many tokens are computed at a time if no size is given."""
    return max(1, CHUNK_BYTES // (_LOGIT_BYTES * vocabulary))


@uncompiled
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
    reduction: str = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Returns ``cross_entropy(linear(hidden, weight, bias).float(), labels)``, a scalar in fp32,
    without building the logits.

    ``hidden``
        (..., width), in the type of `weight`. Under autocast both are taken in autocast's type, in
        which the weight is copied.
    ``weight``, ``bias``
        (vocabulary, width) and (vocabulary,), as ``torch.nn.Linear`` has them. Those of a model
        that :func:`offload` was called for are brought.
    ``labels``
        hidden's shape without the last dimension: each token's class, or `ignore_index`. They are
        not shifted.
    ``chunk``
        How many tokens are computed at a time. They take at most 16 bytes for each token and word
        of the vocabulary. Default: as many as 256 MiB have room for. Fewer read and sum the
        weight more often.
    ``reduction``
        "mean" divides the sum by `num_items_in_batch` or, without it, by the number of labels that
        are not ignored; "sum".
    ``logit_scale``, ``softcap``
        Logits are multiplied by `logit_scale`, and then become softcap * tanh(logits / softcap)
        (Gemma 2, 2024, section 2).

    If gradients are enabled they are made here, not in backward, which multiplies them: after it a
    second one needs ``retain_graph=True``, and ``create_graph`` is Unimplemented. Until then they
    take memory: hidden's in its type, the weight's and the bias's in fp32. Of so few tokens that
    they take less (in 16 bits up to twice `width`), the gradients of all logits are kept in place of
    the weight's in 16 bits, which backward makes of them: `hidden` may not be written until then. It
    is summed over chunks, whose products have the type of the computation, and is rounded once, in
    backward: so its bits depend on `chunk`.

    A weight that :func:`offload` has cut into tiles is brought a tile at a time, in the forward and again in
    backward, which then makes the gradients; a chunk takes 16 bytes for each token and row of a tile.

    Errors: InvalidArgument for shapes, types, labels and settings that do not fit.
    """
    _check_tensors(hidden, weight, labels, bias)
    _check_settings(chunk, reduction, num_items_in_batch, softcap)
    vocabulary, width = weight.shape
    flat, targets = hidden.reshape(-1, width), labels.reshape(-1).to(hidden.device)
    counted = (targets != ignore_index).nonzero().squeeze(1)
    targets = targets[counted]
    if len(targets) and not 0 <= targets.min() <= targets.max() < vocabulary:
        raise InvalidArgument(
            f"labels from {targets.min()} to {targets.max()} do not fit a vocabulary of {vocabulary}: "
            f"give 0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        )
    divisor: Any = 1
    if reduction == "mean":
        divisor = len(targets) if num_items_in_batch is None else num_items_in_batch
    tiled = tiled_of(weight)
    how = How(
        chunk or default_chunk(vocabulary if tiled is None else tiled.rows),
        _computed_type(hidden, weight, bias),
        logit_scale,
        softcap,
        torch.is_grad_enabled(),
    )
    divisor = torch.as_tensor(divisor, dtype=how.wide, device=hidden.device)
    if tiled is not None:
        return loss_in_tiles(flat, weight, bias, counted, targets, divisor, how, tiled)
    with brought([one for one in (weight, bias) if one is not None], exact=False):
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(flat, weight, bias, counted, targets, divisor, how)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients that forward saves are those of the sum, so that in fp16 a scaler's factor comes
    before the division by the number of tokens."""

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
    ) -> torch.Tensor:
        wanted = [how.trains and needs for needs in ctx.needs_input_grad[:3]]
        keeps_logits = wanted[1] and _take_less(len(counted), weight, how)
        kept: list[torch.Tensor] = []  # the gradients of all chunks' logits
        grads = _Gradients(hidden, weight, how, [wanted[0], wanted[1] and not keeps_logits, wanted[2]])
        losses = torch.empty(len(counted), dtype=how.wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            weight_used = weight.to(how.dtype)
            bias_used = None if bias is None else bias.to(how.dtype)
            parts = (one.split(how.chunk) for one in (counted, targets, losses))
            buffer: torch.Tensor | None = None
            for rows, labels, of_rows in zip(*parts, strict=True):
                hidden_used = hidden[rows].to(how.dtype)
                narrow = linear(hidden_used, weight_used, bias_used)
                logits = narrow
                if how.wide != how.dtype:
                    # The same memory for all: what is new is slow at its first use.
                    buffer = torch.empty_like(narrow, dtype=how.wide) if buffer is None else buffer
                    logits = buffer[: len(rows)].copy_(narrow)
                of_rows.copy_(_into_gradient(logits, labels, how, any(wanted)))
                if any(wanted):
                    grads.add_bias(logits)
                    grads.add(rows, hidden_used, weight_used, narrow.copy_(logits))
                if keeps_logits:
                    kept.append(narrow)
                del narrow, logits  # or they would be there beside the next
        if any(wanted):
            ctx.how, ctx.vocabulary = how, len(weight)
            ctx.save_for_backward(divisor, *grads.made(), *((hidden, counted, *kept) if keeps_logits else ()))
            ctx.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise Unimplemented(
                "chunked_cross_entropy() has made its gradients in the forward, and they have none "
                "themselves: call backward() without create_graph, or use "
                "torch.nn.functional.cross_entropy()"
            )
        divisor, *made = ctx.saved_tensors
        made, of_logits = made[:3], made[3:]
        # Without a token there is no gradient, as in PyTorch.
        factor = grad / torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        once = not keeps_graph()
        scaled = [
            None if one is None else _scaled(one, factor, dtype, once)
            for one, dtype in zip(made, ctx.dtypes, strict=True)
        ]
        if of_logits:
            made_of = ctx.vocabulary, ctx.dtypes[1], ctx.how, factor
            scaled[1] = _weight_gradient(*made_of, *of_logits)
        return (*scaled, None, None, None, None)


def _into_gradient(logits: torch.Tensor, labels: torch.Tensor, how: How, trains: bool) -> torch.Tensor:
    """Returns the losses of a chunk. Makes their gradients of the logits if it `trains`."""
    slope = change(logits, how, trains)
    at_labels = labels.unsqueeze(1)
    logits.sub_(logits.amax(1, keepdim=True))
    of_labels = logits.gather(1, at_labels)
    sums = logits.exp_().sum(1, keepdim=True)
    losses = (sums.log() - of_labels).squeeze(1)
    if trains:
        logits.div_(sums)
        logits.scatter_add_(1, at_labels, torch.full_like(of_labels, -1))
        undo_change(logits, how, slope)
    return losses


_IN_CACHE_BYTES = 2 << 20


class _Gradients:
    """Those of hidden, weight and bias that are `wanted`, as the chunks so far have made them."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, how: How, wanted: list[bool]) -> None:
        self._hidden = torch.zeros_like(hidden) if wanted[0] else None
        self._weight = weight.new_zeros(weight.shape, dtype=how.wide) if wanted[1] else None
        self._bias = weight.new_zeros(len(weight), dtype=how.wide) if wanted[2] else None

    def add_bias(self, of_logits: torch.Tensor) -> None:
        """Adds what the gradients of a chunk's logits make of the bias: their sums, in fp32."""
        if self._bias is not None:
            self._bias += of_logits.sum(0)

    def add(
        self, rows: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, of_logits: torch.Tensor
    ) -> None:
        """Adds the products of the gradients of a chunk's logits, which have the products' type."""
        if self._hidden is not None:
            self._hidden[rows] = (of_logits @ weight).to(self._hidden.dtype)
        if self._weight is None:
            return
        if self._weight.dtype == of_logits.dtype:
            self._weight.addmm_(of_logits.t(), hidden)
            return
        # Products of 16 bits are several times as fast as those of fp32, but are not summed in fp32.
        count = _words_at_a_time(of_logits.numel(), hidden)
        for part, of_part in zip(self._weight.split(count), of_logits.split(count, dim=1), strict=True):
            part += of_part.t() @ hidden

    def made(self) -> tuple[torch.Tensor | None, ...]:
        return self._hidden, self._weight, self._bias


def _words_at_a_time(most: int, hidden: torch.Tensor) -> int:
    """Returns of how many words the products have room in `most` elements, the chunk's, or in a
    processor's cache."""
    if hidden.device.type == "cpu":
        most = min(most, _IN_CACHE_BYTES // hidden.itemsize)
    return max(1, most // hidden.shape[1])


def _take_less(tokens: int, weight: torch.Tensor, how: How) -> bool:
    """Returns whether the gradients of all logits take less than a sum that has to be rounded to the
    weight's gradient."""
    if weight.dtype == how.wide:  # the sum is the gradient
        return False
    return tokens * how.dtype.itemsize < weight.shape[1] * how.wide.itemsize


def _weight_gradient(
    vocabulary: int,
    dtype: torch.dtype,
    how: How,
    factor: torch.Tensor,
    hidden: torch.Tensor,
    counted: torch.Tensor,
    *chunks: torch.Tensor,
) -> torch.Tensor:
    """Returns what _Gradients and _scaled() make of the gradients of all `chunks` of logits."""
    used = [hidden[rows].to(how.dtype) for rows in counted.split(how.chunk)]
    made = torch.empty(vocabulary, hidden.shape[1], dtype=dtype, device=hidden.device)
    count = _words_at_a_time(made.numel(), hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        for begin, part in zip(range(0, len(made), count), made.split(count), strict=True):
            total = torch.zeros_like(part, dtype=how.wide)
            for of_logits, of_hidden in zip(chunks, used, strict=True):
                total += of_logits[:, begin : begin + count].t() @ of_hidden
            part.copy_(total.mul_(factor))
    return made


_SCALED_BYTES = 16 << 20


def _scaled(made: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, once: bool) -> torch.Tensor:
    """Returns `made` times `factor` in type `dtype`, in its own memory if that is used but `once`."""
    if made.dtype == dtype:
        return made.mul_(factor) if once else made * factor
    scaled = torch.empty_like(made, dtype=dtype)
    count = max(1, _SCALED_BYTES * len(made) // made.nbytes)
    for part, of_part in zip(scaled.split(count), made.split(count), strict=True):
        part.copy_(of_part * factor)
    return scaled


def _computed_type(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != hidden.dtype:
            raise InvalidArgument(
                f"chunked_cross_entropy(): hidden is {hidden.dtype} and {name} {other.dtype}: give "
                "both in one type, or call it under torch.autocast()"
            )
    return hidden.dtype


def _check_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    fits = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1:] == weight.shape[1:]
    if not fits or not weight.numel() or hidden.shape[:-1] != labels.shape:
        raise InvalidArgument(
            f"chunked_cross_entropy(): {shapes} do not fit: give (..., width), (vocabulary, width) and "
            "one label for each row of hidden"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidArgument(
            f"chunked_cross_entropy(): bias {tuple(bias.shape)} does not fit {shapes}: give one "
            "element for each row of weight"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise InvalidArgument(
            f"chunked_cross_entropy(): hidden is {hidden.dtype} and weight {weight.dtype}: give "
            "tensors of floating point"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise InvalidArgument(
            f"chunked_cross_entropy(): labels are {labels.dtype}: give whole numbers, torch.int64"
        )


def _check_settings(
    chunk: int | None, reduction: str, num_items_in_batch: Any, softcap: float | None
) -> None:
    if chunk is not None and chunk < 1:
        raise InvalidArgument(f"chunk={chunk}: give the number of tokens, 1 or more")
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f'reduction="{reduction}": give "mean" or "sum"')
    if reduction == "sum" and num_items_in_batch is not None:
        raise InvalidArgument(
            'num_items_in_batch is what a mean is divided by: leave it out with reduction="sum"'
        )
    if softcap is not None and softcap <= 0:
        raise InvalidArgument(f"softcap={softcap}: give more than 0, or None for no limit")
