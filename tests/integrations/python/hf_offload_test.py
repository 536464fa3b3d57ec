# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload() of models that take more than twice their memory, in transformers.Trainer and
under Accelerate: the bits without it.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, accelerate or pytest is missing, or
PyTorch is older than offload() takes.
"""

import signal
import sys

try:
    import accelerate
    import pytest
    import torch
    import transformers
    from forked_runs import forked_runs
    from hf_offload_runs import (
        Stop,
        Texts,
        assert_same,
        ended,
        long_gpt2,
        long_llama,
        offload,
        trainer_of,
        values,
        without_room,
    )
    from language_models import MAJOR, assert_same_bits, loss_of
    from long_cases import long, long_case
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.hf
import ziggurat.torch
from ziggurat._offload import passes
from ziggurat._optimizer import state

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")

homes = pytest.mark.parametrize("home", [long_case("host"), "nvme"])


def t5(seed=1):
    torch.manual_seed(seed)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 7, "num_heads": 4}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=256, dropout_rate=0.1, **sizes, **ends)
    return transformers.T5ForConditionalGeneration(config)


def same_with_and_without(tmp_path, build, home="nvme", run=lambda trainer: trainer.train(), **more):
    """Compares runs of trainers, and what `run` returns and leaves in the folder; returns the offloaded one."""
    trainers = []
    for name, where in (("plain", None), ("ours", home)):
        trainers.append(trainer_of(tmp_path / name, build, where, **more))
        run(trainers[-1])
    plain, trainer = trainers
    files = [
        sorted(str(p.relative_to(tmp_path / name)) for p in (tmp_path / name / "out").rglob("*"))
        for name in ("plain", "ours")
    ]
    files[1] = [path for path in files[1] if "/ziggurat" not in path]  # with the optimizer's state
    assert files[0] == files[1]
    expected = ended(plain)
    assert_same(ended(trainer), expected)
    assert len(expected[0]) >= 6
    return trainer


BY_LENGTH = {"group_by_length": True} if MAJOR == 4 else {"train_sampling_strategy": "group_by_length"}
REENTRANT, PLAIN = ({"use_reentrant": reentrant} for reentrant in (True, False))


@pytest.mark.parametrize(
    ("home", "more"),
    [
        ("host", {}),
        ("nvme", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}),
        long_case("nvme", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": PLAIN}),
        long_case("nvme", {"max_grad_norm": 0}),
        ("nvme", {"max_grad_norm": 1.0, "gradient_accumulation_steps": 3}),
        long_case("host", {"max_grad_norm": 1.0, "gradient_accumulation_steps": 3, "bf16": True}),
        ("nvme", BY_LENGTH | {"lengths": (32, 8, 20)}),
        ("nvme", {"dataloader_num_workers": 1}),
        long_case("nvme", {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5}),
        long_case("nvme", {"optim": "lion_32bit"}),
        ("nvme", {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(one) or "default",
)
def test_settings(home, more, tmp_path):
    same_with_and_without(tmp_path, long_gpt2, home, **more)


@long
def test_a_model_that_trainer_compiles(tmp_path):
    more = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    same_with_and_without(tmp_path, long_gpt2, **more)


@homes
def test_the_best_of_the_checkpoints_that_are_kept(home, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = same_with_and_without(
        tmp_path, long_llama, home, learning_rate=0.5, **saved, **evaluated
    )
    assert trainer.state.best_model_checkpoint


@homes
def test_a_saved_model_is_a_model_of_transformers(home, tmp_path):
    same = []
    for name, where in (("plain", None), ("ours", home)):
        trainer = trainer_of(tmp_path / name, long_llama, where)
        trainer.train()
        trainer.save_model(str(tmp_path / name / "saved"))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "saved")
        same.append(values(again))
        assert_same_bits(values(trainer.model), same[-1])
        trainer.optimizer.optimizer.close()
    assert_same_bits(*same)


@pytest.mark.parametrize(
    ("home", "build"),
    [
        ("host", long_llama),
        ("nvme", long_gpt2),
        long_case("host", long_gpt2),
        long_case("nvme", long_llama),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_of_another_step(home, build, tmp_path):
    """On NVMe the store is at a later step, and goes back."""
    saved = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(tmp_path / "plain", build, None, **saved)
    whole.train()
    expected = ended(whole)
    first = trainer_of(tmp_path / "ours", build, home, **saved)
    first.train()
    assert_same(ended(first), expected)
    second = trainer_of(tmp_path / "ours", lambda: build(seed=9), home, **saved)
    second.train(resume_from_checkpoint=str(tmp_path / "ours/out/checkpoint-3"))
    assert_same(ended(second), expected)


def test_generation_in_evaluation(tmp_path):
    got = []

    def metrics(given):
        got.append(given.predictions.tolist())
        return {"tokens": float(given.predictions.sum())}

    def run(trainer):
        trainer.compute_metrics = metrics
        trainer.train()
        got.append(trainer.predict(Texts(4)).predictions.tolist())

    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "predict_with_generate": True}
    same_with_and_without(
        tmp_path, t5, run=run, kind="Seq2Seq", generation_max_length=8, **evaluated
    )
    half = len(got) // 2
    assert got[:half] == got[half:]


def test_before_it_trains_a_model_evaluates_and_saves(tmp_path):
    trainer = trainer_of(tmp_path, long_gpt2, "nvme")
    expected = values(trainer.model)
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_bits(values(again), expected)


def test_a_batch_size_that_is_searched_for_is_refused(tmp_path):
    """Trainer begins the run again with half the batch size, and our engine has the model that was trained so far."""
    with pytest.raises(ziggurat.Unimplemented, match="auto_find_batch_size=True does not work"):
        trainer_of(tmp_path, long_gpt2, "nvme", auto_find_batch_size=True).train()
    trainer_of(tmp_path, long_gpt2, None, auto_find_batch_size=True, max_steps=1).train()


def run_every_step(folder, home, path, room=True, stop=None):
    if not room:
        without_room()
    callbacks = [ziggurat.hf.EveryStep(), *([stop] if stop else [])]
    saved = {"save_strategy": "steps", "save_steps": 3}
    trainer = trainer_of(folder, lambda: long_llama(seed=3), home, callbacks=callbacks, **saved)
    ziggurat.hf.train(trainer)
    steps = trainer.state.global_step
    torch.save([steps, *ended(trainer)], path)


@pytest.mark.parametrize("room", [long_case(True), False])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(room, tmp_path):
    plain, ours = tmp_path / "plain.pt", tmp_path / "ours.pt"
    with forked_runs() as runs:
        started = runs.started(run_every_step, tmp_path / "plain", None, plain)
        assert runs.status_of(started) == 0
        for step in (2, 5):
            arguments = (tmp_path / "ours", "nvme", ours, room, Stop(step))
            assert runs.status_of(runs.started(run_every_step, *arguments)) == -signal.SIGKILL
        started = runs.started(run_every_step, tmp_path / "ours", "nvme", ours, room)
        assert runs.status_of(started) == 0
    plain, ours = (torch.load(path, weights_only=False) for path in (plain, ours))
    assert plain[0] == ours[0] == 6
    assert_same_bits(plain[2], ours[2])
    # What Trainer logs after a step is not with that step in the store, so that a kill may lose it.
    assert plain[1][-3:] == ours[1][-3:]


def test_a_run_that_has_ended_needs_no_room_for_its_state_or_for_weights(monkeypatch, tmp_path):
    first, again = tmp_path / "first.pt", tmp_path / "again.pt"
    run_every_step(tmp_path, "nvme", first)
    monkeypatch.setattr(state, "free_bytes", lambda: 1000)
    for name in ("save_model", "_load_from_checkpoint"):
        monkeypatch.setattr(transformers.Trainer, name, None)
    run_every_step(tmp_path, "nvme", again)
    first, again = (torch.load(path, weights_only=False) for path in (first, again))
    assert first[0] == again[0] == 6
    assert_same_bits(first[2], again[2])
    assert not (tmp_path / "out/newest-step").exists()


def test_the_newest_step_is_for_the_trainer_that_asks(tmp_path):
    run_every_step(tmp_path, "nvme", tmp_path / "first.pt")
    trainer = trainer_of(tmp_path, long_llama, "nvme", callbacks=[ziggurat.hf.EveryStep()])
    ziggurat.hf.newest_step(trainer)
    with pytest.raises(ziggurat.InvalidArgument, match="has begun another run: give trainer.train"):
        trainer.train()


def go_back(folder, path, stop):
    without_room()
    trainer = trainer_of(folder, lambda: long_llama(seed=9), "nvme", callbacks=[stop])
    trainer.train(resume_from_checkpoint=str(folder / "out/checkpoint-3"))
    torch.save([trainer.state.global_step, *ended(trainer)], path)


def test_a_run_that_is_killed_as_it_goes_back_goes_back_again(tmp_path):
    """The store has the checkpoint's state, but what belongs to it is in the checkpoint until the next step."""
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    with forked_runs() as runs:
        assert runs.status_of(runs.started(run_every_step, tmp_path, "nvme", before)) == 0
        assert runs.status_of(runs.started(go_back, tmp_path, after, Stop(3))) == -signal.SIGKILL
        with pytest.raises(ziggurat.DataLoss, match="resume from Trainer's checkpoint of step 3"):
            run_every_step(tmp_path, "nvme", after)
        assert runs.status_of(runs.started(go_back, tmp_path, after, Stop(None))) == 0
    before, after = (torch.load(path, weights_only=False) for path in (before, after))
    assert before[0] == after[0] == 6
    assert_same_bits(before[2], after[2])


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@homes
def test_a_loop_under_accelerate(mixed_precision, home, tmp_path):
    def run(name, home):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            mixed_precision=mixed_precision, gradient_accumulation_steps=2, cpu=True
        )
        model = long_gpt2()
        if home:
            offload(model, home)
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=3e-3, placement=f"nvme:{tmp_path / name}", threads=1
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
        loader = torch.utils.data.DataLoader(Texts(24), 2, shuffle=False)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch["input_ids"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(loss.item())
        optimizer.optimizer.synchronize()
        accelerator.save_model(model, tmp_path / f"{name}-saved")
        accelerator.save_state(tmp_path / f"{name}-state")
        found.append(accelerator.get_state_dict(model).keys())
        plain = accelerator.unwrap_model(model)
        found = found, values(plain)
        accelerator.load_state(tmp_path / f"{name}-state")
        assert_same_bits(values(plain), found[1])
        optimizer.optimizer.close()
        return found

    assert_same(run("ours", home), run("plain", None))


@long
def test_checkpoints_in_shards_of_a_model_that_memory_has_no_room_for(tmp_path, monkeypatch):
    """A run goes on from them, and takes the best one in the end."""
    found = []
    for home in (None, "nvme"):
        if home is not None:
            monkeypatch.setattr(passes, "free_bytes", lambda: 1000)
            monkeypatch.setattr(passes, "_SHARD_BYTES", 100_000)
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        more = {"save_strategy": "steps", "save_steps": 2, **evaluated}
        for folder, arguments in (("first", {}), ("again", {"resume_from_checkpoint": f"{tmp_path}/{home}-first/out/checkpoint-4"})):
            trainer = trainer_of(tmp_path / f"{home}-{folder}", long_llama, home, **more)
            trainer.train(**arguments)
            found.append(ended(trainer))
    assert len(list((tmp_path / "nvme-first/out/checkpoint-6").glob("model-*.safetensors"))) > 3
    for plain, ours in zip(found[:2], found[2:], strict=True):
        assert_same(plain, ours)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
