# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models and what training loops do with them, in host memory, on NVMe, and beside
PyTorch's optimizer.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, peft or pytest is missing.
"""

import sys

try:
    import peft
    import pytest
    import torch
    from language_models import (
        assert_alike,
        assert_same_bits,
        batches,
        gpt2,
        llama,
        loss_of,
        trained,
        trained_by_torch,
    )
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch

torch.set_num_threads(1)


def train(model, optimizer, steps=6, loss_of=loss_of):
    losses = []
    for batch in batches(steps):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(model, adamw):
    return train(model, adamw(model.parameters(), lr=3e-3))


def mixed(build):
    """Matrices in bf16, all else in fp32."""

    def built():
        model = build()
        for param in model.parameters():
            if param.dim() > 1:
                param.data = param.data.bfloat16()
        return model

    return built


def of_dtype(build, dtype):
    return mixed(build) if dtype == "mixed" else lambda: build().to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("build", "dtype", "steps"),
    [
        (gpt2, "float32", 12),
        (gpt2, "bfloat16", 50),
        (gpt2, "mixed", 12),
        (llama, "float32", 12),
        (llama, "bfloat16", 12),
        (llama, "mixed", 12),
    ],
)
def test_bits_do_not_depend_on_placement_threads_or_waits(build, dtype, steps, tmp_path):
    def loop(model, adamw):
        cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "mixed")
        optimizer = adamw(model.parameters(), lr=3e-3)
        with cast:
            return train(model, optimizer, steps)

    build = of_dtype(build, dtype)
    losses, expected = trained(build, loop)
    assert losses[-1] < losses[0] - 0.5
    for number, (placement, threads, waits) in enumerate(
        [("host", 2, False), ("host", 2, True), ("nvme", 2, False), ("nvme", 1, True)]
    ):
        where = placement if placement == "host" else f"nvme:{tmp_path}/{number}"
        again, found = trained(build, loop, where, threads, waits)
        assert again == losses
        assert_same_bits(found, expected)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_training_is_torchs(build, tmp_path):
    """One step within rounding: a bit or two of a parameter, and of the update, which is about the
    learning rate. The losses of 50 steps to 1e-4."""

    def step(model, adamw):
        return train(model, adamw(model.parameters(), lr=3e-3, weight_decay=0.1), 1)

    _, ours = trained(build, step, f"nvme:{tmp_path}/state", waits=True)
    _, theirs = trained_by_torch(build, step)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            a.view(torch.float32), b.view(torch.float32), rtol=4e-7, atol=4e-8
        )

    def run(model, adamw):
        return train(model, adamw(model.parameters(), lr=1e-3), 50)

    assert trained(build, run)[0] == pytest.approx(trained_by_torch(build, run)[0], rel=1e-4)


def accumulating(model, adamw):
    optimizer, losses = adamw(model.parameters(), lr=3e-3), []
    for i, batch in enumerate(batches(12)):
        loss = loss_of(model, batch) / 3
        loss.backward()
        losses.append(loss.item())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def clipping(model, adamw):
    optimizer, norms = adamw(model.parameters(), lr=3e-3), []
    for batch in batches(6):
        loss_of(model, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.5
    return norms


def scaling(model, adamw):
    optimizer, scaler = adamw(model.parameters(), lr=3e-3), torch.amp.GradScaler("cpu")
    values = []
    for i, batch in enumerate(batches(8)):
        loss = loss_of(model, batch)
        scaler.scale(loss * (float("inf") if i == 3 else 1)).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            values.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values += [loss.item(), scaler.get_scale()]
    assert values[-1] < 65536  # the step of an infinite loss was left out
    return [value for value in values if value == value]


def unfreezing(model, adamw):
    """Parameters that are frozen at first."""
    optimizer = adamw(model.parameters(), lr=3e-3)
    for param in model.transformer.h[0].parameters():
        param.requires_grad_(False)
    losses = train(model, optimizer, 4)
    for param in model.transformer.h[0].parameters():
        param.requires_grad_(True)
    return losses + train(model, optimizer, 4)


def freezing(model, adamw):
    optimizer = adamw(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = train(model, optimizer, 3)
    model.transformer.wpe.weight.requires_grad_(False)
    losses += train(model, optimizer, 3)
    model.transformer.wpe.weight.requires_grad_(True)
    return losses + train(model, optimizer, 3)


def averaging(model, adamw):
    optimizer = adamw(model.parameters(), lr=3e-3)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    losses = []
    for batch in batches(6):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        average.update_parameters(model)
        with torch.no_grad():
            losses.append(loss_of(average, batch).item())
    return losses


def generating(model, adamw):
    optimizer, values = adamw(model.parameters(), lr=3e-3), []
    for batch in batches(5):
        values += train(model, optimizer, 1)
        model.eval()
        words = model.generate(batch[:, :8], max_new_tokens=6, do_sample=False)
        values.append(words.double().mean().item())
        model.train()
    return values


def inferring(model, adamw):
    optimizer, values = adamw(model.parameters(), lr=3e-3), []
    for batch in batches(4):
        values += train(model, optimizer, 1)
        for training in (False, True):
            with torch.inference_mode():
                values.append(loss_of(model.train(training), batch).item())
    return values


def in_parts(model, adamw):
    """The model itself is not called, nor its last layer, whose weight is used."""

    def loss(model, batch):
        hidden = model.transformer(batch[:, :-1]).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.lm_head.weight).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    return train(model, adamw(model.parameters(), lr=3e-3), 5, loss)


def loading(model, adamw):
    optimizer = adamw(model.parameters(), lr=3e-3)
    model.load_state_dict(gpt2(seed=2).state_dict())
    values = train(model, optimizer, 3)
    for param, kept in zip(model.parameters(), gpt2(seed=3).parameters(), strict=True):
        optimizer.synchronize()
        with torch.no_grad():
            param.copy_(kept)
    values += train(model, optimizer, 3)
    model.load_state_dict(gpt2(seed=4).state_dict())  # while a step is under way
    values += train(model, optimizer, 3)
    model.transformer.load_state_dict(gpt2(seed=5).transformer.state_dict())
    return values + train(model, optimizer, 3)


def reading(model, adamw):
    """What is saved after a step is that step's."""
    optimizer, values = adamw(model.parameters(), lr=3e-3), []
    for _ in range(3):
        train(model, optimizer, 1)
        for state in (model.state_dict(), model.transformer.h[1].state_dict()):
            values.append(sum(v.double().sum().item() for v in state.values()))
    return values


