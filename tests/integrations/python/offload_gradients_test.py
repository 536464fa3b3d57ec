# SPDX-License-Identifier: Apache-2.0
"""Gradients of an offloaded model that backward hands to the engine, which sums them in files.

Each run is compared with the same script without offload(), whose gradients PyTorch holds.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import gc
import re
import sys
import weakref
from collections.abc import Callable

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, memory_of, tokens_of, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._gradients import engine_content
from ziggurat._gradients.engine_content import at_engine
from ziggurat._memory.memory import size_text
from ziggurat._streaming import streaming

IN_FILES = "params=nvme,grads=nvme"
LARGE = 16 * 1024  # elements from which on a gradient goes to the engine


@pytest.fixture
def made(tmp_path):
    """Makes models and their optimizers: plain, or offloaded to `placement`."""

    def make(placement: str | None, dtype: torch.dtype = torch.float32, **arguments):
        model = gpt(dtype)
        if placement is not None:
            ziggurat.torch.offload(model, memory=memory_of(model), placement=placement)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        where = {"placement": f"nvme:{folder}", "lr": 1e-2} | arguments
        return model, ziggurat.torch.AdamW(model.parameters(), **where)

    return make


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters' values and all moments."""
    optimizer.synchronize()
    moments = optimizer.state_dict()["state"].values()
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(value.clone() for its in moments for value in its.values()),
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def backward(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    loss = loss_of(model, tokens_of(step))
    loss.backward()
    return loss


def same_with_and_without(made, run: Callable[..., object], **arguments) -> None:
    """Compares what `run(model, optimizer)` returns, and the state after it."""
    found = []
    for placement in (None, IN_FILES):
        model, optimizer = made(placement, **arguments)
        found.append((run(model, optimizer), state_of(model, optimizer)))
        optimizer.close()
    (plain, plain_state), (ours, our_state) = found
    assert ours == plain
    assert same(our_state, plain_state)


@pytest.mark.parametrize("placement", [IN_FILES, "params=host,grads=nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, 0.5)])
def test_steps_have_the_bits_of_gradients_in_memory(made, placement, dtype, accumulate, clip):
    plain, ours = made(None, dtype), made(placement, dtype)
    losses = [train(*one, range(3), accumulate=accumulate, clip=clip) for one in (plain, ours)]
    assert losses[0] == losses[1]
    assert same(state_of(*ours), state_of(*plain))


def test_large_gradients_are_with_the_engine_and_small_ones_in_memory(made):
    model, optimizer = made(IN_FILES)
    backward(model)
    away = [at_engine(param.grad) is not None for param in model.parameters()]
    assert away == [param.numel() >= LARGE for param in model.parameters()]
    assert any(away)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_read_as_if_they_were_in_memory(made, dtype):
    def run(model, optimizer):
        read = []
        for part in range(2):
            backward(model, part)
            read += [param.grad.clone() for param in model.parameters()]
            read += [param.grad.norm() for param in model.parameters()]
            read += [param.grad[0].sum() for param in model.parameters()]
        optimizer.step()
        return [value.tolist() for value in read]

    same_with_and_without(made, run, dtype=dtype)


def change_by_a_number(model: torch.nn.Module) -> None:
    for index, param in enumerate(model.parameters()):
        param.grad.mul_(0.5 + index)


def change_in_place(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def change_in_part(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.grad[0].zero_()


def replace(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad * 2


def take_away(model: torch.nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.grad = None


def begin_anew(model: torch.nn.Module) -> None:
    model.zero_grad()
    backward(model, 7)


def zero_in_place(model: torch.nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    backward(model, 7)
    backward(model, 8)


def scale_between(model: torch.nn.Module) -> None:
    change_by_a_number(model)
    backward(model, 7)


@pytest.mark.parametrize(
    "change",
    [
        change_by_a_number,
        change_in_place,
        change_in_part,
        replace,
        take_away,
        begin_anew,
        zero_in_place,
        scale_between,
    ],
)
def test_what_a_script_does_to_gradients_counts(made, change):
    def run(model, optimizer):
        for step in range(2):
            backward(model, step)
            change(model)
            optimizer.step()
            optimizer.zero_grad()
        return [optimizer.engine.steps_of(i) for i in range(len(list(model.parameters())))]

    same_with_and_without(made, run)


def test_loss_scaling_skips_what_is_not_finite(made):
    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        scales = []
        for step in range(4):
            scaler.scale(loss_of(model, tokens_of(step))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert len(set(scales)) > 1
        return scales

    same_with_and_without(made, run)


def test_a_step_that_is_refused_changes_no_gradient(made):
    def run(model, optimizer):
        backward(model)
        change_by_a_number(model)
        optimizer.param_groups[0]["betas"] = (2.0, 0.99)
        with pytest.raises(ziggurat.InvalidArgument):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        read = [param.grad.clone().tolist() for param in model.parameters()]
        optimizer.step()
        return read

    same_with_and_without(made, run)


@pytest.mark.parametrize("waited", [False, True])
def test_a_gradient_that_a_step_has_consumed_is_no_more(made, waited):
    model, optimizer = made(IN_FILES)
    backward(model)
    grad = model.embedding.weight.grad
    optimizer.step()
    if waited:
        optimizer.synchronize()
    consumed = r"'group0\.\d+'.*before optimizer\.step\(\), and call zero_grad\(\) after"
    uses = (
        grad.clone,
        grad.norm,
        lambda: grad.mul_(2),
        lambda: grad.add_(torch.ones_like(grad)),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1),
        lambda: backward(model, 1),
        optimizer.step,
    )
    for use in uses:
        with pytest.raises(ziggurat.InvalidArgument, match=consumed):
            use()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert optimizer.engine.generation == 2


def keep_the_first(model, optimizer) -> list[float]:
    """Uses gradients beside those of a later backward, as methods do that compare tasks."""
    backward(model, 0)
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad()
    backward(model, 1)
    dots = [(a * b.grad).sum().item() for a, b in zip(kept, model.parameters(), strict=True)]
    for old, param in zip(kept, model.parameters(), strict=True):
        param.grad.add_(old, alpha=0.5)
    optimizer.step()
    return dots


def step_with_the_first(model, optimizer) -> None:
    backward(model, 0)
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad()
    backward(model, 1)
    for old, param in zip(kept, model.parameters(), strict=True):
        param.grad = old
    optimizer.step()


def keep_over_a_step(model, optimizer) -> list[float]:
    backward(model, 0)
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad()
    for param in list(model.parameters())[::2]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [grad.norm().item() for grad in kept]


def exchange(model, optimizer) -> None:
    backward(model, 0)
    one, other = (model.blocks[i].mlp[0].weight for i in (0, 1))
    one.grad, other.grad = other.grad, one.grad
    one.grad.mul_(3)
    optimizer.step()


def add_numbers(model, optimizer) -> None:
    backward(model, 0)
    for param in model.parameters():
        param.grad.add_(1).add_(0.25)
    optimizer.step()


def add_in_another_type(model, optimizer) -> None:
    backward(model, 0)
    model.zero_grad(set_to_none=False)
    for param in model.parameters():
        param.grad.add_(torch.full(param.shape, 1 / 3))
    optimizer.step()


@pytest.mark.parametrize(
    "run",
    [
        keep_the_first,
        step_with_the_first,
        keep_over_a_step,
        exchange,
        add_numbers,
        add_in_another_type,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_tensors_of_their_own(made, run, dtype):
    same_with_and_without(made, run, dtype=dtype)


def test_gradients_are_there_after_a_close(made, monkeypatch):
    found = []
    for placement in (None, IN_FILES):
        model, optimizer = made(placement)
        backward(model)
        optimizer.close()
        found.append([param.grad.clone() for param in model.parameters()])
    assert same(*found)
    model, optimizer = made(IN_FILES)
    backward(model)
    monkeypatch.setattr(engine_content, "free_bytes", lambda: 1000)
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match=r"'group0\.\d+' was in a file.*zero_grad"):
        model.embedding.weight.grad.clone()
    model.zero_grad()
    backward(model)


def test_a_sum_that_the_drive_does_not_give_is_lost_to_who_asks_and_closing_goes_on(made, monkeypatch):
    model, optimizer = made(IN_FILES)
    train(model, optimizer, range(1))
    backward(model)
    large = [param for param in model.parameters() if at_engine(param.grad) is not None]
    kept = large[0].grad
    engine = optimizer.engine

    def failing(*_):
        raise ziggurat.ZigguratError("read the sum: EIO (Input/output error)")

    monkeypatch.setattr(type(engine), "read_gradient", failing)
    large[0].grad = None
    backward(model)  # has a sum of its own
    with pytest.raises(ziggurat.InvalidArgument, match=r"could not be read \(read the sum: EIO.*call zero_grad\(\)"):
        kept.sum()
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match=r"could not be read .*call zero_grad\(\)"):
        large[1].grad.sum()
    optimizer.zero_grad()


def test_a_model_that_is_dropped_with_its_gradients_is_freed(made):
    model, optimizer = made(IN_FILES)
    backward(model)
    engine, kept = weakref.ref(optimizer.engine), weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert engine() is None
    assert kept() is None


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("host", r"are in host memory, .*: a forward brings [\d.]+ KiB, .*; gradients are in memory"),
        (IN_FILES, r"are in /.*/\d+, .*; gradients are in /.*/\d+$"),
    ],
)
def test_the_opening_says_what_is_where(made, capfd, placement, words):
    model, optimizer = made(placement)
    optimizer.open()
    said = capfd.readouterr().err
    assert re.search(rf"^ziggurat: offload\(\): 8 units with [\d.]+ KiB of parameters {words}", said, re.M)
    optimizer.close()
    ziggurat.torch.offload(model := gpt(), memory="1GiB", placement="host")
    ziggurat.torch.AdamW(model.parameters()).open()
    said = capfd.readouterr().err
    assert "memory=1.0 GiB: there is room for all of them" in said
    assert "MiB of memory without activations (plan() says for what)" in said


@pytest.mark.parametrize("placement", ["host", "nvme", IN_FILES])
def test_the_opening_says_what_a_step_moves_and_the_first_second_backward_what_it_adds(made, capfd, placement):
    model, optimizer = made(placement)
    backward(model)
    plan = ziggurat.torch.plan(model, tokens=1)
    moved, in_memory = plan.step, size_text(sum(plan.in_host_memory.values()))
    said = [line for line in capfd.readouterr().err.splitlines() if "without activations" in line]
    words = f"reads {size_text(moved.read)} from the drive and writes {size_text(moved.written)}, at most"
    start = f"ziggurat: offload(): the run takes {in_memory} of memory without activations"
    assert said == [f"{start}; a step of one backward {words} (plan() says for what)"]
    for _ in range(2):
        for _ in range(3):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
    more = ziggurat.torch.plan(model, tokens=1, accumulation=2).step
    added = more.read + more.written - moved.read - moved.written
    said = [line for line in capfd.readouterr().err.splitlines() if "several backwards" in line]
    assert [f"each after the first moves {size_text(added)} more" in line for line in said] == [True] * (placement == IN_FILES)
    optimizer.close()


def test_micro_batches_are_told_of_no_other_backwards(made, capfd):
    model, optimizer = made(IN_FILES)
    batches = [tokens_of(number) for number in range(3)]
    ziggurat.torch.micro_batches(model, [batch[:, :-1] for batch in batches], lambda logits, _: logits.square().mean())
    optimizer.step()
    assert "several backwards" not in capfd.readouterr().err
    optimizer.close()


@pytest.mark.parametrize(("free_bytes", "away"), [(1 << 19, True), (1 << 30, False)])
def test_without_a_choice_memory_decides(made, monkeypatch, capfd, free_bytes, away):
    monkeypatch.setattr(streaming, "free_bytes", lambda: free_bytes)
    model, optimizer = made("nvme")
    optimizer.open()
    said = capfd.readouterr().err
    assert ("gradients are kept in" in said) == away
    backward(model)
    assert any(at_engine(param.grad) is not None for param in model.parameters()) == away
    optimizer.step()


def test_a_wrong_placement_is_refused():
    for wrong in ("drive", "params=nvme,grads=drive", "optimizer=nvme", "params", "", "grads=nvme,", "params=nvme,params=host"):
        with pytest.raises(ziggurat.InvalidArgument, match=r'give "host", or "nvme"'):
            ziggurat.torch.offload(gpt(), memory="1GiB", placement=wrong)
    model = gpt()
    ziggurat.torch.offload(model, memory="1GiB", placement="params=host,grads=nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters())
    with pytest.raises(ziggurat.InvalidArgument, match=r"parameters or gradients in the directory"):
        optimizer.open()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
