# SPDX-License-Identifier: Apache-2.0
"""ziggurat.hf in transformers.Trainer, ziggurat.torch under Accelerate, and the seams they use.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, accelerate, peft or pytest is
missing. ZIGGURAT_KILLS: how often runs are killed (10).
"""

import inspect
import json
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

try:
    import accelerate
    import peft
    import pytest
    import torch
    import transformers
    from forked_runs import forked_runs
    from language_models import MAJOR, WIDTH, assert_same_bits, batches, bits, gpt2, llama, loss_of
    from transformers import trainer_callback
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.hf
import ziggurat.torch
from ziggurat._checkpoint.resume import random_states

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


class Texts(torch.utils.data.Dataset):
    def __init__(self, count=48):
        self.pieces = torch.cat(batches(count // 4))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def arguments_of(folder, **more):
    common = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "adam_beta2": 0.98,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**(common | more))


def trainer_of(model, arguments, optimizer, callbacks=()):
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=Texts(),
        optimizer_cls_and_kwargs=optimizer,
        callbacks=[*callbacks],
    )


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def of_trainer(trainer):
    return trainer.optimizer.optimizer


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_is_trainers_own_and_the_same_on_nvme(bf16, tmp_path):
    def run(optimizer, name):
        arguments = arguments_of(tmp_path / name, bf16=bf16)
        model = gpt2(resid_pdrop=0.1)
        trainer = trainer_of(model, arguments, optimizer(arguments))
        trainer.train()
        if isinstance(of_trainer(trainer), ziggurat.torch.AdamW):
            of_trainer(trainer).close()
        values = [logged(trainer, name) for name in ("loss", "grad_norm", "learning_rate")]
        return values, bits(model), trainer

    host, on_host, _ = run(lambda a: ziggurat.hf.optimizer(a), "host")
    nvme, on_nvme, trainer = run(
        lambda a: ziggurat.hf.optimizer(a, placement=f"nvme:{tmp_path}/state", threads=2), "nvme"
    )
    assert nvme == host
    assert_same_bits(on_nvme, on_host)
    expected, _, theirs = run(lambda a: None, "torch")
    for ours, torchs in zip(host, expected, strict=True):
        assert ours == pytest.approx(torchs, rel=1e-3 if bf16 else 1e-4)
    losses, norms, rates = host
    assert losses[-1] < losses[0] - 0.5
    assert max(norms) > 0.5  # they were clipped
    assert rates[0] < max(rates) and rates[-1] < max(rates)
    groups = zip(of_trainer(trainer).param_groups, of_trainer(theirs).param_groups, strict=True)
    for ours, torchs in groups:
        assert [p.shape for p in ours["params"]] == [p.shape for p in torchs["params"]]
        for setting in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
            assert ours[setting] == torchs[setting]


@pytest.mark.parametrize(
    ("optim", "kind", "settings"),
    [
        ("adamw_torch", "AdamW", {"betas": (0.9, 0.98), "eps": 1e-8}),
        ("lion_32bit", "Lion", {"betas": (0.9, 0.98)}),
        ("sgd", "SGD", {"momentum": 0.0}),
        ("adagrad", "Adagrad", {"eps": 1e-10}),
    ],
)
def test_optim_names_the_optimizer(optim, kind, settings, tmp_path):
    factory, more = ziggurat.hf.optimizer(arguments_of(tmp_path, optim=optim))
    model = gpt2()
    optimizer = factory()(model, **more)
    assert isinstance(optimizer, getattr(ziggurat.torch, kind))
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 1 for p in others["params"])
    for name, value in (settings | {"lr": 5e-3}).items():
        assert decayed[name] == others[name] == value


def test_settings_come_from_a_file_and_arguments_win(tmp_path):
    (tmp_path / "z.json").write_text(
        json.dumps({"placement": f"nvme:{tmp_path}/state", "threads": 3, "lr": 0.5})
    )
    arguments = arguments_of(tmp_path)
    factory, _ = ziggurat.hf.optimizer(arguments, tmp_path / "z.json", threads=1)
    optimizer = factory()(gpt2())
    assert (optimizer.placement, optimizer._threads) == (f"nvme:{tmp_path}/state", 1)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_trainer_has_and_we_do_not_is_named(tmp_path):
    with pytest.raises(ziggurat.InvalidArgument, match='optim="adafactor" is not known: ziggurat.hf has adamw'):
        ziggurat.hf.optimizer(arguments_of(tmp_path, optim="adafactor"))


