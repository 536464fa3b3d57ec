# SPDX-License-Identifier: Apache-2.0
"""What scripts for DeepSpeed call beside the engine's own: optimizers, loaders, zero, utils, comm.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import argparse
import csv
import os
import subprocess
import sys
import warnings

try:
    import pytest
    import torch
    from deepspeed_runs import batch, loss_of
    from rank_runs import free_port
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
import ziggurat.torch
from ziggurat.deepspeed.comm import Place, place_of

BASE = {"train_micro_batch_size_per_gpu": 8}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
BF16 = {"bf16": {"enabled": True}}


def train(engine, micro_steps: int) -> list[float]:
    losses = []
    for step in range(micro_steps):
        loss = loss_of(engine, batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bits(engine) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Optimizers


PLAIN = {"lr": 1e-2}
DECAYS = {"lr": 1e-2, "weight_decay": 0.1}
COUPLED = {"adam_w_mode": False}
CLIENTS = [  # a script's optimizer, and what the configuration says instead
    (lambda p: torch.optim.AdamW(p, **DECAYS), "AdamW", DECAYS),
    (lambda p: torch.optim.Adam(p, **DECAYS), "Adam", DECAYS | COUPLED),
    (lambda p: torch.optim.SGD(p, **PLAIN, momentum=0.9), "SGD", PLAIN | {"momentum": 0.9}),
    (lambda p: torch.optim.Adagrad(p, **PLAIN), "Adagrad", PLAIN),
    (lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(p, **PLAIN), "AdamW", PLAIN),
    (
        lambda p: deepspeed.ops.adam.FusedAdam(p, **DECAYS, adam_w_mode=False),
        "Adam",
        DECAYS | COUPLED,
    ),
    (lambda p: deepspeed.ops.lion.DeepSpeedCPULion(p), "Lion", {}),
    (lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p), "Adagrad", PLAIN),
    (lambda p: ziggurat.torch.AdamW(p, **DECAYS), "AdamW", DECAYS),
]


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize(("client", "name", "params"), CLIENTS)
def test_a_scripts_optimizer_is_the_one_of_that_name(client, name, params, as_function):
    model, other = small_model(), small_model()
    given = client if as_function else client(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=given, config=BASE | BF16)[0]
    named = {"optimizer": {"type": name, "params": params}}
    expected = deepspeed.initialize(model=other, config=BASE | BF16 | named)[0]
    train(engine, 4)
    train(expected, 4)
    assert same(bits(engine), bits(expected))


def test_an_optimizer_of_ours_and_the_configuration_say_the_same(tmp_path):
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    on_drive = {"zero_optimization": {"stage": 2, "offload_optimizer": drive}}
    for more, words in (
        (on_drive, "placement='host', but \"zero_optimization.offload_optimizer.device\""),
        ({"placement": f"auto:{tmp_path}"}, f"give the optimizer placement='auto:{tmp_path}'"),
        ({"state_format": "8bit"}, "has state_format='fp32', but \"state_format\""),
        ({"threads": 2}, "has threads=1, but \"threads\""),
    ):
        model = small_model()
        client = ziggurat.torch.AdamW(model.parameters(), threads=1)
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            deepspeed.initialize(model=model, optimizer=client, config=BASE | more)
    assert not list(tmp_path.iterdir())
    where = {"placement": f"nvme:{tmp_path}", "threads": 1}
    client = ziggurat.torch.AdamW(model.parameters(), **where)
    engine = deepspeed.initialize(model=model, optimizer=client, config=BASE | on_drive)[0]
    train(engine, 2)
    engine.destroy()
    assert list(tmp_path.glob("rank*.ziggurat"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"placement": "auto:{}/s"}, {"placement": "auto:{}/s"}),
        ({"placement": "auto:{}/s/"}, {"placement": "auto:{}/s"}),
        ({"host_memory": 512 << 20}, {"host_memory": "512MiB"}),
        ({"host_memory": "0.5GiB"}, {"host_memory": "512M"}),
    ],
)
def test_an_optimizer_of_ours_may_spell_what_the_configuration_says_in_another_way(
    given, named, tmp_path
):
    given, named = (
        {key: value.format(tmp_path) if key == "placement" else value for key, value in its.items()}
        for its in (given, named)
    )
    model = small_model()
    client = ziggurat.torch.AdamW(model.parameters(), **given)
    loss_of(model, batch(0)).backward()
    client.step()  # "auto" has chosen
    client.zero_grad()
    engine = deepspeed.initialize(model=model, optimizer=client, config=BASE | named)[0]
    engine.destroy()


def test_a_scheduler_for_the_scripts_optimizer_steers_the_engines(tmp_path):
    model = small_model()
    client = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-2},
        ],
        lr=1e-2,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.5)
    engine, optimizer, _, returned = deepspeed.initialize(
        model=model, optimizer=client, lr_scheduler=scheduler, config=BASE
    )
    assert returned is scheduler
    with warnings.catch_warnings(action="error"):  # PyTorch's, of a scheduler before a step
        train(engine, 2)
    assert engine.get_lr() == [2.5e-3, 5e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    engine.save_checkpoint(tmp_path)
    train(engine, 1)
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == [2.5e-3, 5e-3]
    train(engine, 1)
    assert engine.get_lr() == [1.25e-3, 2.5e-3]


def test_groups_of_parameters_keep_their_settings_and_get_names():
    model = small_model()
    groups = [
        {"params": (p for p in model.parameters() if p.dim() > 1), "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-2},
    ]
    optimizer = deepspeed.initialize(model=model, model_parameters=groups, config=BASE | ADAMW)[1]
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert (matrices["lr"], vectors["lr"]) == (1e-2, 2e-2)
    assert matrices["param_names"] == ["0.weight", "2.weight", "5.weight"]


def test_a_scheduler_may_be_a_function_of_the_optimizer():
    engine = deepspeed.initialize(
        model=small_model(),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
        config=BASE | ADAMW,
    )[0]
    train(engine, 2)
    assert engine.get_lr() == [2.5e-3]


def handed_over(model, client, plain, other, more=None):
    """Makes six steps, of which the last three with the engine that takes `client` over, and the
    same ones of `plain` by `other` alone. Returns the engine."""
    for step in range(6):
        if step == 3:
            config = BASE | (more or {}) | {"gradient_clipping": 0.0}
            engine = deepspeed.initialize(model=model, optimizer=client, config=config)[0]
        if step < 3:
            loss_of(model, batch(step)).backward()
            client.step()
            client.zero_grad()
        else:
            engine.backward(loss_of(engine, batch(step)))
            engine.step()
        loss_of(plain, batch(step)).backward()
        other.step()
        other.zero_grad()
    return engine


def test_a_scripts_optimizer_that_has_made_steps_goes_on():
    model, plain = small_model(), small_model()
    client = torch.optim.AdamW(model.parameters(), **DECAYS)
    theirs = torch.optim.AdamW(plain.parameters(), **DECAYS)
    handed_over(model, client, plain, theirs)
    # Another order of operations rounds the last bits of updates of about lr.
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{}, BF16])
@pytest.mark.parametrize(
    "kind",
    [
        deepspeed.ops.adam.DeepSpeedCPUAdam,
        deepspeed.ops.lion.DeepSpeedCPULion,
        deepspeed.ops.adagrad.DeepSpeedCPUAdagrad,
    ],
)
def test_an_optimizer_of_deepspeeds_name_that_has_made_steps_goes_on(kind, more):
    dtype = torch.bfloat16 if more else torch.float32
    model, plain = small_model(dtype), small_model(dtype)
    client, alone = kind(model.parameters(), lr=1e-2), kind(plain.parameters(), lr=1e-2)
    engine = handed_over(model, client, plain, alone, more)
    assert same(bits(engine), list(plain.parameters()))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        found, expected = engine.optimizer.state_of(one), alone.state_of(other)
        assert all(torch.equal(found[key], value) for key, value in expected.items())


class OfSomebody(torch.optim.AdamW):
    pass


def test_an_optimizer_without_counterpart_is_refused_by_name():
    model = small_model()
    for client, name in (
        (torch.optim.RMSprop(model.parameters()), "RMSprop"),
        (OfSomebody(model.parameters()), "OfSomebody"),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad"),
    ):
        with pytest.raises(ziggurat.Unimplemented, match=name):
            deepspeed.initialize(model=model, optimizer=client, config=BASE)
    with pytest.raises(ziggurat.Unimplemented, match="bias_correction"):
        deepspeed.ops.adam.FusedAdam(model.parameters(), bias_correction=False)


def test_an_optimizer_of_deepspeeds_name_works_alone():
    model, plain = small_model(), small_model()
    ours = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for net, optimizer in ((model, ours), (plain, theirs)):
        for step in range(3):
            loss_of(net, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Another order of operations rounds the last bits of updates of about lr.
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# fp16


def test_the_loss_scale_of_fp16_moves_and_hides_itself():
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=small_model(),
        config=BASE | ADAMW | {"fp16": fp16, "zero_optimization": {"stage": 2}},
    )
    assert {param.dtype for param in engine.parameters()} == {torch.float16}
    scales = []
    for step in range(6):
        loss = loss_of(engine, batch(step)) * (float("inf") if step == 3 else 1)
        assert torch.equal(engine.backward(loss), loss)
        engine.step()
        scales.append(engine.cur_scale)
        assert optimizer.overflow == (step == 3)
        if step == 0:
            plain = small_model()
            loss_of(plain, batch(0)).backward()
            norm = torch.cat([p.grad.reshape(-1) for p in plain.parameters()]).norm()
            # fp16 has 11 bits in each of the gradients and in what they are made of.
            assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-2)
    assert scales == [256, 256, 512, 256, 256, 256]
    assert (engine.skipped_steps, engine.dynamic_loss_scale()) == (1, True)
    assert engine.loss_scale() == 0.0


@pytest.mark.parametrize("window", [3, 7])
def test_fp16_trains_as_with_torchs_grad_scaler(window):
    """From a scale at which gradients really overflow, and with a loss that does once."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}
    fp16["loss_scale_window"] = window
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    config = BASE | {"optimizer": adamw, "fp16": fp16, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=small_model(), config=config)[0]
    plain = small_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=window)
    for step in range(40):
        bad = float("inf") if step == 25 else 1.0
        loss = loss_of(engine, batch(step))
        engine.backward(loss * bad)
        engine.step()

        with torch.autocast("cpu", torch.float16):
            expected = loss_of(plain, batch(step))
        scaler.scale(expected * bad).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        overflow = scaler.get_scale() < before
        if overflow or step == 0:
            # DeepSpeed does not count the first step after an overflow.
            scaler._growth_tracker.fill_(-1)
        assert (engine.optimizer.overflow, engine.cur_scale) == (overflow, scaler.get_scale())
        # PyTorch's weights are fp32, rounded for each product; ours are what a step rounded.
        assert loss.item() == pytest.approx(expected.item(), rel=5e-3, abs=5e-3)
    assert engine.skipped_steps >= 3 and scaler.get_scale() < 2.0**22


