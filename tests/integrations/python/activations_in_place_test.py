# SPDX-License-Identifier: Apache-2.0
"""offload(activations=): what backward needs stays where PyTorch has it while there is room, and behaves as PyTorch's own.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import functools
import gc
import sys
import weakref

try:
    import pytest
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from ziggurat._activations.activations import IN_PLACE, Activations
from ziggurat._activations.saved import InMemory, saving
from ziggurat._activations.stash import Stash

COUNT = 100_000
WHOLE = 4 * COUNT


class Saving(torch.autograd.Function):
    """Whose backward notes where it finds what it has saved."""

    found = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        Saving.found.append((x.data_ptr(), x[0].item()))
        return grad


class Given(torch.autograd.Function):
    """Whose backward gives `p` what it has saved as its gradient."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x)
        return (x * p).sum()

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0]


@pytest.fixture(autouse=True)
def nothing_found():
    Saving.found.clear()


def with_room_for(folder, wholes):
    """Returns activations that have room for so many tensors, 3 or more, where PyTorch has them."""
    return Activations(lambda: functools.partial(Stash, str(folder)), int((wholes * WHOLE + 50_000) / IN_PLACE), set)


def chained(kept, depth):
    """Returns the end of a chain, and where each of its tensors was."""
    weight, places = torch.ones((), requires_grad=True), []
    with kept.kept():
        y = torch.zeros(COUNT)
        for _ in range(depth):
            y = y + weight
            places.append(y.data_ptr())
            y = Saving.apply(y)
    return y.sum(), places


def test_backward_finds_all_in_place_where_there_is_room(tmp_path):
    kept = with_room_for(tmp_path, 6)
    end, places = chained(kept, 6)
    end.backward()
    assert Saving.found == [(place, float(number)) for number, place in reversed(list(enumerate(places, 1)))]
    figures = kept.figures()
    assert figures["put_bytes"] == 6 * WHOLE and figures["memory_peak_bytes"] == figures["written_bytes"] == 0


def test_the_oldest_leave_first(tmp_path):
    kept = with_room_for(tmp_path, 3)
    end, places = chained(kept, 8)
    end.backward()
    assert [value for _, value in Saving.found] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [place for place, _ in Saving.found[:3]] == places[:4:-1]
    assert kept.figures()["memory_peak_bytes"] > 0


def test_what_leaves_gives_pytorchs_memory_back(tmp_path):
    kept, weight = with_room_for(tmp_path, 3), torch.ones((), requires_grad=True)
    storages = []
    with kept.kept():
        y = torch.zeros(COUNT)
        for _ in range(6):
            y = y + weight
            storages.append(StorageWeakRef(y.untyped_storage()))
            y = Saving.apply(y)
        end, y = y.sum(), None
    assert [storage.expired() for storage in storages] == [True] * 3 + [False] * 3
    assert [kept._held._size_bytes, len(kept._held._watches)] == [3 * WHOLE, 3]
    end.backward()


def test_a_graph_that_is_dropped_makes_room_at_once(tmp_path):
    kept = with_room_for(tmp_path, 3)
    for _ in range(20):
        chained(kept, 3)
    figures = kept.figures()
    assert figures["put_bytes"] == 20 * 3 * WHOLE and figures["memory_peak_bytes"] == 0


@pytest.mark.parametrize("count", [COUNT, 100])  # kept, and too small for that
def test_a_write_after_the_save_is_an_error_as_without(tmp_path, count):
    kept, weight = with_room_for(tmp_path, 6), torch.ones(count, requires_grad=True)
    with kept.kept():
        y = weight * 2
        z = y.sin()  # saves y
        with torch.no_grad():
            y.mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        z.sum().backward()


