# SPDX-License-Identifier: Apache-2.0
"""Records what a forward and a backward take from PyTorch's allocators, moment by moment: of a small batch as it is
computed, or of a model's shapes on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ziggurat._plan.unchanged import unchanged
from ziggurat._pytorch.torch_private import address_of, has_storage, mark, recorded_allocations

FORWARD, BACKWARD = 0, 1
_BEGIN, _BACKWARD, _END, _GRAD = "begin", "backward", "end", "grad "


class Moment(NamedTuple):
    """What is held at a moment, beyond what was there before the step."""

    held: float
    grads: float  #: of it, whole gradients of parameters
    phase: int


@dataclass(frozen=True)
class Step:
    """A recorded step of so many rows."""

    rows: int
    moments: list[Moment]
    saved: float  #: bytes that a forward keeps for backward, without parameters, buffers and the batch
    output: float  #: what the forward returns with the loss, logits for the most part


Runs = Callable[[Any], tuple[torch.Tensor, Any]]  # from a batch to the loss and the output


def recorded(model: torch.nn.Module, run: Runs, batch: Any, rows: int) -> Step:
    """Records a step. `batch` has so many rows, and is on the model's device."""
    if any(param.is_meta for param in model.parameters()):
        return _of_shapes(model, run, batch, rows)
    found: list[tuple[str, int]] = []
    # Copies of buffers are recorded too: the allocator knows the sizes of what it has given while it is recorded.
    with recorded_allocations(found), unchanged(model, tensors(batch), _stand, _copied) as stands:
        saved = _Saved([*stands.values(), *model.buffers(), *tensors(batch)])
        for stand in stands.values():
            if stand.requires_grad:
                stand.register_post_accumulate_grad_hook(_mark_grad)
        with torch.enable_grad():
            mark(_BEGIN)
            output_bytes = _step(run, batch, saved, lambda: mark(_BACKWARD))
            mark(_END)
    return Step(rows, _moments(found), saved.bytes, output_bytes)


def _moments(found: list[tuple[str, int]]) -> list[Moment]:
    names = [name for name, _ in found]
    moments, held, grads, phase = [Moment(0, 0, FORWARD)], 0, 0, FORWARD
    for name, size_bytes in found[names.index(_BEGIN) + 1 : names.index(_END)]:
        if name == _BACKWARD:
            phase = BACKWARD
        elif name:
            grads += int(name[len(_GRAD) :])
        held += size_bytes
        moments.append(Moment(held, grads, phase))
    return moments


def on_meta(model: torch.nn.Module, run: Runs, batch: Any, rows: int) -> Step:
    """Records the step by shapes, of a model that is elsewhere. The batch is on the meta device."""
    return _of_shapes(model, run, batch, rows)


def _of_shapes(model: torch.nn.Module, run: Runs, batch: Any, rows: int) -> Step:
    counted = Counted()
    with unchanged(model, tensors(batch), _shape, lambda one: one.detach().to("meta")) as stands:
        saved = _Saved([*stands.values(), *model.buffers(), *tensors(batch)])
        for stand in stands.values():
            if stand.requires_grad:
                stand.register_post_accumulate_grad_hook(lambda one: counted.add_grad(grad_bytes(one)))
        with torch.enable_grad(), counted:
            output_bytes = _step(run, batch, saved, counted.begin_backward)
            counted.look()
    return Step(rows, counted.moments, saved.bytes, output_bytes)


def _step(run: Runs, batch: Any, saved: _Saved, begin_backward: Callable[[], None]) -> int:
    """Makes the step, in which nothing but the loss stays of a forward. Returns the bytes of its output."""
    with saved:
        loss, output = run(batch)
    output_bytes = sum(bytes_of_storages(tensors(output)).values())
    del output
    begin_backward()
    loss.backward()
    return output_bytes


def _stand(param: torch.Tensor) -> torch.Tensor:
    made = torch.nn.Parameter(param.data, param.requires_grad)  # with a version of its own
    vars(made).update(vars(param))
    return made


def _shape(param: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().clone()


def _mark_grad(param: torch.Tensor) -> None:
    mark(f"{_GRAD}{grad_bytes(param)}")


def grad_bytes(param: torch.Tensor) -> int:
    grad = param.grad
    if grad is None:
        return 0
    parts = [grad._indices(), grad._values()] if grad.is_sparse else [grad]
    return sum(part.nbytes for part in parts)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(plain(tree)) if isinstance(leaf, torch.Tensor))


def plain(tree: Any) -> Any:
    """Returns a batch or output of a library's own class, as Hugging Face's are, as what it has."""
    return dict(tree) if hasattr(tree, "items") else tree


def bytes_of_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    found = {}
    for one in tensors:
        if has_storage(one):
            storage = one.untyped_storage()
            found[address_of(storage)] = storage.nbytes()
    return found


class _Saved:
    """Counts in its block what a forward saves for backward, each storage once."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._bytes = 0
        self._seen: dict[int, StorageWeakRef] = {}  # keep addresses from being used again
        self._add(known)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one)

    def __enter__(self) -> None:
        self.bytes = -self._bytes
        self._hooks.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        self.bytes += self._bytes

    def _pack(self, one: torch.Tensor) -> torch.Tensor:
        self._add([one])
        return one

    def _add(self, found: Iterable[torch.Tensor]) -> None:
        for one in filter(has_storage, found):
            storage = one.untyped_storage()
            if address_of(storage) not in self._seen:
                self._seen[address_of(storage)] = StorageWeakRef(storage)
                self._bytes += storage.nbytes()


class Counted(TorchDispatchMode):
    """Counts the storages that operations in its block make, from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = [Moment(0, 0, FORWARD)]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = 0
        self._grads = 0
        self._phase = FORWARD

    def begin_backward(self) -> None:
        self._phase = BACKWARD

    def add_grad(self, size_bytes: int) -> None:
        self._grads += size_bytes

    def look(self) -> None:
        """Notes what is held now."""
        for address in [address for address, (weak, _) in self._live.items() if weak.expired()]:
            self._held -= self._live.pop(address)[1]
        self.moments.append(Moment(self._held, self._grads, self._phase))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()  # shapes have no values: all are 0
        made = func(*args, **(kwargs or {}))
        before = {address_of(one.untyped_storage()) for one in tree_iter((args, kwargs)) if _counts(one)}
        self.look()
        for one in tree_iter(made):
            if _counts(one):
                storage = one.untyped_storage()
                address = address_of(storage)
                if address not in before and address not in self._live:
                    self._live[address] = (StorageWeakRef(storage), storage.nbytes())
                    self._held += storage.nbytes()
        self.moments.append(Moment(self._held, self._grads, self._phase))
        return made


def _counts(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and has_storage(one)


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    with Counted() as counted:
        yield counted
