# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.micro_batches(): the bits of the ordinary loop, and the bytes read of one micro-batch.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import os
import signal
import sys
import threading
import time

try:
    import pytest
    import torch
    from long_cases import long_case
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import DEPTH, Block, gpt, memory_of, pinned, tokens_of, train
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of
from ziggurat.torch import micro_batches

IN_FILES = "params=nvme,grads=nvme"
ADAMW = {"lr": 1e-2, "host_memory": "64MiB"}


class Batch(tuple):
    """The arguments of a model, and the tokens that it is to tell."""

    def __new__(cls, tokens: torch.Tensor):
        batch = super().__new__(cls, (tokens[:, :-1],))
        batch.wanted = tokens[:, 1:]
        return batch


def loss_of(output, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), batch.wanted.flatten()) / 3


def batches_of(step: int, count: int) -> list[Batch]:
    """Returns micro-batches of 2, 3, 4, 2, ... rows."""
    return [Batch(tokens_of(step * count + part, 2 + part % 3)) for part in range(count)]


def in_a_loop(model, batches, loss=loss_of) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        found = loss(model(*batch), batch)
        losses.append(found.detach())
        found.backward()
    return losses


def offloaded(model, placement: str = "host", **arguments) -> torch.nn.Module:
    return ziggurat.torch.offload(model, memory=memory_of(model), placement=placement, **arguments)


def trained(run, model, place, steps=range(3), count=3, clip=None, batches_of=batches_of):
    """Returns all that `run(model, batches)` makes of the model in these steps."""
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=place, **ADAMW)
    found = []
    for step in steps:
        found += run(model, batches_of(step, count))
        assert pinned(model) == []
        found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        if clip is not None:
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return found + [param.detach().clone() for param in model.parameters()]


def assert_same(tmp_path, make, placement="host", loss=loss_of, **arguments) -> None:
    """Compares with the ordinary loop. `make()` returns a model that is offloaded here."""
    runs = (in_a_loop, micro_batches)
    plain, ours = (
        trained(
            lambda model, batches, run=run: run(model, batches, loss),
            offloaded(make(), placement),
            f"nvme:{tmp_path}/{run.__name__}",
            **arguments,
        )
        for run in runs
    )
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("placement", [long_case("host"), "nvme", IN_FILES])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_have_the_bits_of_the_loop(tmp_path, dtype, checkpointing, placement):
    assert_same(tmp_path, lambda: gpt(dtype, checkpointing), placement)


@pytest.mark.parametrize("placement", ["host", IN_FILES])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_any_number_of_micro_batches_has_the_bits_of_the_loop(tmp_path, count, placement):
    assert_same(tmp_path, gpt, placement, count=count, clip=0.5)


def sequential():
    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
    first = torch.nn.Embedding(97, 64), torch.nn.Linear(64, 64)  # of the root, which backward reads last
    return torch.nn.Sequential(*first, *blocks, torch.nn.LayerNorm(64), torch.nn.Linear(64, 97))


def with_frozen_embedding():
    model = gpt()
    model.embedding.requires_grad_(False)
    return model


def with_frozen_blocks():
    model = gpt()
    model.blocks[:2].requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [sequential, with_frozen_embedding, with_frozen_blocks])
def test_models_have_the_bits_of_the_loop(tmp_path, make):
    assert_same(tmp_path, make, IN_FILES)


def test_units_may_lie_in_units(tmp_path):
    units = ["blocks.0", "blocks.1", "blocks.1.mlp", "head"]

    def run(how):
        model = gpt()
        ziggurat.torch.offload(model, memory="8MiB", units=units)
        return trained(how, model, f"nvme:{tmp_path}/{how.__name__}")

    def ours(model, batches):
        return micro_batches(model, batches, loss_of)

    assert all(map(torch.equal, run(in_a_loop), run(ours)))