def test_a_fixed_loss_scale_stays():
    fp16 = {"enabled": True, "loss_scale": 128.0}
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | {"fp16": fp16})[0]
    engine.backward(loss_of(engine, batch(0)) * float("inf"))
    engine.step()
    assert (engine.cur_scale, engine.loss_scale(), engine.skipped_steps) == (128.0, 128.0, 1)


def test_a_backward_of_the_scripts_own_needs_the_loss_scale():
    fp16 = {"enabled": True, "initial_scale_power": 8}
    more = {"fp16": fp16, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | more)[0]
    expected = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | more)[0]
    for step in range(4):
        engine.scale(loss_of(engine, batch(step))).backward()
        engine.step()
    train(expected, 4)
    # The loss is divided by 2 here behind backward, where all of fp16's numbers are halved exactly.
    assert same(bits(engine), bits(expected))
    assert engine.get_global_grad_norm() == expected.get_global_grad_norm()
    for step in range(2):
        loss_of(engine, batch(step)).backward()
        if step == 0:
            engine.step()
    with pytest.raises(ziggurat.InvalidArgument, match=r"engine\.scale"):
        engine.step()


# Micro-steps and sizes


def test_a_backward_of_the_scripts_own_counts_as_the_engines():
    accumulates = {"gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | accumulates)[0]
    expected = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | accumulates)[0]
    for step in range(4):
        loss_of(engine, batch(step)).backward()
        engine.step()
    train(expected, 4)
    assert same(bits(engine), bits(expected))


