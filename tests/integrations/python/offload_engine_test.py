# SPDX-License-Identifier: Apache-2.0
"""When ziggurat.torch.offload()'s engine opens and closes: within other calls, interrupted, by an optimizer that was dropped.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import gc
import resource
import signal
import sys
import weakref

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import (
        gpt,
        loss_of,
        memory_of,
        offloaded,
        pinned,
        same_with_and_without,
        stepped,
        tokens_of,
        train,
    )
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._pytorch import storages
from ziggurat._streaming.pins import Held
from ziggurat._streaming.streaming import streaming_of
from ziggurat.torch import gathered, offload


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the values of a model that is not away."""
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_offloaded(model: torch.nn.Module) -> bool:
    return streaming_of(model.norm.weight) is not None


@pytest.mark.parametrize("taken_out", [False, True])
def test_a_parameter_never_returns_with_the_engines_memory(taken_out):
    param = torch.nn.Parameter(torch.zeros(8))
    engines, own = torch.ones(8), torch.full((8,), 2.0)
    held = Held("p", param, None)
    held.leave(0)
    held.put_in(engines.data_ptr())
    if taken_out:
        held.take_out()
    held.return_to(own.untyped_storage)
    assert torch.equal(param.detach(), torch.full((8,), 2.0))
    assert param.data_ptr() != engines.data_ptr()


class Interrupts:
    """Ctrl-C at a function's call number `at`, before it does anything or when it has done it."""

    def __init__(self, monkeypatch, owner, name, at, done):
        self.calls, self.at, self.done = 0, at, done
        self.function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: self(*args))

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at and not self.done:
            raise KeyboardInterrupt
        result = self.function(*args)
        if self.calls == self.at:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", [1, 7, 40])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(ziggurat.Engine, "write_param"), (storages, "guard"), (storages, "swap")],
    ids=["write", "guard", "swap"],
)
def test_an_opening_that_is_interrupted_leaves_the_model_as_it_was(monkeypatch, owner, name, at, done):
    def run(offload):
        model = offload(gpt())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        if is_offloaded(model):
            before = values_of(model)
            with monkeypatch.context() as patch:
                Interrupts(patch, owner, name, at, done)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, tokens_of(0))
            assert same(values_of(model), before)
        losses = train(model, optimizer, range(2))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_an_opening_that_finds_the_drive_full_leaves_the_model_as_it_was(monkeypatch, tmp_path):
    def run(offload):
        model = offload(gpt(), placement="nvme")
        where = f"nvme:{tmp_path}/{is_offloaded(model)}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=where)
        if is_offloaded(model):
            before = values_of(model)
            written = ziggurat.Engine.write_param
            monkeypatch.setattr(ziggurat.Engine, "write_param", lambda *args: with_full_drive(written, *args))
            with pytest.raises(ziggurat.ResourceExhausted, match="cannot write"):
                loss_of(model, tokens_of(0))
            monkeypatch.setattr(ziggurat.Engine, "write_param", written)
            assert same(values_of(model), before)
        losses = train(model, optimizer, range(2))
        optimizer.close()
        return losses

    same_with_and_without(run)