@pytest.mark.parametrize("placement", ["host", IN_FILES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_calls_and_the_loop_sum_for_one_step(tmp_path, placement, dtype):
    def in_parts(model, batches):
        return [
            *micro_batches(model, batches[:2], loss_of),
            *micro_batches(model, batches[2:4], loss_of),
            *in_a_loop(model, batches[4:5]),
            *micro_batches(model, batches[5:], loss_of),
        ]

    plain, ours = (
        trained(run, offloaded(gpt(dtype), placement), f"nvme:{tmp_path}/{run.__name__}", count=6)
        for run in (in_a_loop, in_parts)
    )
    assert all(map(torch.equal, plain, ours))


def bytes_read(run, tmp_path, count: int, placement: str) -> int:
    """Returns the bytes that the passes of a step have read from NVMe once the order of units is known, from the third step
    on. It is the least of some steps: on a busy machine a piece that was brought too early is now and then read again."""
    model = offloaded(gpt(), placement)
    place = f"nvme:{tmp_path}/{run.__name__}-{count}"
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=place, **ADAMW)
    read = []
    for step in range(5):
        optimizer.synchronize()
        while optimizer.figures().get("nvme_read_bytes"):  # of what is brought ahead for this step
            time.sleep(0.1)
        if run is micro_batches:
            micro_batches(model, batches_of(step, count), loss_of)
        else:
            in_a_loop(model, batches_of(step, count))
        read.append(optimizer.figures()["nvme_read_bytes"])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return min(read[2:])


@pytest.mark.parametrize("placement", ["nvme", IN_FILES])
def test_a_step_reads_the_bytes_of_one_micro_batch(tmp_path, placement):
    one = bytes_read(micro_batches, tmp_path, 1, placement)
    assert one == bytes_read(micro_batches, tmp_path, 8, placement)
    assert bytes_read(in_a_loop, tmp_path, 8, placement) > 5 * one


def test_outputs_are_there_for_one_micro_batch_at_a_time():
    model = offloaded(gpt())
    passed = []

    def loss(output, batch):
        passed.append("forward")
        output.grad_fn.register_hook(lambda *_: passed.append("backward"))
        return loss_of(output, batch)

    micro_batches(model, batches_of(0, 4), loss)
    assert passed == ["forward", "backward"] * 4


def test_units_stay_while_micro_batches_take_turns(monkeypatch):
    """Each unit is acquired once in forward and once in backward, but for the last."""
    model = offloaded(gpt())
    optimizer = ziggurat.torch.AdamW(model.parameters(), **ADAMW)
    train(model, optimizer, range(1))
    acquired = []
    acquire = ziggurat.Engine.acquire
    monkeypatch.setattr(
        ziggurat.Engine, "acquire", lambda engine, unit: (acquired.append(unit), acquire(engine, unit))[1]
    )
    micro_batches(model, batches_of(1, 5), loss_of)
    blocks = {streaming_of(block.after.weight)[1].unit.index for block in model.blocks}
    assert len(blocks) == DEPTH
    assert [acquired.count(unit) for unit in blocks] == [2] * DEPTH
    optimizer.close()


class InSegments(torch.nn.Module):
    """Checkpoints its blocks three by three."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = torch.nn.Embedding(97, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))
        self.head = torch.nn.Linear(64, 97)

    def forward(self, tokens):
        def passed(x, blocks):
            for block in blocks:
                x = block(x, mask)
            return x

        mask = torch.zeros(tokens.shape[1], tokens.shape[1])
        x = self.embedding(tokens)
        for blocks in (self.blocks[:3], self.blocks[3:]):
            x = checkpoint(passed, x, blocks, use_reentrant=self.reentrant)
        return self.head(x)


def in_segments(share: float, reentrant: bool = False) -> torch.nn.Module:
    torch.manual_seed(1)
    model = InSegments(reentrant)
    return ziggurat.torch.offload(model, memory=int(memory_of(model) * share))


def passes_counted(monkeypatch, run, model, count: int) -> int:
    """Returns how often a step acquires units. All its calls of the engine come from this thread."""
    calls = []
    with monkeypatch.context() as patch:
        for name in ("acquire", "release"):

            def called(engine, unit, name=name, original=getattr(ziggurat.Engine, name)):
                calls.append((name, threading.current_thread()))
                return original(engine, unit)

            patch.setattr(ziggurat.Engine, name, called)
        run(model, batches_of(1, count), loss_of)
    assert {thread for _, thread in calls} == {threading.current_thread()}
    return [name for name, _ in calls].count("acquire")


@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_of_several_units_need_no_more_memory_and_bring_no_more(tmp_path, monkeypatch, reentrant):
    acquired = []
    for run, count in ((in_a_loop, 1), (micro_batches, 1), (micro_batches, 3)):
        model = in_segments(1.25, reentrant)
        optimizer = ziggurat.torch.AdamW(model.parameters(), **ADAMW)
        micro_batches(model, batches_of(0, 3), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        acquired.append(passes_counted(monkeypatch, run, model, count))
        optimizer.close()
    assert acquired[0] >= acquired[1] >= acquired[2]
    results = (
        trained(
            lambda model, batches, run=run: run(model, batches, loss_of),
            in_segments(1.25, reentrant),
            f"nvme:{tmp_path}/{run.__name__}",
        )
        for run in (in_a_loop, micro_batches)
    )
    assert all(map(torch.equal, *results))


def test_too_little_memory_is_an_error_with_several_micro_batches_too():
    """And in the loop after them."""
    model = in_segments(1)
    optimizer = ziggurat.torch.AdamW(model.parameters(), **ADAMW)
    optimizer.open()
    with ziggurat.torch.gathered([model.blocks[0].after.weight]):
        for run in (micro_batches, in_a_loop):
            with pytest.raises(ziggurat.ResourceExhausted, match="give offload.. more memory"):
                run(model, batches_of(0, 2), loss_of)
            optimizer.zero_grad()
    assert pinned(model) == []
    optimizer.close()


def test_no_batch_does_nothing():
    model = offloaded(gpt())
    assert micro_batches(model, [], loss_of) == []
    assert model.norm.weight.grad is None


def test_gradients_come_without_an_optimizer_too():
    plain, ours = gpt(), offloaded(gpt())
    losses = in_a_loop(plain, batches_of(0, 3))
    assert list(map(torch.Tensor.item, losses)) == [
        loss.item() for loss in micro_batches(ours, iter(batches_of(0, 3)), loss_of)
    ]
    grads = ([param.grad for param in model.parameters()] for model in (plain, ours))
    assert all(map(torch.equal, *grads))


# -- random numbers


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt()
        for block in self.model.blocks:
            block.mlp.append(torch.nn.Dropout(0.3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def in_a_loop_with_seeds(model, batches, loss=loss_of):
    """Draws as micro_batches() says that it does."""
    before = torch.Generator()
    before.set_state(torch.get_rng_state())
    losses = []
    for seed, batch in zip([0, *torch.randint(2**62, (len(batches) - 1,), generator=before)], batches, strict=True):
        if losses:
            torch.manual_seed(int(seed))
        losses += in_a_loop(model, [batch], loss)
    return losses


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_each_micro_batch_draws_by_itself(tmp_path, checkpointing):
    found = []
    for run in (in_a_loop_with_seeds, micro_batches):
        model = Dropping()
        model.model.checkpointing = checkpointing
        torch.manual_seed(7)
        its = trained(
            lambda model, batches, run=run: run(model, batches, loss_of),
            offloaded(model),
            f"nvme:{tmp_path}/{run.__name__}",
        )
        found.append([*its, torch.rand(3)])
    assert all(map(torch.equal, *found))


def test_one_micro_batch_draws_as_in_the_loop():
    found = []
    for run in (in_a_loop, micro_batches):
        torch.manual_seed(7)
        found.append([*run(offloaded(Dropping()), batches_of(0, 1), loss_of), torch.rand(3)])
    assert all(map(torch.equal, *found))


def test_the_generator_stays_where_nothing_is_drawn():
    model = offloaded(gpt())
    before = torch.get_rng_state()
    micro_batches(model, batches_of(0, 3), loss_of)
    assert torch.equal(torch.get_rng_state(), before)


# -- what is around


def test_autocast_and_hooks_are_those_of_the_caller():
    def run(how):
        model, saved = offloaded(gpt()), []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.dtype), t)[1], lambda t: t),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        ):
            losses = how(model, batches_of(0, 3), loss_of)
        return losses + [param.grad for param in model.parameters()], len(saved), set(saved)

    (plain, *saved), (ours, *our_saved) = run(in_a_loop), run(micro_batches)
    assert all(map(torch.equal, plain, ours))
    assert saved == our_saved
    assert torch.bfloat16 in saved[1]


def test_modes_are_those_of_the_caller():
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    calls = []
    for how in (in_a_loop, micro_batches):
        model = offloaded(gpt())
        with Counting() as mode, torch.device("cpu"):

            def loss(output, batch, mode=mode):
                calls.append(mode.calls)
                return loss_of(output, batch)

            how(model, batches_of(0, 2), loss)
    assert 0 < calls[0] <= calls[2] < calls[3]


def test_a_dispatch_mode_is_refused():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(ziggurat.Unimplemented, match="under a Mode"):
        micro_batches(offloaded(gpt()), batches_of(0, 2), loss_of)


# -- what is refused


def refused(model, *words: str, batches=None, loss=loss_of, error=ziggurat.InvalidArgument):
    with pytest.raises(error) as raised:
        micro_batches(model, batches_of(0, 3) if batches is None else batches, loss)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_model_that_is_not_offloaded_is_refused():
    refused(gpt(), "a Gpt that is not offloaded", "call ziggurat.torch.offload")


def test_a_model_without_units_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    refused(ziggurat.torch.offload(model, memory="1MiB"), "has no units")


def test_models_that_are_no_chain_are_refused():
    class Twice(torch.nn.Module):
        def __init__(self, order):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(3))
            self.order = order

        def forward(self, x):
            for index in self.order(len(x)):
                x = torch.tanh(self.blocks[index](x))
            return x.sum()

    batches = [torch.ones(1, 200), torch.ones(2, 200)]
    by_count = {1: [0, 1, 2], 2: [0, 2, 1]}
    cases = [
        (lambda count: [0, 1, 0, 2], ("module 'blocks.0' was called twice in micro-batch 0",)),
        (
            by_count.get,
            (
                "micro-batch 1 came to the forward of module 'blocks.2'",
                "micro-batch 0 came to the forward of module 'blocks.1'",
            ),
        ),
        (lambda count: range(4 - count), ("micro-batch 1 came to the backward of module 'blocks.0'",)),
        (lambda count: range(1 + count), ("micro-batch 1 came to the forward of module 'blocks.2'",)),
    ]
    for order, words in cases:
        model = offloaded(Twice(order), units=["blocks.0", "blocks.1", "blocks.2"])
        refused(model, *words, batches=batches, loss=lambda output, batch: output)
        assert pinned(model) == []
        model.order = lambda count: range(3)
        micro_batches(model, batches, lambda output, batch: output)


def test_a_backward_that_does_not_come_to_all_units_is_refused():
    model = offloaded(gpt())

    def loss(output, batch):
        return loss_of(output, batch) if len(batch[0]) == 2 else model.position.sum()

    refused(model, "micro-batch 1 came to the end where micro-batch 0 came to the backward of", loss=loss)


def test_losses_that_backward_cannot_begin_with_are_refused():
    model = offloaded(gpt())
    refused(model, "loss of micro-batch 0 has shape (2, 16, 97)", loss=lambda output, batch: output)
    refused(model, "requires_grad=False", loss=lambda output, batch: loss_of(output, batch).detach())
    refused(model, "loss of micro-batch 0 is a float", loss=lambda output, batch: 1.0)
    refused(model, "is a NoneType", "needs labels", loss=None)


def test_calls_from_wrong_places_are_refused():
    model = offloaded(gpt())
    with torch.no_grad():
        refused(model, "gradients are disabled")
    with torch.inference_mode():
        refused(model, "gradients are disabled")
    refused(model, "was called within", loss=lambda output, batch: micro_batches(model, [batch], loss_of))
    graph = (torch.ones(3, requires_grad=True) * 2,)
    refused(model, "micro-batch 0 has a tensor with a graph", batches=[graph], error=ziggurat.Unimplemented)


@pytest.mark.parametrize("how", ["attribute", "list"])
def test_a_model_that_keeps_tensors_in_attributes_is_refused(how):
    class Keeping(Block):
        losses: list

        def forward(self, x, mask):
            if how == "list":
                self.losses.append(x.sum())
            else:
                self._loss = x.sum()
            return super().forward(x, mask)

    model = gpt()
    torch.manual_seed(1)
    model.blocks[1] = Keeping()
    model.blocks[2] = Keeping()
    for block in model.blocks:
        block.losses = []
    offloaded(model)
    attribute = {"list": "losses", "attribute": "_loss"}[how]
    refused(model, f"module 'blocks.1' changes its attribute '{attribute}' in forward")
    assert pinned(model) == []


class Around(torch.nn.Module):
    """Keeps something about each batch in `kept` until its blocks have run."""

    def __init__(self, keep, restores: bool = False) -> None:
        super().__init__()
        self.keep, self.restores = keep, restores
        self.first = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(3))
        self.kept = None

    def forward(self, x):
        before = self.kept
        self.keep(self, x)
        y = self.first(x)
        for block in self.blocks:
            y = torch.tanh(block(y))
        if self.restores:
            self.kept = before
        return y.square().mean()


class Plain:
    value = None


def in_a_buffer(module, x):
    module.__dict__.pop("kept", None)
    module.register_buffer("kept", x.mean())


def written_in_a_buffer(module, x):
    if module.kept is None:
        in_a_buffer(module, x)
    module.kept.copy_(x.mean())


def in_an_object(module, x):
    module.kept = module.kept or Plain()
    module.kept.value = len(x)


KEPT = {
    "tensor": lambda module, x: setattr(module, "kept", x.mean()),
    "number": lambda module, x: setattr(module, "kept", len(x)),
    "flag": lambda module, x: setattr(module, "kept", len(x) > 2),
    "text": lambda module, x: setattr(module, "kept", f"{len(x)} rows"),
    "dict": lambda module, x: setattr(module, "kept", {"sizes": [len(x)]}),
    "buffer": in_a_buffer,
    "buffer in place": written_in_a_buffer,
    "object": in_an_object,
}


def around(keep, restores: bool = False) -> torch.nn.Module:
    torch.manual_seed(1)
    model = Around(keep, restores)
    blocks = [f"blocks.{index}" for index in range(3)]
    return ziggurat.torch.offload(model, memory="4MiB", units=blocks)


def of_itself(output, batch):
    return output


@pytest.mark.parametrize("what, restores", [*((what, False) for what in KEPT), ("number", True)])
def test_a_model_that_keeps_something_else_for_each_batch_is_refused(what, restores):
    model = around(KEPT[what], restores)
    batches = [torch.ones(4, 200), torch.ones(2, 200), torch.ones(4, 200)]
    with torch.no_grad():
        model(batches[0])
    attribute = "kept.value" if what == "object" else "kept"
    refused(model, f"module 'the model' changes its attribute '{attribute}'", batches=batches, loss=of_itself)
    assert pinned(model) == []


def test_what_is_the_same_for_all_batches_may_be_kept():
    """And seen in a later call if it is not any more. Averages of batches are those of the loop."""

    def run(how):
        model = around(KEPT["number"])
        made = torch.Generator().manual_seed(3)
        batches = [torch.randn(4, 200, generator=made) for _ in range(3)]
        losses = how(model, batches, of_itself)
        return model, [*losses, *(param.grad for param in model.parameters()), *model.buffers()]

    def loop(model, batches, loss):
        return in_a_loop(model, [(batch,) for batch in batches], loss)

    (_, plain), (model, ours) = run(loop), run(micro_batches)
    assert all(map(torch.equal, plain, ours))
    batches = [torch.ones(4, 200), torch.ones(2, 200), torch.ones(4, 200)]
    refused(model, "changes its attribute 'kept'", batches=batches, loss=of_itself)


class Noting(torch.nn.Module):
    """Sets what was None: for a long batch, while its blocks run, or behind them."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.config = when, Plain()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(3))
        self.config.value = None
        if when != "behind, and was not there":
            self.config.problem_type = None

    def forward(self, x):
        if self.when == "long batch" and len(x) > 3:
            self.config.value = 2
        if self.config.value is not None:
            x = x * self.config.value
        for index, block in enumerate(self.blocks):
            if self.when == "between blocks":
                self.config.value = None if index == 0 else 2
            x = torch.tanh(block(x))
        if self.when.startswith("behind"):
            setattr(self.config, "value" if self.when == "behind" else "problem_type", "few")
        return x.square().mean()


@pytest.mark.parametrize("when", ["long batch", "between blocks", "behind", "behind, as transformers", "behind, and was not there"])
def test_what_was_none_and_is_set_is_refused(when):
    """A micro-batch that runs before would have found it, or one that runs behind would not."""
    model = ziggurat.torch.offload(Noting(when), memory="4MiB", units=[f"blocks.{index}" for index in range(3)])
    batches = [torch.ones(2, 200), torch.ones(3, 200), torch.ones(4, 200)]
    attribute = "problem_type" if when.startswith("behind,") else "value"
    refused(model, f"'the model' changes its attribute 'config.{attribute}'", batches=batches, loss=of_itself)


def test_another_thread_may_not_use_the_model_meanwhile():
    model = offloaded(gpt())
    errors = []

    def call():
        try:
            model.blocks[0](torch.zeros(1, 16, 64), torch.zeros(16, 16))
        except ziggurat.InvalidArgument as error:
            errors.append(str(error))

    def loss(output, batch):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return loss_of(output, batch)

    micro_batches(model, batches_of(0, 1), loss)
    (error,) = errors
    assert "module 'blocks.0' was called in another thread" in error


# -- errors


class Failing(torch.autograd.Function):
    """Fails in backward, or does nothing."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("in backward")
        return grad, None


def fail_in_forward(model, monkeypatch):
    block, forward = model.blocks[2], model.blocks[2].forward

    def failing(x, mask):
        if len(x) == 3:
            raise ArithmeticError("in forward")
        return forward(x, mask)

    monkeypatch.setattr(block, "forward", failing)


def fail_in_backward(model, monkeypatch):
    block, forward = model.blocks[1], model.blocks[1].forward
    monkeypatch.setattr(block, "forward", lambda x, mask: Failing.apply(forward(x, mask), len(x) == 3))


def fail_in_loss(model, monkeypatch):
    def failing(output, batch):
        if len(batch[0]) == 3:
            raise ArithmeticError("in loss")
        return loss_of(output, batch)

    return failing


def interrupt(model, monkeypatch):
    def interrupting(output, batch):
        if len(batch[0]) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss_of(output, batch)

    return interrupting


@pytest.mark.parametrize("placement", [long_case("host"), IN_FILES])
@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward, fail_in_loss, interrupt])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_an_error_ends_all_and_leaves_nothing_pinned(
    tmp_path, monkeypatch, fail, placement, checkpointing
):
    threads = threading.active_count()

    def run(fails):
        model = offloaded(gpt(checkpointing=checkpointing), placement)
        place = f"nvme:{tmp_path}/{fails}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), placement=place, **ADAMW)
        losses = train(model, optimizer, range(1))
        if fails:
            with monkeypatch.context() as patch:
                loss = fail(model, patch) or loss_of
                expected = KeyboardInterrupt if fail is interrupt else ArithmeticError
                with pytest.raises(expected):
                    micro_batches(model, batches_of(0, 4), loss)
            assert pinned(model) == []
            units = streaming_of(model.position)[0].units
            assert all((unit.forwards, unit.trained_forwards) == (0, 0) for unit in units)
            optimizer.zero_grad()
        losses += [loss.item() for loss in micro_batches(model, batches_of(0, 4), loss_of)]
        optimizer.step()
        optimizer.zero_grad()
        losses += train(model, optimizer, range(2), accumulate=2)
        optimizer.close()
        return losses

    assert run(True) == run(False)
    assert threading.active_count() <= threads  # one of a test before may end meanwhile


def test_a_thread_that_cannot_start_is_an_error(monkeypatch):
    model = offloaded(gpt())
    start = threading.Thread.start

    def failing(thread):
        if thread.name.endswith("micro-batch 2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(RuntimeError, match="can't start"):
        micro_batches(model, batches_of(0, 4), loss_of)
    assert pinned(model) == []
    monkeypatch.undo()
    micro_batches(model, batches_of(0, 4), loss_of)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