def test_bf16_takes_any_gradient_where_it_is_told_to():
    bf16 = {"enabled": True, "check_grad_overflow": False}
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | {"bf16": bf16})[0]
    engine.backward(loss_of(engine, batch(0)) * float("nan"))
    engine.step()
    assert (engine.was_step_applied(), engine.skipped_steps) == (True, 0)
    assert all(param.isnan().any() for param in engine.parameters())


def test_the_script_may_say_where_the_boundary_is():
    engine = deepspeed.initialize(
        model=small_model(), config=BASE | ADAMW | {"gradient_accumulation_steps": 2}
    )[0]
    engine.set_gradient_accumulation_boundary(False)
    for step in range(3):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
        assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, batch(3)))
    engine.step()
    assert engine.was_step_applied()


def test_the_batch_grows_by_micro_steps():
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW)[0]
    engine.set_train_batch_size(24)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.get_batch_info() == (24, 8, 3)
    with pytest.raises(ziggurat.InvalidArgument, match="8 samples"):
        engine.set_train_batch_size(12)


def test_a_step_inside_no_sync_is_refused():
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW)[0]
    with engine.no_sync():
        engine.backward(loss_of(engine, batch(0)))
        with pytest.raises(ziggurat.InvalidArgument, match="no_sync"):
            engine.step()
    engine.step()


