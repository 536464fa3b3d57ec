# SPDX-License-Identifier: Apache-2.0
"""Trainer's checkpoints of offloaded models whose state memory has no room for: a run goes on from each with the bits
of one that was not interrupted, and from none that was not finished.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, accelerate or pytest is missing, or
PyTorch is older than offload() takes.
"""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

try:
    import pytest
    import torch
    import transformers
    from forked_runs import forked_runs
    from hf_offload_runs import (
        assert_same,
        ended,
        long_gpt2,
        long_llama,
        measured,
        trainer_of,
        values,
        without_room,
    )
    from language_models import assert_same_bits, llama
    from long_cases import long_case
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.hf
import ziggurat.torch
from ziggurat._offload import passes
from ziggurat._trainers import in_trainer

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")

SAVES = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}


@pytest.fixture(autouse=True)
def no_room_for_the_state(monkeypatch):
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: 1000)


def run(folder, build, home, resumed=None, **more):
    """What was logged, and in the end the values and the optimizer's state."""
    trainer = trainer_of(folder, build, home, **(SAVES | more))
    trainer.train(resume_from_checkpoint=resumed)
    optimizer = trainer.optimizer.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [value for param in params for value in optimizer.state_of(param).values()]
    logged, weights = ended(trainer)
    return logged, [*weights, *state]


@pytest.mark.parametrize(
    ("home", "build"), [("nvme", long_llama), long_case("nvme", long_gpt2), ("host", long_gpt2)]
)
def test_a_run_goes_on_from_each_checkpoint_that_is_kept(home, build, tmp_path):
    """On NVMe also into the store of a later step, and into a new one."""
    whole = run(tmp_path / "plain", build, None, max_steps=8, save_strategy="no")
    out = tmp_path / "ours/out"
    run(tmp_path / "ours", build, home, save_total_limit=2)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    for checkpoint in out.iterdir():
        named = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        assert named["state"] == {} and (checkpoint / named["ziggurat"]["checkpoint"]).is_dir()

    def other():
        return build(seed=9)

    more = {"max_steps": 8, "save_total_limit": 2}
    assert_same(run(tmp_path / "new", other, home, str(out / "checkpoint-4"), **more), whole)
    assert_same(run(tmp_path / "ours", other, home, True, **more), whole)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-6", "checkpoint-8"]
    assert_same(run(tmp_path / "ours", other, home, str(out / "checkpoint-6"), **more), whole)


def test_a_run_that_went_on_ends_with_its_best_model(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5}
    best |= {"save_total_limit": 2}
    whole = trainer_of(tmp_path / "plain", long_llama, None, **(SAVES | best))
    whole.train()
    best_step = whole.state.best_global_step
    expected = ended(whole)
    first = trainer_of(tmp_path / "ours", long_llama, "nvme", **(SAVES | best))
    first.train()
    assert first.state.best_global_step == best_step
    assert_same(ended(first), expected)
    kept = sorted((tmp_path / "ours/out").glob("checkpoint-*"))
    again = trainer_of(tmp_path / "ours", long_llama, "nvme", **(SAVES | best))
    again.train(resume_from_checkpoint=str(kept[0]))
    assert again.state.best_global_step == best_step
    assert_same(ended(again), expected)


def test_a_trainer_that_has_trained_goes_back(monkeypatch, tmp_path):
    """Its state is in memory until the next step, for which there must be room."""
    trainer = trainer_of(tmp_path, long_llama, "nvme", **SAVES)
    trainer.train()
    checkpoint = str(tmp_path / "out/checkpoint-2")
    with pytest.raises(ziggurat.ResourceExhausted, match="make the model and Trainer again"):
        trainer.train(resume_from_checkpoint=checkpoint)
    monkeypatch.undo()
    trainer.train(resume_from_checkpoint=checkpoint)
    plain = trainer_of(tmp_path / "plain", long_llama, None, **(SAVES | {"save_strategy": "no"}))
    plain.train()
    assert_same(ended(trainer), ended(plain))


