# SPDX-License-Identifier: Apache-2.0
"""offload(activations=): what backward needs is kept on a drive beyond a budget, and has the same bits.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import contextlib
import ctypes
import errno
import gc
import os
import pathlib
import random
import signal
import sys
import threading

try:
    import pytest
    import torch
    from failing_calls import FailingCalls, Unsupported
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, memory_of, tokens_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._activations import activations as activations_module, stash as stash_module
from ziggurat._activations.stash import Stash
from ziggurat._memory import loose_memory
from ziggurat._memory.loose_memory import RESERVE_BYTES, LooseMemory
from ziggurat._streaming.streaming import streaming_of
from ziggurat.torch import gathered, offload

@pytest.fixture(autouse=True)
def all_pass_through_the_stash(monkeypatch):
    """Most tests are about what leaves PyTorch's memory."""
    monkeypatch.setattr(activations_module, "IN_PLACE", 0)


@pytest.fixture(params=["all through the stash", "the newest in place"])
def how_kept(request, monkeypatch, all_pass_through_the_stash):
    monkeypatch.setattr(activations_module, "IN_PLACE", 0 if request.param.startswith("all") else 0.5)


BATCH = 64  # so that what a block saves is not small
MEMORY = 2 << 20


def activations(model):
    streaming, _ = streaming_of(next(model.parameters()))
    return streaming.activations


def trained(model, steps=3, autocast=False, backwards=1, clip=None, placement="host"):
    """Returns the losses, and the parameters."""
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=placement)
    losses = trained_on(model, optimizer, steps, autocast, backwards, clip)
    optimizer.close()
    return losses, [param.detach().clone() for param in model.parameters()]


def trained_on(model, optimizer, steps=3, autocast=False, backwards=1, clip=None):
    losses = []
    for step in range(steps):
        for part in range(backwards):
            around = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
            with around:
                loss = loss_of(model, tokens_of(step * backwards + part, BATCH))
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def kept_on_drive(model, folder, **arguments):
    return offload(
        model,
        memory=memory_of(model),
        activations=f"nvme:{folder}",
        activation_memory=arguments.pop("activation_memory", MEMORY),
        **arguments,
    )


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_has_the_bits_of_a_run_without(how_kept, tmp_path, dtype, checkpointing):
    plain = trained(gpt(dtype, checkpointing))
    model = kept_on_drive(gpt(dtype, checkpointing), tmp_path)
    assert same(trained(model), plain)
    figures = activations(model).figures()
    assert figures["put_bytes"] > 0
    if checkpointing is None:
        assert figures["written_bytes"] > MEMORY and figures["read_bytes"] > 0
    assert figures["memory_peak_bytes"] <= MEMORY
    assert not list(tmp_path.iterdir())  # the files have no names


@pytest.mark.parametrize(
    "how", [{"autocast": True}, {"backwards": 3}, {"clip": 0.5}, {"backwards": 2, "autocast": True}]
)
def test_has_the_bits_beside_what_else_training_does(how_kept, tmp_path, how):
    plain = trained(gpt(), **how)
    assert same(trained(kept_on_drive(gpt(), tmp_path), **how), plain)