def test_an_engine_has_its_modules_attributes():
    model = small_model()
    model.of_the_model = 7
    engine = deepspeed.initialize(model=model, config=BASE | ADAMW)[0]
    assert engine.of_the_model == 7
    assert (engine.module, engine.world_size, engine.global_rank) == (model, 1, 0)
    assert engine.device == torch.device("cpu") or engine.device.index == 0
    with pytest.raises(AttributeError, match="not_there"):
        _ = engine.not_there
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training


# Data


def test_the_loader_gives_micro_batches_and_repeats():
    data = torch.utils.data.TensorDataset(torch.arange(20))
    _, _, loader, _ = deepspeed.initialize(
        model=small_model(),
        training_data=data,
        collate_fn=lambda rows: torch.stack([row[0] for row in rows]),
        config=BASE | ADAMW,
    )
    batches = list(loader)
    assert [len(one) for one in batches] == [8, 8, 4]
    assert sorted(torch.cat(batches).tolist()) == list(range(20))
    assert torch.cat(batches).tolist() != list(range(20))
    assert [len(one) for one in loader] == [8, 8, 4]
    repeating = deepspeed.utils.RepeatingLoader(loader)
    assert [len(next(repeating)) for _ in range(5)] == [8, 8, 4, 8, 8]
    drops = deepspeed.initialize(
        model=small_model(),
        training_data=data,
        config=BASE | ADAMW | {"dataloader_drop_last": True},
    )[2]
    assert len(drops) == 2


# Monitors and lines


def test_figures_go_to_csv_files(tmp_path):
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}
    engine = deepspeed.initialize(
        model=small_model(), config=BASE | ADAMW | {"csv_monitor": files, "scheduler": schedule}
    )[0]
    rates = []
    for _ in range(3):
        train(engine, 1)
        rates.append(engine.get_lr()[0])
    with (tmp_path / "job" / "Train_Samples_lr.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "lr"]
    assert [(int(s), float(v)) for s, v in rows[1:]] == [
        (8 * (i + 1), rate) for i, rate in enumerate(rates)
    ]


def test_a_monitor_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ziggurat.InvalidArgument, match="pip install wandb"):
        deepspeed.initialize(
            model=small_model(), config=BASE | ADAMW | {"wandb": {"enabled": True}}
        )