def test_a_trainer_whose_moments_are_in_8_bits_goes_back(monkeypatch, tmp_path):
    """Each block's scale and codes are as they were saved."""
    monkeypatch.undo()
    trainer = trainer_of(tmp_path, long_llama, "host", engine={"state_format": "8bit"}, **SAVES)
    trainer.train()
    whole = measured(trainer), values(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert_same(ended(trainer), whole)


@pytest.mark.parametrize("state_format", ["fp32", "8bit"])
def test_a_damaged_checkpoint_changes_no_state_of_a_trainer_that_has_trained(state_format, monkeypatch, tmp_path):
    monkeypatch.undo()
    engine = {"state_format": state_format}
    trainer = trainer_of(tmp_path, long_llama, "host", engine=engine, max_steps=3, **SAVES)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    before = optimizer.state_dict()["state"]
    files = (tmp_path / "out/checkpoint-2/ziggurat").rglob("*.safetensors")
    damaged = max(files, key=lambda path: path.stat().st_size)
    with damaged.open("r+b") as file:
        file.seek(-2000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ziggurat.DataLoss, match=damaged.name):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    for number, entry in optimizer.state_dict()["state"].items():
        assert_same_bits(list(entry.values()), list(before[number].values()))
    optimizer.close()


class Freeze(transformers.TrainerCallback):
    """Freezes the first block once a run has made some steps."""

    def __init__(self, step):
        self.step = step

    def on_train_begin(self, args, state, control, model=None, **_):
        if state.global_step >= self.step:
            for name, param in model.named_parameters():
                param.requires_grad_("layers.0." not in name)

    on_step_end = on_train_begin


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_freezes_a_block_goes_on_from_each_checkpoint(step, monkeypatch, tmp_path):
    def frozen(folder, home, resumed=None, **more):
        return run(folder, long_llama, home, resumed, callbacks=[Freeze(step)], max_steps=5, **more)

    whole = frozen(tmp_path / "plain", None, save_strategy="no")
    assert_same(frozen(tmp_path / "ours", "host"), whole)
    checkpoint = str(tmp_path / "ours/out/checkpoint-4")
    assert_same(frozen(tmp_path / "new", "host", checkpoint, save_strategy="no"), whole)
    monkeypatch.undo()
    trainer = trainer_of(tmp_path / "same", long_llama, "host", callbacks=[Freeze(step)], max_steps=5)
    trainer.train()
    trainer.train(resume_from_checkpoint=checkpoint)
    assert_same(ended(trainer), (whole[0], whole[1][: len(list(trainer.model.parameters()))]))


def test_what_earlier_versions_saved_is_loaded(monkeypatch, tmp_path):
    whole = run(tmp_path / "plain", long_llama, None, save_strategy="no")
    monkeypatch.undo()
    monkeypatch.setattr(in_trainer.InTrainer, "_takes_folder", lambda self: False)
    run(tmp_path / "ours", long_llama, "nvme")
    checkpoint = tmp_path / "ours/out/checkpoint-2"
    assert torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    monkeypatch.undo()
    assert_same(run(tmp_path / "ours", lambda: long_llama(9), "nvme", str(checkpoint)), whole)


def resume_with(optimizer_of, folder, checkpoint):
    """Trainer goes on from `checkpoint` with an optimizer that it is given."""
    trainer = trainer_of(folder, lambda: long_llama(9), None)
    trainer.optimizer_cls_and_kwargs = None
    trainer.optimizer = optimizer_of(trainer.model)
    trainer.train(resume_from_checkpoint=str(checkpoint))


def test_no_other_optimizer_goes_on_without_the_state_that_is_in_the_folder(tmp_path):
    def torchs(model):
        return torch.optim.AdamW(model.parameters())

    def ours(model):
        return ziggurat.torch.AdamW(model.parameters(), placement="host")

    run(tmp_path / "ours", long_llama, "nvme")
    checkpoint = tmp_path / "ours/out/checkpoint-2"
    with pytest.raises(KeyError, match="param_groups"):
        resume_with(torchs, tmp_path / "torchs", checkpoint)
    with pytest.raises(ziggurat.InvalidArgument, match=r"in the folder ziggurat/step-.* ziggurat\.hf\.optimizer\(\)"):
        resume_with(ours, tmp_path / "plain", checkpoint)


def test_a_loop_of_its_own_loads_the_state_from_the_folder(tmp_path):
    run(tmp_path / "ours", long_llama, "nvme")
    checkpoint = tmp_path / "ours/out/checkpoint-2"
    model = long_llama(9)
    optimizer = ziggurat.torch.AdamW(model.named_parameters(), placement="host")
    with pytest.raises(ziggurat.InvalidArgument, match=r"load_checkpoint\(\)"):
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    ziggurat.torch.load_checkpoint(checkpoint / "ziggurat", optimizer, model)
    saved = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert_same_bits(list(model.parameters()), list(saved.parameters()))
    for param in model.parameters():
        entry = optimizer.state_of(param)
        assert entry["step"] == 2 and entry["exp_avg_sq"].any() and "master" in entry


def test_a_checkpoint_by_reference_is_of_the_newest_step(tmp_path):
    whole = run(tmp_path / "plain", long_llama, None, max_steps=8, save_strategy="no")
    engine = {"placement": f"nvme:{tmp_path}/state", "state": "store"}
    run(tmp_path, long_llama, "nvme", engine=engine)
    assert not list((tmp_path / "out").glob("*/ziggurat"))
    with pytest.raises(ziggurat.InvalidArgument, match=r"generation \[4\] of the store"):
        run(tmp_path, long_llama, "nvme", str(tmp_path / "out/checkpoint-4"), engine=engine)
    assert_same(run(tmp_path, long_llama, "nvme", True, engine=engine, max_steps=8), whole)


def kill_as_it_saves(when, step):
    """Kills this process in the save of `step`: when its "weights" are written, while its state "is" written, or
    "after"."""
    save, save_file = in_trainer.save_checkpoint, transformers.modeling_utils.safe_save_file

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_once_begun(folder):
        while not any(Path(folder).glob("*")):
            time.sleep(0.0005)
        kill()

    def saved(folder, *arguments):
        if f"checkpoint-{step}" not in str(folder):
            return save(folder, *arguments)
        if when == "is":
            threading.Thread(target=kill_once_begun, args=[folder], daemon=True).start()
        save(folder, *arguments)
        kill()

    def saved_file(tensors, path, *arguments, **more):
        save_file(tensors, path, *arguments, **more)
        if when == "weights" and f"checkpoint-{step}" in str(path):
            kill()

    in_trainer.save_checkpoint = saved
    transformers.modeling_utils.safe_save_file = saved_file


def run_killed(folder, resumed, when, step):
    without_room()
    kill_as_it_saves(when, step)
    run(folder, long_llama, "nvme", resumed)


@pytest.mark.parametrize("when", ["weights", "is", "after"])
def test_a_checkpoint_whose_save_was_killed_is_refused(when, tmp_path):
    whole = run(tmp_path / "plain", long_llama, None, save_strategy="no")
    out = tmp_path / "ours/out"
    with forked_runs() as runs:
        killed = runs.started(run_killed, tmp_path / "ours", None, when, 4)
        assert runs.status_of(killed) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="checkpoint-4/trainer_state.json"):
        run(tmp_path / "ours", long_llama, "nvme", True)
    assert_same(run(tmp_path / "ours", long_llama, "nvme", str(out / "checkpoint-2")), whole)
    # It has been saved again since, and is saved once more by a run that is killed as it does.
    assert (out / "checkpoint-4/trainer_state.json").exists()
    with forked_runs() as runs:
        killed = runs.started(run_killed, tmp_path / "ours", str(out / "checkpoint-2"), when, 4)
        assert runs.status_of(killed) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="checkpoint-4/trainer_state.json"):
        run(tmp_path / "ours", long_llama, "nvme", str(out / "checkpoint-4"))
    assert_same(run(tmp_path / "ours", long_llama, "nvme", str(out / "checkpoint-2")), whole)