def test_figures_count_what_a_step_moves(how_kept, tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    optimizer = ziggurat.torch.AdamW(model.parameters())
    optimizer.open()
    optimizer.figures()
    trained_on(model, optimizer, steps=1)
    first = optimizer.figures()
    trained_on(model, optimizer, steps=1)
    second = optimizer.figures()
    assert first["activations_put_bytes"] == second["activations_put_bytes"] > 2 * MEMORY
    assert first["activations_written_bytes"] > MEMORY and first["activations_read_bytes"] > 0
    assert first["activations_wait_s"] >= 0
    optimizer.close()


def test_means_the_directory_of_the_state_by_itself(tmp_path):
    plain = trained(gpt(), placement=f"nvme:{tmp_path}/plain")
    model = offload(
        gpt(), memory=memory_of(gpt()), placement="nvme", activations="nvme", activation_memory=MEMORY
    )
    assert same(trained(model, placement=f"nvme:{tmp_path}/state"), plain)
    assert activations(model).figures()["written_bytes"] > 0


def test_puts_each_storage_once_and_no_parameter(how_kept, tmp_path):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, 4096))

        def forward(self, x):
            left, right = (x * self.weight).chunk(2, 1)  # saves x and the weight
            return (left * right).sin()  # saves left and right, which are one storage, and what sin() takes

    model = kept_on_drive(Twice(), tmp_path, activation_memory="16MiB")
    x = torch.full((64, 4096), 0.5, requires_grad=True)
    model(x * 1).sum().backward()
    whole, half = 64 * 4096 * 4, 64 * 2048 * 4
    assert activations(model).figures()["put_bytes"] == whole + whole + half


def test_a_write_between_two_saves_makes_another_copy(tmp_path):
    class Written(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((256, 256), 1.5))

        def forward(self, x):
            y = x * self.weight
            z = y.sin()  # saves y
            with torch.no_grad():
                y.mul_(3)
            return z + y.cos()  # saves what y is now

    model = kept_on_drive(Written(), tmp_path, activation_memory="4MiB")
    model(torch.ones(256, 256)).sum().backward()
    assert activations(model).figures()["put_bytes"] == 3 * 256 * 256 * 4  # x, and y twice
    y = torch.tensor(1.5)
    expected = y.cos() - (3 * y).sin()  # autograd does not know of the write
    with gathered(model.weight):
        assert torch.allclose(model.weight.grad, expected.expand(256, 256))


class Recurrent(torch.nn.Module):
    """Computes gates in place, in the parts of one tensor that unsafe_chunk() gives."""

    def __init__(self, kind, **arguments):
        super().__init__()
        torch.manual_seed(1)
        is_cell = kind.endswith("Cell")
        self.layer = getattr(torch.nn, kind)(64, 64, **arguments)
        self.run = self.cell if is_cell else lambda x: self.layer(x)[0]

    def cell(self, x):
        state = None
        for part in x:
            state = self.layer(part, state)
        return state[0] if isinstance(state, tuple) else state

    def forward(self, x):
        return self.run(x).float().square().mean()


def gradients_of(model, *inputs):
    model(*inputs).backward()
    return [param.grad for param in model.parameters()]


def with_plains_gradients(make, x, folder, activation_memory):
    """Returns a model that keeps activations on the drive, whose gradients have the bits of one that does not."""
    plain = gradients_of(make(), x)
    model = kept_on_drive(make(), folder, activation_memory=activation_memory)
    assert all(map(torch.equal, gradients_of(model, x), plain))
    return model


@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("LSTMCell", {}),
        ("GRUCell", {}),
        ("LSTM", {}),
        ("LSTM", {"proj_size": 32}),
        ("LSTM", {"dtype": torch.bfloat16}),
        ("GRU", {}),
    ],
)
def test_recurrent_layers_have_the_bits(how_kept, tmp_path, kind, arguments):
    x = torch.randn(3, 512, 64, dtype=arguments.get("dtype"), generator=torch.Generator().manual_seed(2))
    model = with_plains_gradients(lambda: Recurrent(kind, **arguments), x, tmp_path, "16MiB")
    assert activations(model).figures()["put_bytes"] > 0


class Counted(torch.nn.Module):
    """Saves tensors of one storage whose versions count writes apart."""

    def __init__(self, other):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 0.9, 256 * 256).view(256, 256))
        self.other = other

    def forward(self, x):
        y = x * self.weight
        self.unused = y.sin()  # saves y, and its backward never runs
        with torch.no_grad():
            y.mul_(3)
        return (self.other(y) * self.weight).sum()


def data_of_another(y):
    y.data = y.detach() + 1
    return y