def adding(model, adamw):
    """Parameters that come to the optimizer later."""
    first, *others = model.transformer.h
    late = {id(p) for block in others for p in block.parameters()}
    optimizer = adamw([p for p in model.parameters() if id(p) not in late], lr=3e-3)
    values = train(model, optimizer, 3)
    optimizer.add_param_group(
        {"params": [p for p in model.parameters() if id(p) in late], "lr": 1e-3}
    )
    return values + train(model, optimizer, 3)


def with_a_closure(model, adamw):
    optimizer, values = adamw(model.parameters(), lr=3e-3), []
    for batch in batches(4):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        values.append(optimizer.step(closure).item())
    return values


def clearing(model, optimizer, clear):
    values = []
    for batch in batches(4):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        clear()  # while the step is under way
        values.append(loss.item())
    return values


def keeping_zeros(model, adamw):
    optimizer = adamw(model.parameters(), lr=3e-3)
    return clearing(model, optimizer, lambda: optimizer.zero_grad(set_to_none=False))


def without_zero_grad(model, adamw):
    return clearing(model, adamw(model.parameters(), lr=1e-3), lambda: None)


def failing_backwards(model, adamw):
    """A backward that ends in the middle, and is made again."""
    optimizer, values = adamw(model.parameters(), lr=3e-3), []

    def fail(*_):
        raise ValueError("in the middle")

    for i, batch in enumerate(batches(6)):
        handle = model.transformer.h[0].register_full_backward_pre_hook(fail)
        if i % 2:
            with pytest.raises(ValueError, match="in the middle"):
                loss_of(model, batch).backward()
            optimizer.zero_grad()
        handle.remove()
        values += train(model, optimizer, 1)
    return values


def penalized(model, adamw):
    """A term of the loss that uses the parameters themselves, after the forward."""
    optimizer = adamw(model.parameters(), lr=3e-3)

    def loss(model, batch):
        plain = loss_of(model, batch)
        return plain + 1e-3 * sum(p.float().square().sum() for p in model.parameters())

    return train(model, optimizer, 5, loss)