def test_what_was_written_since_is_not_moved(tmp_path):
    kept, weight = with_room_for(tmp_path, 3), torch.ones(COUNT, requires_grad=True)
    with kept.kept():
        y = weight * 2
        unused = y.sin()
        with torch.no_grad():
            y.mul_(3)
        z = y.cos()  # saves what y is now
        for _ in range(6):
            z = Saving.apply(z)
    z.sum().backward()
    assert torch.equal(weight.grad, -2 * torch.full((COUNT,), 6.0).sin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unused.sum().backward()


@pytest.mark.parametrize("count", [COUNT, 100])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("is_of_others", [False, True])
def test_a_gradient_is_never_memory_that_somebody_else_has(tmp_path, count, is_trained, is_of_others):
    kept = with_room_for(tmp_path, 6)
    weight, p = torch.ones(count, requires_grad=is_trained), torch.nn.Parameter(torch.ones(count))
    with kept.kept():
        x = torch.arange(count) * weight
        y = Given.apply(x, p)
        z = Given.apply(x, p)
    if not is_of_others:
        x = None
    for times in (1, 2, 3):
        y.backward(retain_graph=True)
        assert torch.equal(p.grad, times * torch.arange(count).float())
    z.backward()
    assert torch.equal(p.grad, 4 * torch.arange(count).float())
    assert x is None or torch.equal(x, torch.arange(count).float())


class OfComplex(torch.autograd.Function):
    """Whose backward computes with what it has saved."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x)
        return (x * p).real.sum()

    @staticmethod
    def backward(ctx, grad):
        return None, (grad * ctx.saved_tensors[0]).conj()


@pytest.mark.parametrize("count", [COUNT, 100])
@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag, lambda z: torch._neg_view(z.conj())])
def test_a_copy_is_read_as_what_was_saved(tmp_path, count, view):
    """Conjugated and negated tensors are bytes of others, which are read otherwise."""
    kept, x = with_room_for(tmp_path, 6), view(torch.randn(count, dtype=torch.complex64))
    expected, p = (torch.ones(count, dtype=x.dtype, requires_grad=True) for _ in range(2))
    OfComplex.apply(x, expected).backward()
    with kept.kept():
        y = OfComplex.apply(x, p)
    y.backward()
    assert torch.equal(p.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_that_a_function_saves_is_found_again(tmp_path):
    class Dequantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.save_for_backward(x)
            return (x.dequantize() * p).sum()

        @staticmethod
        def backward(ctx, grad):
            return None, grad * ctx.saved_tensors[0].dequantize()

    x, p = torch.quantize_per_tensor(torch.randn(100), 0.1, 0, torch.quint8), torch.ones(90, requires_grad=True)
    with with_room_for(tmp_path, 6).kept():
        y = Dequantized.apply(x[10:], p)
    y.backward()
    assert torch.equal(p.grad, x[10:].dequantize())


def test_a_larger_stash_that_cannot_be_made_leaves_the_one_before(tmp_path):
    asked = []

    def make(memory_bytes):
        asked.append(memory_bytes)
        if len(asked) == 2:
            raise OSError("there is no room")
        return Stash(str(tmp_path), memory_bytes)

    kept, weight = Activations(lambda: make, 10 * WHOLE, set), torch.ones((), requires_grad=True)

    def summed(count):
        with kept.kept():
            return sum((torch.ones(count) * weight).exp().sum() for _ in range(12 * COUNT // count))

    summed(COUNT).backward()
    before = kept.figures()
    with pytest.raises(OSError, match="there is no room"):
        summed(4 * COUNT)
    assert kept.figures()["written_bytes"] == before["written_bytes"] > 0
    summed(4 * COUNT).backward()
    assert asked[0] < 4 * WHOLE <= asked[1] == asked[2]


class WithGraphInside(torch.autograd.Function):
    """Makes nodes in its forward, and saves what it takes and makes."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = (x.detach().requires_grad_() * 2).sin()
        y = y.detach()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1]


@pytest.mark.parametrize(
    "compute",
    [
        torch.exp,
        lambda x: x * x,
        lambda x: torch.softmax(x, 0),
        lambda x: x.clone().sigmoid_(),
        lambda x: x.clone().view(-1, 2).relu_(),
        lambda x: x.clone()[2:].tanh_(),
        lambda x: torch.nn.functional.layer_norm(x.view(-1, 10), (10,)),
        lambda x: torch.cumprod(x, 0),
        lambda x: torch.linalg.qr(x[:100].view(10, 10) + torch.eye(10))[0],
        lambda x: x.view(-1, 10).max(1).values,
        lambda x: x.view(-1, 10).norm(dim=1),
        Saving.apply,
        WithGraphInside.apply,
        lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True),
        lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False),
    ],
)
@pytest.mark.parametrize("count", [COUNT, 100])
def test_a_graph_ends_without_the_garbage_collector(tmp_path, compute, count):
    """A node that keeps its own output through Python would stay for ever."""
    kept, weight, living = with_room_for(tmp_path, 1000), torch.ones(count, requires_grad=True), []

    class Watched:
        def __init__(self, tensor):
            self.its = tensor
            living.append(weakref.ref(self))

    def watched(tensor):
        return type("Kept", (Watched,), {"tensor": lambda self: self.its.tensor()})(tensor)

    gc.collect()
    gc.disable()
    try:
        with saving(lambda tensor: watched(InMemory(tensor))):
            y = compute(weight * 2)
        y = None
        assert [weak() for weak in living if weak() is not None] == []
        with kept.kept():
            y = compute(weight * 2)
        watches = list(kept._held._watches.values())
        y = None
        assert [watch() for watch in watches if watch() is not None] == []
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