def with_full_drive(write, engine, index: int, address: int) -> None:
    """Writes a parameter; from the sixth on there is no room in any file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if index > 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        write(engine, index, address)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", ["write_param", "guard"])
def test_a_resume_that_is_interrupted_leaves_the_model_as_it_was(monkeypatch, tier, name, tmp_path):
    model = gpt()
    model.norm.requires_grad_(False)  # written; the store has all others
    offload(model, memory=memory_of(model), placement=tier)
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    losses = train(model, optimizer, range(2))
    optimizer.close()
    expected = loss_of(model, tokens_of(5)).item()

    model = gpt()
    model.norm.requires_grad_(False)
    offload(model, memory=memory_of(model), placement=tier)
    before = values_of(model)
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    for at, done in ((1, True), (2, False), (30, True)):
        if name == "write_param" and at > 2:
            continue
        with monkeypatch.context() as patch:
            Interrupts(patch, ziggurat.Engine if name == "write_param" else storages, name, at, done)
            with pytest.raises(KeyboardInterrupt):
                optimizer.open(resume=True)
        assert same(values_of(model), before)
    optimizer.open(resume=True)
    assert loss_of(model, tokens_of(5)).item() == expected
    optimizer.close()


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", [1, 7, 40])
@pytest.mark.parametrize(
    ("owner", "name"), [(ziggurat.Engine, "read_param"), (storages, "swap")], ids=["read", "swap"]
)
def test_a_close_that_is_interrupted_can_be_called_again(monkeypatch, owner, name, at, done):
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        if is_offloaded(model):
            with monkeypatch.context() as patch:
                Interrupts(patch, owner, name, at, done)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.close()
            assert all("away" in repr(param) for param in model.parameters())
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return [*losses, loss_of(model, tokens_of(3)).item()]

    same_with_and_without(run)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("name", ["acquire", "find"])
def test_a_pass_that_is_interrupted_pins_nothing(monkeypatch, name, done):
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        if is_offloaded(model):
            for at in (2, 9):  # in forward, and in backward
                with monkeypatch.context() as patch:
                    Interrupts(patch, ziggurat.Engine, name, at, done)
                    with pytest.raises(KeyboardInterrupt):
                        loss_of(model, tokens_of(7)).backward()
                assert not pinned(model)
                optimizer.zero_grad()
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_an_optimizer_that_was_dropped_is_closed_by_the_next():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        del optimizer, scheduler  # which have each other
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1)
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_the_store_of_an_optimizer_that_was_dropped_can_be_resumed(tmp_path):
    def run(offload):
        model = offload(gpt())
        place = f"nvme:{tmp_path}/{is_offloaded(model)}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=place)
        losses = train(model, optimizer, range(2))
        if not is_offloaded(model):
            optimizer.close()  # which also makes the last step durable
        del optimizer
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=place)
        optimizer.open(resume=True)
        assert optimizer.engine.generation == 2
        losses += train(model, optimizer, range(2, 4))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_step_on_nvme_leaves_the_wait_to_the_units(tmp_path):
    model = gpt()
    offload(model, memory=memory_of(model), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    loss_of(model, tokens_of(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    (opened,) = optimizer.engines()
    assert opened.pending
    with gathered(model.narrow.weight):
        assert opened.pending  # the others
    loss_of(model, tokens_of(1))
    assert not opened.pending
    optimizer.close()


def test_a_backward_after_close_has_its_values():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        loss = loss_of(model, tokens_of(7))
        optimizer.close()
        loss.backward()
        return [param.grad.norm().item() for param in model.parameters()]

    same_with_and_without(run)


def test_a_backward_after_a_close_without_room_says_so(monkeypatch, tmp_path):
    model = gpt()
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    train(model, optimizer, range(1))
    loss = loss_of(model, tokens_of(7))
    monkeypatch.setattr(ziggurat._streaming.streaming, "free_bytes", lambda: 1000)
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match="optimizer was closed when memory had no room"):
        loss.backward()
    assert not pinned(model)


def test_a_forward_before_the_engine_opens_has_its_backward():
    def run(offload):
        model = offload(gpt())
        loss = loss_of(model, tokens_of(1))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        optimizer.open()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = train(model, optimizer, range(2))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_an_engine_that_opens_within_gathered_leaves_its_parameters_there():
    def run(offload):
        model = offload(gpt())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        weight = model.blocks[1].mlp[0].weight
        with gathered([weight]):
            loss = loss_of(model, tokens_of(1))  # opens the engine
            norms = [weight.norm().item()]
            with torch.no_grad():
                weight.mul_(0.5)
        assert not is_offloaded(model) or (not pinned(model) and "away" in repr(weight))
        losses = train(model, optimizer, range(2))
        optimizer.close()
        return norms + losses

    same_with_and_without(run)


def test_a_close_within_gathered_is_refused():
    model = gpt()
    optimizer = offloaded(model)
    with gathered(model.norm.weight), pytest.raises(
        ziggurat.InvalidArgument, match=r"close\(\) was called while unit '\(root\)' .* of gathered\(\)"
    ):
        optimizer.close()
    train(model, optimizer, range(1, 2))
    optimizer.close()


def test_a_model_that_is_dropped_gives_its_store_back(tmp_path):
    for _ in range(2):
        model = gpt()
        offload(model, memory="1GiB", placement="nvme")
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/state"
        )
        optimizer.open(resume=True)
        loss_of(model, tokens_of(1)).backward()
        optimizer.step()
        kept = weakref.ref(streaming_of(model.norm.weight)[0])
        del model, optimizer
        gc.collect()
        assert kept() is None


def test_a_model_may_change_until_its_engine_is_opened():
    def run(offload):
        model = offload(gpt()).bfloat16()
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_model_goes_on_after_its_optimizer():
    def run(offload):
        model, losses = offload(gpt()), []
        for _ in range(2):
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
            losses += train(model, optimizer, range(2))
            optimizer.close()
            losses.append(loss_of(model, tokens_of(3)).item())
        return losses

    same_with_and_without(run)


def test_a_copy_that_memory_has_no_room_for_is_an_error_where_no_directory_is(monkeypatch):
    model = gpt()
    offload(model, memory=memory_of(model))
    stepped(model)
    monkeypatch.setattr(ziggurat._streaming.streaming, "free_bytes", lambda: 1000)
    with pytest.raises(ziggurat.ResourceExhausted, match="'position' is offloaded, and memory"):
        model.state_dict()


def test_values_that_memory_has_no_room_for_stay_in_the_store(monkeypatch, tmp_path):
    model = gpt()
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    train(model, optimizer, range(1))
    monkeypatch.setattr(ziggurat._streaming.streaming, "free_bytes", lambda: 1000)
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match="optimizer was closed"):
        model(tokens_of(1)[:, :-1])
    with pytest.raises(ziggurat.InvalidArgument, match="closed when memory had no room"):
        model.norm.weight.sum()
    with pytest.raises(ziggurat.InvalidArgument, match="closed when memory had no room"):
        ziggurat.torch.AdamW(model.parameters()).open()


def test_an_optimizer_that_is_not_the_only_one():
    model = gpt()
    offload(model, memory=memory_of(model))
    wide = ziggurat.torch.AdamW([p for p in model.parameters() if p.dim() > 1])
    narrow = ziggurat.torch.AdamW([p for p in model.parameters() if p.dim() == 1])
    loss_of(model, tokens_of(1)).backward()
    with pytest.raises(ziggurat.Unimplemented, match="give one optimizer all parameters"):
        wide.step()
        narrow.step()
    model = gpt()
    model.norm.requires_grad_(False)
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters())
    train(model, optimizer, range(1))
    model.norm.requires_grad_(True)
    with pytest.raises(ziggurat.Unimplemented, match="parameter '.*' of an offloaded model is in"):
        train(model, optimizer, range(1, 2))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