def test_progress_and_times_are_said(capsys, monkeypatch):
    monkeypatch.setattr(deepspeed.logger.handlers[0], "stream", sys.stderr)
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "dump_state": True}
    more |= {"gradient_accumulation_steps": 2, "memory_breakdown": True}
    engine = deepspeed.initialize(model=small_model(), config=BASE | ADAMW | more)[0]
    train(engine, 8)
    lines = capsys.readouterr().err
    assert lines.count("micro-step forward") == 8
    assert lines.count("lr 0.01, 0 steps skipped") == 2
    assert "step 4: forward" in lines and "memory: " in lines
    assert '"steps_per_print": 2' in lines


def test_a_line_is_said_by_the_ranks_that_are_asked_to(capsys, monkeypatch):
    monkeypatch.setattr(deepspeed.logger.handlers[0], "stream", sys.stderr)
    for ranks in (None, [], [-1], [0], [1, 0], [1]):
        deepspeed.log_dist(f"said by {ranks}", ranks)
    said = capsys.readouterr().err
    assert all(f"said by {ranks}" in said for ranks in (None, [], [-1], [0], [1, 0]))
    assert "said by [1]" not in said  # this is rank 0


# zero and utils


def test_stage_3_scripts_read_and_write_whole_parameters(tmp_path):
    with deepspeed.zero.Init(config_dict_or_path=BASE, remote_device="cpu"):
        model = small_model()
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    engine = deepspeed.initialize(
        model=model,
        config=BASE
        | ADAMW
        | BF16
        | {"zero_optimization": {"stage": 3, "offload_optimizer": offload}},
    )[0]
    deepspeed.zero.register_external_parameter(engine, model[0].weight)
    train(engine, 2)
    weight = model[2].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        assert weight.shape == (130, 8 * 48)
        weight.fill_(0.5)
    assert (deepspeed.utils.safe_get_full_fp32_param(model[0].weight) != 0).any()
    train(engine, 1)
    with deepspeed.zero.GatheredParameters([weight]):
        assert (weight - 0.5).abs().max() < 0.1
    assert deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.Linear]) == [model[2], model[5]]
    engine.destroy()


def test_models_are_made_in_the_type_that_they_are_trained_in():
    for arguments, dtype in (
        ({"config_dict_or_path": BASE | BF16}, torch.bfloat16),
        ({"config": BASE | {"fp16": {"enabled": True}}}, torch.float16),
        ({"config_dict_or_path": BASE | BF16, "dtype": torch.float32}, torch.float32),
        ({"config_dict_or_path": BASE | BF16, "enabled": False}, torch.float32),
        ({}, torch.float32),
    ):
        with deepspeed.zero.Init(**arguments):
            assert torch.nn.Linear(2, 2).weight.dtype == dtype
        assert torch.nn.Linear(2, 2).weight.dtype == torch.float32


@pytest.mark.parametrize("steps", [0, 2])
def test_masters_and_moments_are_read_and_set(steps):
    utils = deepspeed.utils
    model = small_model()
    engine = deepspeed.initialize(model=model, config=BASE | ADAMW | BF16)[0]
    train(engine, steps)
    weight, bias = model[2].weight, model[2].bias
    master = utils.safe_get_full_fp32_param(weight)
    assert master.dtype == torch.float32
    assert torch.allclose(master, weight.float(), rtol=2**-8)
    assert torch.equal(master, weight.float()) == (steps == 0)
    others = utils.safe_get_full_fp32_param(bias)
    moment = torch.full(weight.shape, 0.25)
    utils.safe_set_full_fp32_param(weight, master + 1e-6)
    utils.safe_set_full_optimizer_state(weight, moment, "exp_avg")
    assert torch.equal(utils.safe_get_full_fp32_param(weight), master + 1e-6)
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), moment)
    assert torch.equal(utils.safe_get_full_fp32_param(bias), others)
    # The next step goes on from them: its moment is 0.9 of what was set, and a tenth of the clipped
    # gradient, which is 1 at most.
    train(engine, 1)
    assert (utils.safe_get_full_optimizer_state(weight, "exp_avg") - 0.225).abs().max() < 0.1
    assert (utils.safe_get_full_fp32_param(weight) - master).abs().max() > 1e-3
    with pytest.raises(ziggurat.InvalidArgument, match="exp_avg, exp_avg_sq"):
        utils.safe_get_full_optimizer_state(weight, "sum")
    assert utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.zeros(2))) is None