class Killed(transformers.TrainerCallback):
    """Kills its own process some time after some step."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds

    def on_step_end(self, *_, **__):
        self.steps -= 1
        if self.steps == 0:
            kill = threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            kill.start()


def run(folder: Path, path: str, build, more, stop=None) -> None:
    """Trains to the end, from where the run before was killed, and leaves bits in `path`."""
    arguments = arguments_of(folder / "out", **more)
    model = build()
    trainer = trainer_of(
        model,
        arguments,
        ziggurat.hf.optimizer(arguments, placement=f"nvme:{folder}/state", threads=1),
        [ziggurat.hf.EveryStep(), *([stop] if stop else [])],
    )
    newest = ziggurat.hf.newest_step(trainer)
    with open(folder / "resumed", "a") as resumed:
        resumed.write(f"{newest}\n")
    ziggurat.hf.train(trainer)
    optimizer = of_trainer(trainer)
    optimizer.synchronize()
    last = torch.tensor([optimizer.param_groups[0]["lr"], trainer.state.global_step])
    torch.save([*bits(model), last], path + ".part")
    os.rename(path + ".part", path)
    optimizer.close()


def lora():
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(llama().bfloat16(), config)


@pytest.mark.parametrize(
    ("build", "more"),
    [
        (lambda: gpt2(resid_pdrop=0.1).bfloat16(), {"save_strategy": "steps", "save_steps": 5}),
        (lora, {}),
    ],
    ids=["gpt2", "lora"],
)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(build, more, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    whole, parts = str(one / "end.pt"), str(two / "end.pt")
    more = more | {"max_steps": 20, "logging_steps": 4}
    draw = random.Random(int(os.environ.get("ZIGGURAT_SEED", "1")))
    kills = int(os.environ.get("ZIGGURAT_KILLS", "10")) // 2
    killed = resumed = 0
    with forked_runs() as runs:
        assert runs.status_of(runs.started(run, one, whole, build, more)) == 0
        while True:
            two.mkdir(exist_ok=True)
            stop = Killed(draw.randint(1, 5), draw.uniform(0, 0.1)) if killed < kills else None
            status = runs.status_of(runs.started(run, two, parts, build, more, stop))
            if status == -signal.SIGKILL:
                killed += 1
                continue
            assert status == 0  # it came to its end
            for a, b in zip(torch.load(whole), torch.load(parts), strict=True):
                assert torch.equal(a, b)
            resumed += (two / "resumed").read_text().count("newest-step")
            if killed == kills:
                break
            shutil.rmtree(two)  # the next run begins anew
    assert resumed > 0


def test_trainer_has_the_random_state_of_its_accelerator(monkeypatch):
    each = [torch.arange(3, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    states = random_states() | {"xpu": each}
    assert ziggurat.hf._as_trainer_has(states)["xpu"] is each[1]


def of_8_steps(folder, build, placement, **more):
    """A run that keeps its checkpoints of steps 4 and 8, by itself or resumed."""
    saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    arguments = arguments_of(folder / "out", **(saved | more))
    made = None
    if placement is not None:
        made = ziggurat.hf.optimizer(arguments, placement=placement.format(folder), threads=1)
    return trainer_of(build(), arguments, made)


def gpt2_bf16():
    return gpt2(resid_pdrop=0.1).bfloat16()


def in_the_end(trainer, resume_from=None):
    """Parameters, and the state of the optimizer."""
    trainer.train(resume_from_checkpoint=resume_from)
    optimizer = of_trainer(trainer)
    state = optimizer.state_dict()["state"]
    of_params = bits(trainer.model)
    if isinstance(optimizer, ziggurat.torch.AdamW):
        optimizer.close()
    return of_params + [entry[key] for entry in state.values() for key in sorted(entry)]


@pytest.mark.parametrize("placement", ["host", "nvme:{}/state"])
@pytest.mark.parametrize(
    "build",
    [lambda: gpt2(resid_pdrop=0.1), lambda: gpt2(resid_pdrop=0.1).bfloat16(), lora],
    ids=["fp32", "bf16", "lora"],
)
def test_a_run_goes_on_from_any_of_its_checkpoints_with_the_same_bits(build, placement, tmp_path):
    whole = in_the_end(of_8_steps(tmp_path, build, placement))
    kept = tmp_path / "out" / "checkpoint-4"
    entry = torch.load(kept / "optimizer.pt", weights_only=True)["state"][0]
    assert entry["step"] == 4 and {"exp_avg", "exp_avg_sq"} < entry.keys()
    # On NVMe the store is that of step 8, and goes back.
    for resumed_at in (placement, "host", "nvme:{}/other"):
        resumed = of_8_steps(tmp_path, build, resumed_at, save_strategy="no")
        with torch.no_grad():
            for param in resumed.model.parameters():
                if param.requires_grad:
                    param.fill_(0.5)  # the checkpoint has the weights
        assert_same_bits(in_the_end(resumed, str(kept)), whole)


@pytest.mark.parametrize("direction", ["ours to torch", "torch's to ours"])
def test_torchs_optimizer_goes_on_from_ours_and_ours_from_torchs(direction, tmp_path):
    here, there = ("host", None) if direction == "ours to torch" else (None, "host")
    whole, resumed = of_8_steps(tmp_path, gpt2, here), of_8_steps(tmp_path, gpt2, there)
    expected = in_the_end(whole)
    state = in_the_end(resumed, str(tmp_path / "out" / "checkpoint-4"))
    # The same formulas in another order of operations, at rates of up to 5e-3; moments that began
    # anew would be another tenth of themselves.
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        if ours.shape == (3 * WIDTH,):
            # An attention's bias of keys changes no output, so its gradients are rounding, and AdamW makes them large.
            ours, theirs = (torch.cat([bias[:WIDTH], bias[2 * WIDTH :]]) for bias in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for ours, theirs in zip(state, expected, strict=True):
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_by_reference_is_of_its_step_of_the_store(tmp_path):
    def trainer_again(max_steps, placement=f"nvme:{tmp_path}/state", state="store"):
        saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": max_steps}
        arguments = arguments_of(tmp_path / "out", lr_scheduler_type="constant", **saved)
        made = ziggurat.hf.optimizer(arguments, placement=placement, state=state)
        return trainer_of(gpt2().bfloat16(), arguments, made)

    first = trainer_again(8)
    first.train()
    of_trainer(first).close()
    checkpoints = {n: str(tmp_path / "out" / f"checkpoint-{n}") for n in (4, 8)}
    assert torch.load(checkpoints[8] + "/optimizer.pt", weights_only=True)["state"] == {}
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=r"generation \[4\] of the store .* is at generation \[8\]: resume from ziggurat.hf.newest_step",
    ):
        trainer_again(12).train(resume_from_checkpoint=checkpoints[4])
    with pytest.raises(ziggurat.InvalidArgument, match="not in this checkpoint but in the store"):
        trainer_again(12, "host", "full").train(resume_from_checkpoint=checkpoints[8])
    with pytest.raises(ziggurat.InvalidArgument, match="there is a store already"):
        trainer_again(12).train()
    with pytest.raises(ziggurat.DataLoss, match="made without ziggurat.hf.EveryStep"):
        ziggurat.hf.newest_step(trainer_again(12))
    second = trainer_again(12)
    second.train(resume_from_checkpoint=checkpoints[8])
    whole = trainer_again(12, f"nvme:{tmp_path}/whole")
    whole.train()
    of_trainer(second).synchronize()
    of_trainer(whole).synchronize()
    assert_same_bits(bits(second.model), bits(whole.model))
    other = trainer_again(12, f"nvme:{tmp_path}/other")
    other.model.load_state_dict(gpt2(seed=9).state_dict())
    other.args.max_steps = 8
    other.args.save_strategy = transformers.trainer_utils.SaveStrategy.NO
    other.train()
    of_trainer(other).close()
    with pytest.raises(ziggurat.InvalidArgument, match=r"other has other parameters"):
        trainer_again(12, f"nvme:{tmp_path}/other").train(resume_from_checkpoint=checkpoints[8])


@pytest.mark.parametrize("placement", ["host", "nvme:{}/state"])
def test_a_state_that_memory_has_no_room_for_is_saved_in_a_folder(placement, monkeypatch, tmp_path):
    whole = in_the_end(of_8_steps(tmp_path / "whole", gpt2_bf16, placement))
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: 1000)
    first = of_8_steps(tmp_path, gpt2_bf16, placement)
    first.train()
    of_trainer(first).close()
    kept = tmp_path / "out" / "checkpoint-4"
    named = torch.load(kept / "optimizer.pt", weights_only=True)
    assert named["state"] == {} and (kept / named["ziggurat"]["checkpoint"]).is_dir()
    monkeypatch.undo()
    # On NVMe the store is that of step 8, and goes back.
    for resumed_at in (placement, "host", "nvme:{}/other"):
        resumed = of_8_steps(tmp_path, gpt2_bf16, resumed_at, save_strategy="no")
        with torch.no_grad():
            for param in resumed.model.parameters():
                param.fill_(0.5)
        assert_same_bits(in_the_end(resumed, str(kept)), whole)
    # One that has trained goes back too.
    again = of_8_steps(tmp_path, gpt2_bf16, "host", save_strategy="no")
    again.train()
    assert_same_bits(in_the_end(again, str(kept)), whole)


def test_a_folder_is_loaded_with_its_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: 1000)
    first = of_8_steps(tmp_path, gpt2, "host")
    first.train()
    named = torch.load(tmp_path / "out/checkpoint-4/optimizer.pt", weights_only=True)
    with pytest.raises(ziggurat.InvalidArgument, match="not in optimizer.pt but in ziggurat/step-.* beside"):
        of_trainer(first).load_state_dict(named)
    with pytest.raises(ziggurat.ResourceExhausted, match="make the model and Trainer again, and resume"):
        first.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    shutil.rmtree(tmp_path / "out/checkpoint-4/ziggurat")
    with pytest.raises(ziggurat.DataLoss, match="checkpoint-4 is not whole: .*resume from another"):
        of_8_steps(tmp_path, gpt2, "host").train(
            resume_from_checkpoint=str(tmp_path / "out/checkpoint-4")
        )


def test_a_state_that_does_not_fit_memory_is_told_before_several_ranks_train(monkeypatch, tmp_path):
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: 1000)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    arguments = arguments_of(tmp_path, save_strategy="epoch")
    placement = f"nvme:{tmp_path}/state"
    with pytest.raises(ziggurat.ResourceExhausted, match='1000.0 B are free: .* state="store"'):
        ziggurat.hf.optimizer(arguments, placement=placement)[0]()(gpt2())
    ziggurat.hf.optimizer(arguments, placement=placement, state="store")[0]()(gpt2())
    arguments = arguments_of(tmp_path, save_strategy="no")
    optimizer = ziggurat.hf.optimizer(arguments, placement=placement)[0]()(gpt2())
    optimizer.open()
    assert optimizer.state_dict()["state"] == {}  # as Accelerate asks before the first step


@pytest.mark.parametrize("state", ["full", "store"])
def test_the_newest_step_leaves_trainers_checkpoints_alone(state, tmp_path):
    def trainer_again(max_steps):
        saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": max_steps}
        arguments = arguments_of(tmp_path / "out", lr_scheduler_type="constant", **saved)
        made = ziggurat.hf.optimizer(arguments, placement=f"auto:{tmp_path}/state", state=state)
        return trainer_of(gpt2().bfloat16(), arguments, made, [ziggurat.hf.EveryStep()])

    first = trainer_again(4)
    assert ziggurat.hf.newest_step(first) is None
    first.train()
    assert of_trainer(first).placement == f"nvme:{tmp_path}/state"  # every step is to be durable
    of_trainer(first).close()
    kept = tmp_path / "out" / "checkpoint-4" / "optimizer.pt"
    before = kept.read_bytes()
    second = trainer_again(8)
    newest = ziggurat.hf.newest_step(second)
    named = torch.load(Path(newest, "optimizer.pt"), weights_only=True)
    assert named["state"] == {} and named["ziggurat"]["generations"] == [4]
    assert not list(Path(newest).glob("*.safetensors"))  # the model has the weights
    assert kept.read_bytes() == before
    second.train(resume_from_checkpoint=newest)
    assert second.state.global_step == 8


@pytest.mark.parametrize("length", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_run_that_was_killed_behind_its_last_step_makes_no_other(length, tmp_path):
    def trained(name, length):
        arguments = arguments_of(tmp_path / name, **length)
        made = ziggurat.hf.optimizer(arguments, placement=f"nvme:{tmp_path}/{name}/state")
        trainer = trainer_of(gpt2().bfloat16(), arguments, made, [ziggurat.hf.EveryStep()])
        ziggurat.hf.train(trainer)
        optimizer = of_trainer(trainer)
        optimizer.synchronize()
        found = [*bits(trainer.model), torch.tensor(optimizer.param_groups[0]["lr"])]
        steps = trainer.state.global_step
        assert optimizer.engine.generation == steps
        optimizer.close()
        return steps, found

    ended = trained("one", length)
    again = trained("one", length)
    assert again[0] == ended[0]
    assert_same_bits(ended[1], again[1])
    longer = {"lr_scheduler_type": "constant", "max_steps": ended[0] + 3}
    assert trained("one", longer)[0] == ended[0] + 3


def test_the_newest_step_is_that_of_a_trainer_that_has_trained(tmp_path):
    def trainer_of_steps(name, max_steps):
        arguments = arguments_of(tmp_path / name, lr_scheduler_type="constant", max_steps=max_steps)
        made = ziggurat.hf.optimizer(arguments, placement=f"nvme:{tmp_path}/{name}/state")
        return trainer_of(gpt2().bfloat16(), arguments, made, [ziggurat.hf.EveryStep()])

    parts, whole = trainer_of_steps("parts", 4), trainer_of_steps("whole", 8)
    assert ziggurat.hf.newest_step(parts) is None
    assert ziggurat.hf.newest_step(parts) is None
    parts.train()
    parts.args.max_steps = 8
    newest = ziggurat.hf.newest_step(parts)
    assert json.loads(Path(newest, "trainer_state.json").read_text())["global_step"] == 4
    parts.train(resume_from_checkpoint=newest)
    whole.train()
    for trainer in (parts, whole):
        of_trainer(trainer).synchronize()
    assert_same_bits(bits(parts.model), bits(whole.model))


def test_evaluation_checkpointing_and_the_best_model(tmp_path):
    def run(placement, name):
        saved = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
        checkpointing = f"{'gradient' if MAJOR == 4 else 'activation'}_checkpointing"
        checked = {"eval_strategy": "steps", "eval_steps": 2, checkpointing: True}
        arguments = arguments_of(tmp_path / name, **saved, **checked)
        trainer = transformers.Trainer(
            gpt2(),
            arguments,
            train_dataset=Texts(),
            eval_dataset=Texts(8),
            optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement=placement),
        )
        trainer.train()
        of_trainer(trainer).close()
        return logged(trainer, "loss") + logged(trainer, "eval_loss"), bits(trainer.model)

    host, on_host = run("host", "host")
    nvme, on_nvme = run(f"nvme:{tmp_path}/state", "nvme")
    assert nvme == host
    assert_same_bits(on_nvme, on_host)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    arguments = arguments_of(tmp_path / "out", optim="adagrad", **saved)
    trainer_of(gpt2(), arguments, None).train()
    arguments = arguments_of(tmp_path / "out", **saved)
    ours = trainer_of(gpt2(), arguments, ziggurat.hf.optimizer(arguments))
    with pytest.raises(ziggurat.InvalidArgument, match="has step, sum, but no exp_avg, exp_avg_sq"):
        ours.train(resume_from_checkpoint=True)


def test_every_step_needs_a_store_and_our_optimizer(tmp_path):
    arguments = arguments_of(tmp_path / "out")
    for optimizer, words in [
        (ziggurat.hf.optimizer(arguments), 'with placement="host" no step is durable'),
        (ziggurat.hf.optimizer(arguments, placement="auto"), 'placement="auto" no step is durable'),
        (None, "give Trainer optimizer_cls_and_kwargs"),
    ]:
        trainer = trainer_of(gpt2(), arguments, optimizer, [ziggurat.hf.EveryStep()])
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            trainer.train()
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            ziggurat.hf.newest_step(trainer)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_prepares_ours(mixed_precision, tmp_path):
    def train(made):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            mixed_precision=mixed_precision, gradient_accumulation_steps=2, cpu=True
        )
        model = gpt2()
        optimizer = made(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
        loader = torch.utils.data.DataLoader(Texts(), 4, shuffle=False)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        values = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch["input_ids"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    values.append(norm.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            values.append(loss.item())
        if isinstance(optimizer.optimizer, ziggurat.torch.AdamW):
            optimizer.optimizer.synchronize()
        return values, bits(accelerator.unwrap_model(model))

    def ours(**where):
        return lambda model: ziggurat.torch.AdamW(model.parameters(), lr=3e-3, **where)

    def on_nvme(model):
        return ours(placement=f"nvme:{tmp_path}/state", threads=2, model=model)(model)

    host, on_host = train(ours(threads=1))
    nvme, bits_on_nvme = train(on_nvme)
    assert nvme == host
    assert_same_bits(bits_on_nvme, on_host)
    expected, _ = train(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    assert host == pytest.approx(expected, rel=1e-3 if mixed_precision == "bf16" else 1e-4)


def test_the_seams_are_where_they_were():
    """What ziggurat.hf uses of transformers: where one of these fails, look there."""
    trainer = transformers.Trainer
    assert "optimizer_cls_and_kwargs" in inspect.signature(trainer.__init__).parameters
    created = inspect.getsource(trainer.create_optimizer)
    if MAJOR == 4:
        assert "optimizer_cls(optimizer_grouped_parameters, **optimizer_kwargs)" in created
    else:
        assert transformers.trainer_optimizer.is_optimizer_factory(lambda: None)
        assert "optimizer_cls()(opt_model, **optimizer_kwargs)" in created
    assert list(inspect.signature(trainer.create_optimizer).parameters)[:1] == ["self"]
    names = trainer.get_decay_parameter_names(None, llama())
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.0.input_layernorm.weight" not in names
    assert list(inspect.signature(trainer.save_model).parameters)[:2] == ["self", "output_dir"]
    for event in ("on_train_begin", "on_step_end"):
        parameters = inspect.signature(getattr(transformers.TrainerCallback, event)).parameters
        assert list(parameters)[:4] == ["self", "args", "state", "control"]
    called = inspect.getsource(trainer_callback.CallbackHandler.call_event)
    assert "optimizer=self.optimizer" in called and "lr_scheduler=self.lr_scheduler" in called
    assert list(inspect.signature(transformers.TrainerState.save_to_json).parameters)[1:] == [
        "json_path"
    ]
    module = sys.modules[trainer.__module__]
    files = [module.OPTIMIZER_NAME, module.SCHEDULER_NAME, module.TRAINER_STATE_NAME]
    assert files == ["optimizer.pt", "scheduler.pt", "trainer_state.json"]
    assert '"rng_state.pth"' in inspect.getsource(trainer._load_rng_state)
    calls = {
        trainer._load_from_checkpoint: "resume_from_checkpoint",
        trainer._load_optimizer_and_scheduler: "checkpoint",
        trainer._save_optimizer_and_scheduler: "output_dir",
    }
    for call, checkpoint in calls.items():
        assert list(inspect.signature(call).parameters)[:2] == ["self", checkpoint]
    assert "optimizer" in inspect.signature(accelerate.optimizer.AcceleratedOptimizer).parameters


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
