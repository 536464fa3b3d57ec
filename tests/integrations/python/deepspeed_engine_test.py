# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed's engine beside a plain PyTorch loop that does the same arithmetic.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def config(**more):
    return {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAMW} | more


def made(model, **more):
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(**more)
    )[0]


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randint(61, (8, 9))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])


def train(engine, micro_steps: int) -> list[float]:
    losses = []
    for step in range(micro_steps):
        loss = loss_of(engine, batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plainly(model, optimizer, micro_steps: int, accumulation: int, clipping: float):
    """PyTorch's words for what DeepSpeed's configuration asks for, in fp32: losses and norms."""
    losses, norms = [], []
    for step in range(micro_steps):
        loss = loss_of(model, batch(step))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            limit = clipping if clipping > 0 else float("inf")
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def assert_close(ours, theirs, steps: int) -> None:
    """Both compute in fp32 in another order of operations: each step rounds the last bit or two of
    the parameter and of an update of about lr = 1e-2, and the next gradients see the difference."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=4e-6 * steps, atol=4e-6 * steps)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_fp32_is_a_plain_loop(accumulation, clipping):
    engine = made(
        small_model(), gradient_accumulation_steps=accumulation, gradient_clipping=clipping
    )
    plain = small_model()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])
    ours = train(engine, 6 * accumulation)
    theirs, norms = train_plainly(plain, optimizer, 6 * accumulation, accumulation, clipping)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-4)
    assert_close(engine, plain, 6)
    assert (engine.global_steps, engine.micro_steps) == (6, 6 * accumulation)
    assert engine.global_samples == 6 * accumulation * 8


def test_clipping_is_on_unless_it_is_off():
    assert made(small_model()).gradient_clipping() == 1.0  # DeepSpeed 0.19's default


def test_parameters_change_at_the_boundary_alone():
    engine = made(small_model(), gradient_accumulation_steps=3)
    before = [param.detach().clone() for param in engine.parameters()]
    for step in range(3):
        assert engine.is_gradient_accumulation_boundary() == (step == 2)
        engine.backward(loss_of(engine, batch(step)))
        assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
        engine.step()
        assert engine.was_step_applied() == (step == 2)
    assert not any(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))


def test_backward_returns_the_share_of_the_loss():
    engine = made(small_model(), gradient_accumulation_steps=4)
    loss = loss_of(engine, batch(0))
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)


def test_a_step_with_gradients_that_are_not_finite_is_left_out():
    engine = made(small_model(), bf16={"enabled": True})
    train(engine, 1)
    before = [param.detach().clone() for param in engine.parameters()]
    engine.backward(loss_of(engine, batch(1)) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    assert engine.global_steps == 2
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    train(engine, 1)
    assert engine.was_step_applied()


def test_bf16_parameters_have_fp32_masters():
    engine = made(small_model(), bf16={"enabled": True})
    assert {param.dtype for param in engine.parameters()} == {torch.bfloat16}
    train(engine, 5)
    plain = small_model(torch.bfloat16)
    masters = [param.detach().float() for param in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, **ADAMW["params"])
    for step in range(5):
        loss_of(plain, batch(step)).backward()
        for master, param in zip(masters, plain.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, plain.parameters(), strict=True):
                param.copy_(master)
    # One rounding to bf16 that falls on the other side is 2^-8 of the value, and sends Adam's next
    # updates, each of about lr, elsewhere where a gradient is near zero.
    for ours, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        assert (ours.float() - theirs.float()).abs().mean() < 1e-3


def test_what_is_missing_is_named():
    with pytest.raises(ziggurat.InvalidArgument, match="model is missing"):
        deepspeed.initialize(config=config())
    with pytest.raises(ziggurat.InvalidArgument, match="no configuration"):
        deepspeed.initialize(model=small_model())
    with pytest.raises(ziggurat.ZigguratError, match="Lamb"):
        made(small_model(), optimizer={"type": "Lamb"})
    engine = deepspeed.initialize(model=small_model(), config={"train_batch_size": 8})[0]
    with pytest.raises(ziggurat.InvalidArgument, match="has no optimizer"):
        engine.step()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