def under_inference(y):
    with torch.inference_mode():
        return y[1:]


@pytest.mark.parametrize(
    "other",
    [
        lambda y: y.data,
        lambda y: y.data.t(),
        lambda y: y.detach(),
        lambda y: torch.empty(0).set_(y.detach()),
        lambda y: torch.empty(0).set_(y.untyped_storage(), 0, (256, 256), (256, 1)),
        lambda y: torch.unsafe_chunk(y.detach(), 1)[0],
        lambda y: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y.detach())),
        lambda y: torch.from_numpy(y.detach().numpy()),
        lambda y: torch.ops.aten._unsafe_view(y.detach(), (256, 256)),
        data_of_another,
        lambda y: torch.cat([under_inference(y), y.detach()[:1]]),
    ],
)
def test_a_copy_serves_only_tensors_whose_versions_count_the_same_writes(how_kept, tmp_path, other):
    x = torch.full((256, 256), 0.25)
    with_plains_gradients(lambda: Counted(other), x, tmp_path, "4MiB")


class Parts(torch.nn.Module):
    """Computes with parts of one activation, which `split` makes."""

    def __init__(self, split):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 0.9, 512 * 512).view(512, 512))
        self.split = split

    def forward(self, x):
        parts = [part.sigmoid_() for part in self.split(x * self.weight)]
        return sum((part * place).sum() for place, part in enumerate(parts, 1))


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("split", [torch.unsafe_chunk, lambda y, n, d: torch.unsafe_split(y, 512 // n, d)])
def test_parts_that_are_written_apart_are_copied_apart(how_kept, tmp_path, split, dimension):
    def parts(y):
        return split(y, 2, dimension)

    x = torch.ones(512, 512)
    model = with_plains_gradients(lambda: Parts(parts), x, tmp_path, "8MiB")
    assert activations(model).figures()["put_bytes"] == 2 * 512 * 512 * 4  # x, and each part


def test_what_is_spread_over_its_storage_comes_back_with_its_strides(how_kept, tmp_path):
    seen = []

    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return (grad.expand(512, 256),) + (None,) * (len(ctx.saved_tensors) - 1)

    class Saving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(512, 512))

        def forward(self, x):
            y = x * self.weight
            self.tensors = [
                torch.unsafe_chunk(y, 2, 1)[1],
                torch.unsafe_chunk(y, 2, 1)[1].t(),
                y[1::2, 3::2].detach(),
                y.detach()[:, 1:].unsqueeze(1),
                y.detach().as_strided((300, 300), (1, 1)),
                y.detach().as_strided((3, 2, 1 << 14), (0, 1, 2)),
                y.detach()[7:].as_strided((512, 512), (1, 512), 0),
                y.detach().view(torch.int16),
            ]
            return Strided.apply(*self.tensors)

    model = kept_on_drive(Saving(), tmp_path, activation_memory="16MiB")
    x = torch.arange(512 * 512, dtype=torch.float32).view(512, 512)
    loss = model(x)
    given = [(tensor.detach().clone(), tensor.stride()) for tensor in model.tensors]
    model.tensors = None
    loss.backward()
    for back, (values, strides) in zip(seen, given, strict=True):
        assert torch.equal(back, values) and back.stride() == strides


class Given(torch.autograd.Function):
    """Whose backward gives what it has saved as a gradient."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(g)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def test_a_gradient_that_is_a_saved_tensor_may_be_written(how_kept, tmp_path):
    class Same(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(256, 256))

        def forward(self, x):
            g = torch.full((256, 256), 2.0)
            return (x * g).sum() + Given.apply(self.weight, g).sum()

    def gradient_of(model):
        x = torch.ones(256, 256, requires_grad=True)

        def clear(param):
            param.grad.zero_()

        model.weight.register_post_accumulate_grad_hook(clear)
        model(x).backward()
        return x.grad

    assert torch.equal(gradient_of(kept_on_drive(Same(), tmp_path)), gradient_of(Same()))


def test_a_small_part_of_a_large_storage_stays_where_it_is(tmp_path):
    model = kept_on_drive(torch.nn.Linear(64, 64), tmp_path)
    data = torch.ones(100_000, 64)
    for first in range(0, 4096, 1024):
        model(data[first : first + 1024]).sum().backward()
    assert activations(model).figures()["put_bytes"] == 0


def test_nested_tensors_stay_where_they_are(how_kept, tmp_path):
    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, 512))

        def forward(self, x):
            its = torch.nested.as_nested_tensor([x, x[:7]])
            return sum((one * self.weight).sum() for one in (its * its).unbind())

    model = kept_on_drive(Nested(), tmp_path)
    x = torch.ones(300, 512, requires_grad=True)
    model(x).backward()
    assert x.grad[0, 0] == 4 and x.grad[9, 0] == 2


def test_zeros_without_memory_stay_where_they_are(tmp_path):
    class Zero(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(256, 256))

        def forward(self, x):
            return (self.weight * torch._efficientzerotensor((256, 256))).sum() + (self.weight * x).sum()

    model = kept_on_drive(Zero(), tmp_path)
    assert torch.equal(gradients_of(model, torch.full((256, 256), 2.0))[0], torch.full((256, 256), 2.0))


def test_parts_of_an_activation_take_it_along_and_come_back_alone(tmp_path):
    seen = []

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *parts):
            ctx.save_for_backward(*parts)
            return sum(part.sum() for part in parts)

        @staticmethod
        def backward(ctx, grad):
            seen.extend(part.untyped_storage().nbytes() for part in ctx.saved_tensors)
            return tuple(torch.ones_like(part) for part in ctx.saved_tensors)

    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16, 1024))

        def forward(self, x):
            return Sum.apply(*(x * self.weight).view(16, 16, 64).unbind(0))

    model = kept_on_drive(Split(), tmp_path)
    assert torch.equal(gradients_of(model, torch.ones(16, 1024))[0], torch.ones(16, 1024))
    assert activations(model).figures()["put_bytes"] == 2 * 16 * 1024 * 4  # what is multiplied, and the parts
    assert seen == [1024 * 4] * 16


def test_threads_share_a_stash_and_wait_for_each_other(how_kept, tmp_path, monkeypatch):
    made = []

    class Counted(Stash):
        def __init__(self, *arguments, **given):
            made.append(self)
            super().__init__(*arguments, **given)

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(256))

        def forward(self, x):
            for _ in range(4):
                x = (x @ self.weight).sin()
            return x.sum()

    monkeypatch.setattr("ziggurat._activations.activations.Stash", Counted)
    model = kept_on_drive(Deep(), tmp_path, activation_memory="1600KiB")  # of which an item takes 1 MiB
    x, found = torch.linspace(-1, 1, 1024 * 256).view(1024, 256), []
    (plain,) = gradients_of(Deep(), x)
    ready = threading.Barrier(3)

    def run():
        ready.wait()
        for _ in range(5):
            found.append(torch.autograd.grad(model(x), model.weight)[0])

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) <= 2 and len(found) == 15  # one at first, and one with room for an item
    assert all(torch.equal(one, plain) for one in found)


def put(stash, source):
    return stash.put(source.nbytes, lambda address: ctypes.memmove(address, source.data_ptr(), source.nbytes))


class Interrupts:
    """Calls the C interface, and interrupts once right before or after the call of a name, as Ctrl-C does."""

    def __init__(self, monkeypatch):
        self._call, self.at, self.put, self.dropped = stash_module.call, None, set(), set()
        self.lent, self.came_back = set(), set()
        monkeypatch.setattr(stash_module, "call", self)

    def __call__(self, name, *arguments, **words):
        at, step = self.at, name.removeprefix("ziggurat_stash_")
        if at == (step, "before"):
            self.interrupt()
        its = self._call(name, *arguments, **words)
        if step == "take":
            self.put.add(arguments[-2]._obj.value)
        if step == "drop":
            self.dropped.add(arguments[-1].value)
        if step == "lend":
            self.lent.add(arguments[-2]._obj.value)
        if step == "give_back":
            self.came_back.add(arguments[-1].value)
        if at == (step, "after"):
            self.interrupt()
        return its

    def interrupt(self):
        self.at = None
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["take", "filled", "read", "lend", "give_back", "drop"])
def test_an_interrupt_leaves_nothing_in_use(tmp_path, monkeypatch, step, when):
    calls = Interrupts(monkeypatch)
    stash = Stash(str(tmp_path), 4 << 20)
    source, target = torch.ones(1 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    for _ in range(6):
        items = [put(stash, source) for _ in range(2)]
        del items[0]
        calls.at = (step, when)
        with pytest.raises(KeyboardInterrupt):
            items.append(put(stash, source))
            items[0].read(target.data_ptr(), 0, 1 << 20)
            items[0].lent()
            items[0].read(target.data_ptr(), 0, 1 << 20)
        items.clear()
    item = put(stash, torch.ones(4 << 20, dtype=torch.uint8))  # needs all of the memory
    assert calls.dropped - {0} == calls.put - {0, item.ticket.value} and len(stash._living) == 1
    assert calls.came_back - {0} == calls.lent - {0}


def test_signals_leave_nothing_in_use(tmp_path):
    """As Ctrl-C in a notebook, whose cell is run again."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    ignored = []
    before = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    sys.unraisablehook = ignored.append  # of an interrupt where Python can only print it
    stash, source = Stash(str(tmp_path), 5 << 20), torch.ones(2 << 20, dtype=torch.uint8)
    delays, interrupts = random.Random(0), 0
    try:
        for _ in range(60):
            items = []
            try:
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(0.001, 0.02))
                items += (put(stash, source) for _ in range(6))
                for item in reversed(items):
                    loan = item.lent()
                    item.read(source.data_ptr(), 0, source.nbytes)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            items = item = loan = None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
        sys.unraisablehook = before[1]
    assert interrupts > 0 and not ignored
    stash.figures()
    assert not stash._living and not stash._gone


def test_a_forked_process_is_refused(tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    loss = loss_of(model, tokens_of(0, BATCH))

    def backward():
        with pytest.raises(ziggurat.InvalidArgument, match="was forked"):
            loss.backward()

    with forked_runs() as runs:
        assert runs.status_of(runs.started(backward), within=60) == 0


def test_a_forked_process_is_refused_figures_and_may_close(tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    optimizer = ziggurat.torch.AdamW(model.parameters())
    trained_on(model, optimizer, steps=1)

    def ask():
        with pytest.raises(ziggurat.InvalidArgument, match="was forked"):
            optimizer.figures()
        activations(model).close()

    with forked_runs() as runs:
        assert runs.status_of(runs.started(ask), within=60) == 0
    optimizer.close()


class Memory:
    """Stands for the memory of the process: the C library's, of which some is freed and kept, and other."""

    def __init__(self, monkeypatch):
        self.used, self.loose, self.other, self.returned = 0, 0, 0, 0
        monkeypatch.setattr(loose_memory, "_used_bytes", lambda: self.used)
        monkeypatch.setattr(loose_memory, "resident_bytes", lambda: self.used + self.loose + self.other)
        monkeypatch.setattr(loose_memory, "return_freed", self.give_back)
        monkeypatch.setattr(loose_memory, "_take_huge_pages", lambda: None)

    def give_back(self):
        self.loose, self.returned = 0, self.returned + 1


def test_freed_memory_is_given_back_beyond_what_was_most_used(monkeypatch):
    memory, its = Memory(monkeypatch), LooseMemory()
    mib = 1 << 20

    def returned(used, loose, other, freed=16 * mib):
        memory.used, memory.loose, memory.other, memory.returned = used, loose, other, 0
        its.count_freed(freed)
        return memory.returned

    assert returned(used=500 * mib, loose=400 * mib, other=1000 * mib) == 1  # the first look knows nothing
    assert returned(used=500 * mib, loose=RESERVE_BYTES, other=1000 * mib) == 0
    assert returned(used=500 * mib, loose=RESERVE_BYTES + 1, other=1000 * mib, freed=15 * mib) == 0  # no look yet
    assert returned(used=500 * mib, loose=RESERVE_BYTES + 1, other=1000 * mib, freed=mib) == 1
    assert returned(used=100 * mib, loose=400 * mib + RESERVE_BYTES, other=1000 * mib) == 0  # as much as was used
    assert returned(used=900 * mib, loose=RESERVE_BYTES, other=1000 * mib) == 0
    assert returned(used=100 * mib, loose=0, other=3000 * mib) == 1  # it learns what the others are now
    assert returned(used=100 * mib, loose=800 * mib + RESERVE_BYTES, other=3000 * mib) == 0


def test_the_c_library_says_what_is_used():
    before = loose_memory._used_bytes()
    if before == 0:
        pytest.skip("the C library has no mallinfo2")
    kept = torch.ones(8 << 20, dtype=torch.uint8)
    assert loose_memory._used_bytes() - before >= kept.nbytes
    assert loose_memory.resident_bytes() > kept.nbytes


def test_closing_gives_memory_back(how_kept, tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    trained(model)
    moved = activations(model).figures()
    assert moved["put_bytes"] > 0 and activations(model)._stash is None
    trained(model)
    both = activations(model).figures()
    assert both["put_bytes"] == 2 * moved["put_bytes"]
    assert both["memory_peak_bytes"] <= MEMORY


def test_backward_is_lent_memory_and_what_it_keeps_is_copied(tmp_path):
    """A function that keeps what it is given has up to half of activation_memory, and then copies."""
    kept, whole = [], 1024 * 256 * 4

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            kept.append(ctx.saved_tensors[0])
            return gradient

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            for number in range(12):
                x = Keeping.apply(x + self.weight * number)
            return x.sum()

    model = kept_on_drive(Deep(), tmp_path, activation_memory=4 * whole)
    model(torch.zeros(1024, 256)).backward()
    assert activations(model).figures()["lent_bytes"] == 2 * whole
    expected = torch.arange(12).cumsum(0).flip(0)
    assert [int(one.mean()) for one in kept] == expected.tolist() and all(one.std() == 0 for one in kept)
    for _ in range(3):  # with half of the memory still lent
        kept_before = [one.clone() for one in kept[:2]]
        model(torch.zeros(1024, 256)).backward()
        assert all(map(torch.equal, kept[:2], kept_before))
    kept.clear()
    before = activations(model).figures()["lent_bytes"]
    model(torch.zeros(1024, 256)).backward()
    assert activations(model).figures()["lent_bytes"] == before + 2 * whole
    assert activations(model).figures()["memory_peak_bytes"] <= 4 * whole


def test_a_backward_can_be_made_again(how_kept, tmp_path):
    def gradients(model):
        loss = loss_of(model, tokens_of(0, BATCH))
        loss.backward(retain_graph=True)
        first = [param.grad.clone() for param in model.parameters()]
        loss.backward()
        return first, [param.grad.clone() for param in model.parameters()]

    plain = gradients(gpt())
    ours = gradients(kept_on_drive(gpt(), tmp_path))
    for mine, theirs in zip(ours, plain, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_forgets_a_graph_that_is_dropped_and_keeps_nothing_without_gradients(tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    with torch.no_grad():
        loss_of(model, tokens_of(0, BATCH))
    assert activations(model).figures() == {}
    for step in range(20):  # together ten times what there is
        loss = loss_of(model, tokens_of(step, BATCH))
        del loss
        gc.collect()
    assert activations(model).figures()["memory_peak_bytes"] <= MEMORY


def test_values_outlive_the_model(how_kept, tmp_path):
    model = kept_on_drive(gpt(), tmp_path)
    loss = loss_of(model, tokens_of(0, BATCH))
    embedding = model.embedding.weight
    del model
    gc.collect()
    loss.backward()
    plain = gpt()
    loss_of(plain, tokens_of(0, BATCH)).backward()
    assert torch.equal(embedding.grad, plain.embedding.weight.grad)


def test_what_is_too_large_stays_in_memory_and_is_said_once(how_kept, tmp_path, capfd):
    plain = trained(gpt())
    model = kept_on_drive(gpt(), tmp_path, activation_memory="128KiB")
    assert same(trained(model), plain)
    said = [line for line in capfd.readouterr().err.splitlines() if "stays in memory" in line]
    assert len(said) == 1 and "activation_memory=128.0 KiB" in said[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"activations": "host"}, "in host memory anyway"),
        ({"activations": "nvme:"}, 'give "nvme" for the directory'),
        ({"activations": "disk"}, 'give "nvme" for the directory'),
        ({"activations": True}, r'activations=True\): give "nvme" for the directory'),
        ({"activations": pathlib.Path("/x")}, 'give "nvme" for the directory'),
        ({"activation_memory": "1GiB"}, 'give activations="nvme" too'),
        ({"activations": "nvme:/x", "activation_memory": "many"}, "activation_memory"),
        ({"activations": "nvme:/x", "activation_memory": 4096}, "at least 64.0 KiB"),
    ],
)
def test_refuses_what_it_does_not_know(arguments, words):
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        offload(gpt(), memory="1GiB", **arguments)


def test_without_an_engine_nothing_is_kept(tmp_path):
    tokens = tokens_of(0, BATCH)
    plain = loss_of(gpt(), tokens)
    model = offload(
        gpt(), memory=memory_of(gpt()), placement="nvme", activations="nvme", activation_memory=MEMORY
    )
    assert torch.equal(loss_of(model, tokens), plain)
    assert activations(model).figures() == {}
    trained(model, placement=f"nvme:{tmp_path}/state")
    moved = activations(model).figures()
    loss_of(model, tokens).backward()
    assert activations(model).figures() == moved


def test_more_memory_than_is_free_is_refused_at_the_first_forward(tmp_path):
    model = kept_on_drive(gpt(), tmp_path, activation_memory="4000TiB")
    with pytest.raises(ziggurat.ResourceExhausted, match="activation_memory.*memory that are free: give less"):
        loss_of(model, tokens_of(0, BATCH))


def test_without_a_directory_names_what_is_missing():
    model = offload(gpt(), memory=memory_of(gpt()), activations="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters())
    with pytest.raises(ziggurat.InvalidArgument, match='activations="nvme:/path"'):
        loss_of(model, tokens_of(0, BATCH))
    optimizer.close()


def full_drive(folder, losses):
    """Trains while the drive is full, and then goes on."""
    os.environ["ZIGGURAT_IO"] = "threads"
    try:
        calls = FailingCalls()
    except Unsupported:
        os._exit(77)
    model = kept_on_drive(gpt(), folder)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    optimizer.open()
    calls.arm(1, errno.ENOSPC, times=1 << 30)
    with pytest.raises(ziggurat.ResourceExhausted, match=f"(?s){folder}.*ENOSPC"):
        loss_of(model, tokens_of(0, BATCH))
    calls.disarm()
    assert trained_on(model, optimizer) == losses


def test_a_full_drive_is_named_and_training_goes_on(tmp_path):
    losses = trained(gpt())[0]
    with forked_runs() as runs:
        status = runs.status_of(runs.started(full_drive, tmp_path, losses))
    if status == 77:
        pytest.skip("the machine has no such filters")
    assert status == 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