MIB = 1 << 20
STATE_BYTES = 180 * MIB


def large_llama():
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 256}
    return llama(1, **sizes).bfloat16()


class Peak(transformers.TrainerCallback):
    """Notes how much the process had taken at most, at each of Trainer's events."""

    def __init__(self):
        self.bytes = {}

    def note(self, event):
        self.bytes[event] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def on_step_end(self, args, state, control, **_):
        self.note(f"step {state.global_step}")

    def on_save(self, args, state, control, **_):
        self.note(f"save {state.global_step}")

    def on_train_begin(self, *_, **__):
        self.note("begin")


def measure(folder, resumed, path):
    passes._SHARD_BYTES = 4 * MIB
    passes.free_bytes = lambda: 1000
    ziggurat._streaming.streaming.free_bytes = lambda: 2 * MIB  # a parameter has 0.5
    peak = Peak()
    engine = {"placement": f"nvme:{folder}/state-{resumed is not None}", "host_memory": "16MiB"}
    more = {"max_steps": 3, "max_grad_norm": 0, "callbacks": [peak], "engine": engine}
    trainer = trainer_of(folder, large_llama, "nvme", **(SAVES | more))
    peak.note("made")
    trainer.train(resume_from_checkpoint=resumed)
    torch.save(peak.bytes, path)
    trainer.optimizer.optimizer.close()


def test_saving_and_loading_take_little_memory(tmp_path):
    found = []
    with forked_runs() as runs:
        for resumed in (None, str(tmp_path / "out/checkpoint-2")):
            path = tmp_path / "peak.pt"
            assert runs.status_of(runs.started(measure, tmp_path, resumed, path)) == 0
            found.append(torch.load(path))
    saved = sum(path.stat().st_size for path in (tmp_path / "out/checkpoint-2/ziggurat").rglob("*.safetensors"))
    first, again = found
    assert saved > STATE_BYTES
    assert first["save 2"] - first["step 2"] < STATE_BYTES / 3
    assert again["begin"] - again["made"] < STATE_BYTES / 2  # with the engine's own


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
