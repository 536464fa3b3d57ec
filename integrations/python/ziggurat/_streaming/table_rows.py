# SPDX-License-Identifier: Apache-2.0
"""Puts the table of an embedding, of which forwards read rows, into a file, and its gradient too.

PyTorch's backward makes a gradient as large as the table, which is zero but for the batch's rows. Here it
is made for the rows alone, in PyTorch's order of additions, and written into a new file, which is zero
everywhere else and takes no memory there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ziggurat._memory.file_memory import empty_in_file, is_in_file, is_large, let_pages_go, move_to_file
from ziggurat._memory.frozen_files import FileRange
from ziggurat._pytorch.subclass import FOLDER_OF_GRAD, subclass
from ziggurat._pytorch.torch_private import in_functional_transform, uncompiled

if TYPE_CHECKING:
    from ziggurat._streaming.pins import Held, PinnedUnit
    from ziggurat._streaming.streaming import Streaming

_aten = torch.ops.aten


def placed_table(
    table: torch.Tensor, own_files: Mapping[torch.Tensor, FileRange], folder: str | None
) -> FileRange | None:
    """Returns where a table lies in a file: its own, or one without a name in `folder`, to which it is
    moved. None if it stays in memory. Errors: ResourceExhausted."""
    if table in own_files:
        return own_files[table]
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        move_to_file(table, folder)
    return FileRange(table, private=False) if is_in_file(table) else None


class TablesCopied(TorchFunctionMode):
    """Lets detach() of tables do what it does with parameters that are away: a step writes them in place."""

    def __init__(self, tables: Mapping[torch.Tensor, Held], streaming: Streaming) -> None:
        super().__init__()
        self._tables, self._streaming = tables, streaming

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.detach and args[0] in self._tables:
            return self._streaming.used(func, "detach", self._tables[args[0]], args, kwargs)
        return func(*args, **(kwargs or {}))


def grad_in_file(module: torch.nn.Embedding, streaming: Streaming, unit: PinnedUnit) -> None:
    """Makes backwards of `module` put its gradient into a file while its table, which is all that `unit`
    has, lies in one."""

    def folder() -> str | None:
        opened = streaming.opened
        return None if opened is None or unit.index not in streaming.tables else opened.store

    module.__dict__[FOLDER_OF_GRAD] = folder
    module.__class__ = _made(type(module))


@functools.cache
def _made(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        folder = self.__dict__[FOLDER_OF_GRAD]()
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        other = self.max_norm is not None or self.sparse  # set after offload()
        # torch.func's transforms have rules for PyTorch's own operations.
        if folder is None or not trains or other or in_functional_transform():
            its: torch.Tensor = original.forward(self, input)
            return its
        found: torch.Tensor = _Rows.apply(
            self.weight, input, self.padding_idx, self.scale_grad_by_freq, folder
        )
        return found

    return subclass(original, {"forward": uncompiled(forward)})


class _Rows(torch.autograd.Function):
    """torch.nn.functional.embedding()."""

    @staticmethod
    def forward(
        weight: torch.Tensor, indices: torch.Tensor, padding: int | None, by_freq: bool, folder: str
    ) -> torch.Tensor:
        return torch.nn.functional.embedding(
            indices, weight, padding_idx=padding, scale_grad_by_freq=by_freq
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, indices, padding, ctx.by_freq, ctx.folder = inputs
        ctx.save_for_backward(indices)
        ctx.padding = -1 if padding is None else padding
        ctx.like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (indices,) = ctx.saved_tensors
        made = _aten.embedding_dense_backward
        if torch.is_grad_enabled():  # create_graph: a backward of this one may come
            dense = made(grad, indices, ctx.like.shape[0], ctx.padding, ctx.by_freq)
            return dense, None, None, None, None
        rows, places = indices.unique(return_inverse=True)
        padding = (rows == ctx.padding).nonzero().flatten().tolist()
        its = made(grad, places, len(rows), padding[0] if padding else -1, ctx.by_freq)
        if is_large(ctx.like):
            dense = empty_in_file(ctx.folder, ctx.like)
        else:
            dense = torch.zeros_like(ctx.like, device="cpu")
        dense.index_copy_(0, rows.long(), its)
        let_pages_go(dense)
        return dense, None, None, None, None