@pytest.mark.parametrize(
    "loop",
    [
        accumulating,
        clipping,
        scaling,
        unfreezing,
        freezing,
        averaging,
        generating,
        inferring,
        in_parts,
        loading,
        reading,
        adding,
        with_a_closure,
        keeping_zeros,
        without_zero_grad,
        failing_backwards,
        penalized,
    ],
)
def test_what_loops_do(loop, tmp_path):
    assert_alike(tmp_path, gpt2, loop)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=5e-3, total_steps=12),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
            ],
            [4],
        ),
    ],
    ids=["OneCycle", "Plateau", "WarmRestarts", "Exponential", "Sequential"],
)
def test_schedulers(schedule, tmp_path):
    def loop(model, adamw):
        optimizer = adamw(model.parameters(), lr=3e-3)
        scheduler, values = schedule(optimizer), []
        for batch in batches(12):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss.item()] if plateau else []))
            group = optimizer.param_groups[0]
            values += [loss.item(), group["lr"], group["betas"][0]]
        assert len(set(values[1::3])) > 1
        return values

    assert_alike(tmp_path, gpt2, loop)


@pytest.mark.parametrize("build", [gpt2, lambda: llama(tie_word_embeddings=True)])
def test_tied_weights_are_one_parameter(build, tmp_path):
    def loop(model, adamw):
        optimizer = adamw(model.parameters(), lr=3e-3)
        losses = train(model, optimizer)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        return losses

    assert_alike(tmp_path, build, loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_has_state_of_what_is_trained_only(dtype, tmp_path):
    def built():
        base = llama().to(getattr(torch, dtype))
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        torch.manual_seed(5)
        return peft.get_peft_model(base, config)

    def loop(model, adamw):
        torch.manual_seed(6)
        optimizer = adamw(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, 8)
        if isinstance(optimizer, ziggurat.torch.AdamW):
            assert set(optimizer._opened_with) == {p for p in model.parameters() if p.requires_grad}
        return losses

    assert_alike(tmp_path, built, loop, torchs=1e-4 if dtype == "float32" else 3e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, tmp_path):
    def built():
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    assert_alike(tmp_path, built, plain)


@pytest.mark.parametrize("how", ["whole", "blocks", "after"])
def test_compiled_models(how, tmp_path):
    def loop(model, adamw):
        if how == "blocks":
            for block in model.transformer.h:
                block.compile(backend="aot_eager")
        optimizer = adamw(model.parameters(), lr=3e-3)
        if how == "after":  # what was learned of the waits no longer holds
            losses = train(model, optimizer, 2)
            optimizer.synchronize()
            model.compile(backend="aot_eager")
            return losses + train(model, optimizer, 4)
        called = torch.compile(model, backend="aot_eager") if how == "whole" else model
        return train(called, optimizer, 5)

    assert_alike(tmp_path, gpt2, loop)


def test_parameters_that_are_used_without_calling_their_module(tmp_path):
    class Attentive(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.embed = torch.nn.Embedding(256, 32)
            self.attend = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            layer = torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
            self.encode = torch.nn.TransformerEncoder(layer, 1)
            self.head = torch.nn.Linear(32, 256)

        def forward(self, tokens):
            hidden = self.embed(tokens)
            hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
            return self.head(self.encode(hidden))

    def loss(model, batch):
        logits = model(batch[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def loop(model, adamw):
        optimizer, values = adamw(model.parameters(), lr=3e-3), []
        for batch in batches(6):
            values += train(model, optimizer, 1, loss)
            model.eval()
            with torch.no_grad():  # the fused path, which calls no submodule
                values.append(loss(model, batch).item())
            model.train()
        return values

    assert_alike(tmp_path, Attentive, loop)


def test_two_models_at_once(tmp_path):
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = gpt2(), llama()

    def loop(pair, adamw):
        first = adamw(pair.one.parameters(), pair.one, lr=3e-3)
        second = adamw(pair.two.parameters(), pair.two, lr=1e-3)
        values = []
        for batch in batches(5):
            one, two = loss_of(pair.one, batch), loss_of(pair.two, batch)
            (one + 0.5 * two).backward()
            second.step()
            first.step()
            first.zero_grad()
            second.zero_grad()
            values += [one.item(), two.item()]
        return values

    assert_alike(tmp_path, Pair, loop)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
