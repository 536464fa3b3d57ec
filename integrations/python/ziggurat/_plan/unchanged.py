# SPDX-License-Identifier: Apache-2.0
"""Lets a step of a model be tried that leaves the model, its gradients and all random numbers as they were."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ziggurat._pytorch.torch_private import address_of, has_storage

_PIECE_BYTES = 64 << 20  # that are compared at once, which a GPU has room for
_TABLES = tuple(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set)))

Stand = Callable[[torch.Tensor], torch.Tensor]  # makes what computes in a parameter's or buffer's place


@contextlib.contextmanager
def unchanged(
    model: torch.nn.Module, batch: Iterable[torch.Tensor], param: Stand, buffer: Stand
) -> Iterator[dict[torch.nn.Parameter, torch.Tensor]]:
    """Computes in the block with stand-ins of parameters and buffers, which `param` and `buffer` make, one for each
    however many modules share it. Yields those of parameters. All attributes of modules have their values again
    afterwards, and tensors of the batch their gradients; what a forward changes inside of a list or dictionary that is
    not PyTorch's own, it has changed."""
    modules = list(dict.fromkeys(model.modules()))
    attributes = [dict(vars(module)) for module in modules]
    tables = [_tables_of(module) for module in modules]
    own_grads = [(one, one.grad) for one in (*model.parameters(), *batch) if one.is_leaf]
    with _same_draws(modules):
        try:
            stands = _swap(modules, param, buffer)
            for one, _ in own_grads:
                one.grad = None  # a forward that has hidden a parameter would add to it
            yield stands
        finally:
            for module, its, tabled in zip(modules, attributes, tables, strict=True):
                vars(module).clear()
                vars(module).update(its)
                for name, entries in tabled.items():
                    table = vars(module)[name]
                    table.clear()
                    table.update(entries)
            for one, grad in own_grads:
                one.grad = grad


@contextlib.contextmanager
def kept(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gives parameters their values again that the block has written over. Their copies are in host memory."""
    storages = {address_of(one.untyped_storage()): one.untyped_storage() for one in params if has_storage(one)}
    found = [_as_bytes(storage) for storage in storages.values() if storage.device.type != "meta"]
    originals = [one.to("cpu", copy=True) for one in found]
    try:
        yield
    finally:
        for one, original in zip(found, originals, strict=True):
            # What is as it was is not written, since it may be a file's.
            for piece, own in zip(one.split(_PIECE_BYTES), original.split(_PIECE_BYTES), strict=True):
                there = own.to(one.device)
                if not torch.equal(piece, there):
                    piece.copy_(there)


def _tables_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns copies of what a module has in PyTorch's dictionaries and sets, as parameters and hooks."""
    return {name: copy.copy(vars(module)[name]) for name in _TABLES if name in vars(module)}


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage)  # type: ignore[call-overload, no-any-return]


def _swap(modules: list[torch.nn.Module], param: Stand, buffer: Stand) -> dict[torch.nn.Parameter, torch.Tensor]:
    params: dict[torch.nn.Parameter, torch.Tensor] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for table, stands, make in ((module._parameters, params, param), (module._buffers, buffers, buffer)):
            for name, one in table.items():
                if one is not None:
                    if one not in stands:  # type: ignore[operator]
                        stands[one] = make(one)  # type: ignore[index]
                    table[name] = stands[one]  # type: ignore[index, assignment]
        if isinstance(module, torch.nn.RNNBase):  # has its parameters in a list too
            names = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]
    return params


@contextlib.contextmanager
def _same_draws(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Gives all generators of random numbers their states again, those that modules have of their own too."""
    params = [one for module in modules for one in module._parameters.values() if one is not None]
    gpus = sorted({one.device.index for one in params if one.device.type == "cuda"})
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    shared: Any = random  # the module itself has the calls of a random.Random
    own = [value for module in modules for value in vars(module).values()]
    of_python = [(one, one.getstate()) for one in (shared, *own) if one is random or isinstance(one, random.Random)]
    of_torch = [(one, one.get_state()) for one in own if isinstance(one, torch.Generator)]
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for generator, state in of_python:
            generator.setstate(state)
        for generator, state in of_torch:
            generator.set_state(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
