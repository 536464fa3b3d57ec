# SPDX-License-Identifier: Apache-2.0
"""Finds what has taken the address of a parameter's memory, as a NumPy array or DLPack does. When the memory
goes, nothing refuses their reads, as a guard does those of PyTorch's tensors.

Either keeps a tensor that has the parameter's storage. A NumPy array leaves a mark on the memory, and
nothing that Python sees has its tensor. What has DLPack's is in C++, as no tensor of a script's is, but for
those that a graph of autograd has saved. Neither is given a tensor that requires a gradient.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat._pytorch import storages
from ziggurat._pytorch.torch_private import as_plain_tensors, has_storage, next_number, number_of, uses_of_tensor

if TYPE_CHECKING:
    from ziggurat._streaming.pins import Held

_ALONE = 2  #: users of a storage whose parameter is its only tensor
_ADVICE = "take a copy, as p.detach().clone().numpy() does"


class Counts:
    """How many tensors there were with the memory of parameters when a block began."""

    def __init__(self, all_held: Iterable[Held]) -> None:
        self._then = [(held, storages.users(held.storage)) for held in all_held]
        self._first_node = next_number()

    def require_no_others(self) -> None:
        """Errors: InvalidArgument if a library has got memory by DLPack since, and still has it, and that can
        be told."""
        more = {held: storages.users(held.storage) - then for held, then in self._then}
        risen = [held for held, count in more.items() if count > 0]
        if not risen:
            return
        found = _tensors_of(risen, gc.get_objects(generation=0))  # most likely all were made just now
        if sum(map(len, found.values())) < sum(more[held] for held in risen):
            found = _tensors_of(risen, gc.get_objects())
        for held, tensors in found.items():
            if any(_has_others(one, tensors) for one in tensors):
                if _has_graph(self._first_node):
                    return
                raise _refusal(held)


def require_no_arrays(all_held: Iterable[Held]) -> None:
    """Errors: InvalidArgument if a NumPy array still has the memory of one of these, of which some were
    made."""
    shared = [held for held in all_held if storages.users(held.storage) > _ALONE]
    for held, tensors in (_tensors_of(shared, gc.get_objects()) if shared else {}).items():
        if _alone(tensors):
            raise _refusal(held)


def require_own(all_held: Iterable[Held]) -> None:
    """Checks parameters whose memory goes to the engine. Where nobody knows whether an array has it, it stays.
    Errors: InvalidArgument if one has."""
    has_graph = functools.cache(_has_graph)
    for held, tensors in _tensors_of(all_held, gc.get_objects()).items():
        storage = held.param.untyped_storage()
        may_have = not storage.resizable() and bool(_alone(tensors))
        has = may_have and storages.has_allocator(storage)  # else PyTorch has not made the memory
        if any(_has_others(one, tensors) for one in tensors):
            may_have, has = True, has or not has_graph()
        if has:
            raise InvalidArgument(
                f"a NumPy array, another library or a graph of autograd has the memory of parameter '{held.name}', "
                f"which goes to the engine now: let go of it before the first forward that trains, or {_ADVICE}"
            )
        held.keeps_memory = may_have


def _refusal(held: Held) -> InvalidArgument:
    return InvalidArgument(
        f"a NumPy array, another library or a graph of autograd has kept the memory of parameter '{held.name}' "
        f"beyond the use of unit '{held.unit.name}', and would read there what comes next: {_ADVICE}"
    )


def _tensors_of(all_held: Iterable[Held], objects: list[Any]) -> dict[Held, list[torch.Tensor]]:
    """Returns the tensors beside each parameter that have its storage, as far as Python has them."""
    held_of = {storages.identity(held.param): held for held in all_held}
    found: dict[Held, list[torch.Tensor]] = {}
    for one in objects:
        if type(one) is torch.Tensor and has_storage(one):
            held = held_of.get(storages.identity(one))
            if held is not None:
                found.setdefault(held, []).append(one)
    return found


def _has_others(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Returns whether C++ has the tensor, for something else than a view or what requires a gradient."""
    if tensor.requires_grad or uses_of_tensor(tensor) <= 1 + sum(one._base is tensor for one in tensors):
        return False
    return uses_of_tensor(tensor) > 1 + _known_uses(tensor)


def _known_uses(tensor: torch.Tensor) -> int:
    """Returns how many tensors, also of subclasses, are its views or have it as their gradient."""
    with as_plain_tensors():
        every = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        # PyTorch warns where somebody asks for the gradient of what has none.
        graded = (one for one in every if one.is_leaf or one.retains_grad)
        return sum(one._base is tensor for one in every) + sum(one._grad is tensor for one in graded)


def _has_graph(since: int = 0) -> bool:
    """Returns whether there may be a graph of nodes from the number `since` on: what it has saved looks like DLPack's."""
    with as_plain_tensors():
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.requires_grad]
        try:
            return any(not one.is_leaf and number_of(one.grad_fn) >= since for one in tensors)
        except RuntimeError:  # a view says that its base was written meanwhile
            return True


def _alone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those that neither C++ has, nor a container or object in Python. An array has its own unseen, and
    so has a function's variable."""
    # A generator here would have the tensor.
    return [
        tensor
        for tensor in tensors
        if not tensor.requires_grad
        and uses_of_tensor(tensor) == 1
        and all(one is tensors or isinstance(one, types.FrameType) for one in gc.get_referrers(tensor))
    ]