def test_gradients_are_read_and_set_between_backward_and_step():
    model = small_model()
    engine = deepspeed.initialize(model=model, config=BASE | ADAMW)[0]
    bias = model[5].bias
    assert deepspeed.utils.safe_get_full_grad(bias) is None
    engine.backward(loss_of(engine, batch(0)))
    assert deepspeed.utils.safe_get_full_grad(bias).abs().max() > 0
    deepspeed.utils.safe_set_full_grad(bias, torch.zeros_like(bias))
    before = bias.detach().clone()
    engine.step()
    assert torch.equal(bias, before)


def test_activations_are_computed_again():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    deepspeed.checkpointing.checkpoint(function, x).sum().backward()
    assert len(calls) == 2
    assert torch.equal(x.grad, torch.ones(3).cos())


# Command line and ranks


def test_arguments_name_the_configuration(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}')
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    engine = deepspeed.initialize(args=args, model=small_model())[0]
    assert args.local_rank == 0
    assert engine.train_batch_size() == 8
    with pytest.raises(ziggurat.InvalidArgument, match="one of them"):
        deepspeed.initialize(args=args, model=small_model(), config=str(path))


LAUNCHED = [
    ({}, Place(None)),
    (
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
        Place("torchrun", 3, 8, 1, "a:7"),
    ),
    (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Place("Open MPI", 1, 2, 1, "127.0.0.1:29500"),
    ),
    (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "b"},
        Place("MPICH", 1, 4, 1, "b:29500"),
    ),
    (
        {
            "SLURM_PROCID": "5",
            "SLURM_STEP_NUM_TASKS": "6",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "node[03-05,9],other",
        },
        Place("srun", 5, 6, 1, "node03:29500"),
    ),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Place(None)),  # a shell inside an allocation
]


@pytest.mark.parametrize(("environment", "place"), LAUNCHED)
def test_ranks_are_found_where_the_launcher_left_them(environment, place):
    assert place_of(environment) == place


def test_a_launcher_that_names_no_host_is_named():
    environment = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(ziggurat.InvalidArgument, match=r"Open MPI .* MASTER_ADDR"):
        place_of(environment)


ALONE = """
import os, torch
import ziggurat.deepspeed as deepspeed
deepspeed.init_distributed()
deepspeed.init_distributed()
assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", "0")
deepspeed.comm.barrier()
values = torch.ones(2)
deepspeed.comm.all_reduce(values)
print(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank())
print(values.tolist(), deepspeed.__version__.split("+"))
"""


def test_a_process_without_launcher_is_a_job_of_one():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.stdout == "0 1 0\n[1.0, 1.0] ['0.19.8', 'ziggurat']\n", done.stderr


OF_TWO = """
import datetime, sys, torch
import ziggurat.deepspeed as deepspeed
rank, seconds = int(sys.argv[1]), datetime.timedelta(seconds=60)
deepspeed.init_distributed(rank=rank, world_size=2, timeout=seconds)
values = torch.ones(2)
deepspeed.comm.all_reduce(values)
print(values.tolist(), deepspeed.comm.get_local_rank())
"""


def test_a_script_may_say_itself_which_rank_it_is():
    """With the address that the environment has; without one it would wait for nobody."""
    variables = {"MASTER_ADDR", "MASTER_PORT"}
    without = {name: value for name, value in os.environ.items() if name not in variables}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def started(rank, environment):
        command = [sys.executable, "-c", OF_TWO, str(rank)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    both = [started(rank, without | address | {"LOCAL_RANK": str(rank)}) for rank in range(2)]
    for rank, process in enumerate(both):
        said, words = process.communicate(timeout=100)
        assert said == f"[2.0, 2.0] {rank}\n", words
    _, words = started(0, without).communicate(timeout=100)
    assert "2 ranks and no launcher, but MASTER_ADDR is not set" in words


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
