# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ziggurat.deepspeed's engine, and where its state on a drive lies.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import threading

try:
    import pytest
    import torch
    from deepspeed_runs import batch, loss_of
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
from ziggurat.deepspeed import _checkpoint, _meeting, _swap
from ziggurat.deepspeed._meeting import Meeting
from ziggurat.deepspeed.utils import zero_to_fp32

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
}


def on_drive(path):
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}


def made(model=None, **more):
    model = small_model() if model is None else model
    return deepspeed.initialize(model=model, config=CONFIG | more)[0]


def train(engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()


def bits(engine) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        return [param.detach().clone().view(torch.int16) for param in engine.module.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("from_drive", [False, True])
@pytest.mark.parametrize("to_drive", [False, True])
def test_a_run_goes_on_with_the_same_bits(tmp_path, from_drive, to_drive):
    straight = made()
    train(straight, 0, 6)
    before = made(**(on_drive(tmp_path / "drive") if from_drive else {}))
    train(before, 0, 3)
    state = {"epoch": 2, "arguments": argparse.Namespace(seed=1)}
    assert before.save_checkpoint(tmp_path / "out", client_state=state)
    before.destroy()
    after = made(**(on_drive(tmp_path / "drive") if to_drive else {}))
    path, found = after.load_checkpoint(tmp_path / "out")
    assert path == str(tmp_path / "out" / "global_step3" / "mp_rank_00_model_states.pt")
    assert found == state
    assert (after.global_steps, after.global_samples) == (3, 24)
    assert after.get_lr() == before.get_lr()
    train(after, 3, 6)
    assert same(bits(after), bits(straight))


def test_an_engine_that_has_trained_on_goes_back(tmp_path):
    engine = made(**on_drive(tmp_path / "drive"))
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "out", tag="here")
    train(engine, 3, 6)
    expected = bits(engine)
    engine.load_checkpoint(tmp_path / "out", tag="here")
    train(engine, 3, 6)
    assert same(bits(engine), expected)


def test_what_is_left_out_stays_as_it_is(tmp_path):
    one = made()
    train(one, 0, 3)
    one.save_checkpoint(tmp_path)
    module_only = made()
    module_only.load_checkpoint(tmp_path, load_module_only=True)
    assert same(bits(module_only), bits(one))
    assert (module_only.global_steps, module_only.lr_scheduler.last_batch_iteration) == (0, -1)
    without = made()
    without.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (without.global_steps, without.lr_scheduler.last_batch_iteration) == (3, -1)
    assert without.optimizer.state_dict()["state"] == {}


def test_latest_names_the_newest_that_is_whole(tmp_path):
    engine = made()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="other", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step1"
    with pytest.raises(ziggurat.InvalidArgument, match="third"):
        engine.load_checkpoint(tmp_path, tag="third")
    assert not [file for file in tmp_path.rglob("*.new")]


def test_a_tag_that_is_there_is_replaced(tmp_path):
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="newest")
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path, tag="newest")
    other = made()
    other.load_checkpoint(tmp_path)
    assert other.global_steps == 2
    module, state = sorted(file.name for file in (tmp_path / "newest").iterdir())
    assert module == "mp_rank_00_model_states.pt" and state.startswith("ziggurat_state_2_")


def test_a_checkpoint_of_others_gives_its_module(tmp_path):
    model = small_model(torch.bfloat16)
    (tmp_path / "tag").mkdir()
    torch.save({"module": model.state_dict()}, tmp_path / "tag" / "mp_rank_00_model_states.pt")
    engine = made()
    with pytest.raises(ziggurat.InvalidArgument, match="load_module_only.*load_foreign_checkpoint"):
        engine.load_checkpoint(tmp_path, tag="tag")
    engine.load_checkpoint(tmp_path, tag="tag", load_module_only=True)
    file = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    file.rename(file.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    with pytest.raises(ziggurat.InvalidArgument, match="stage 3: .*load_foreign_checkpoint"):
        engine.load_checkpoint(tmp_path, tag="tag")


def test_the_module_alone_is_a_plain_file(tmp_path):
    engine = made()
    engine.module[1].requires_grad_(False)
    engine.module[5].bias.requires_grad_(False)
    train(engine, 0, 1)
    assert engine.save_16bit_model(tmp_path, "model.bin")
    found = torch.load(tmp_path / "model.bin", weights_only=True)
    assert found.keys() == engine.module.state_dict().keys()
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    engine.save_16bit_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
    left = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert found.keys() - left.keys() == {"5.bias"}


def test_runs_share_a_drive_and_leave_nothing_there(tmp_path):
    one, other = made(**on_drive(tmp_path)), made(**on_drive(tmp_path))
    train(one, 0, 2)
    train(other, 0, 2)
    assert same(bits(one), bits(other))
    assert len(list(tmp_path.iterdir())) == 2
    one.destroy()
    assert len(list(tmp_path.iterdir())) == 1
    train(other, 2, 3)
    other.destroy()
    assert not list(tmp_path.iterdir())


LEFT_BEHIND = """
import os, signal, sys
from ziggurat.deepspeed._swap import RunDirectory
kept = RunDirectory(sys.argv[1], 0)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("ending", "left"), [("killed", 1), ("exits", 0)])
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path, ending, left):
    subprocess.run([sys.executable, "-c", LEFT_BEHIND, str(tmp_path), ending])
    assert len(list(tmp_path.iterdir())) == left
    (tmp_path / "others").mkdir()
    strangers = tmp_path / f"ziggurat-{os.getuid()}-another.host-rank0-x"
    strangers.mkdir()
    kept = _swap.RunDirectory(tmp_path, 0)
    found = {kept.path, tmp_path / "others", strangers}
    assert set(tmp_path.iterdir()) == found
    kept.remove()


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ziggurat.InvalidArgument, match="nvme_path"):
        made(**on_drive(tmp_path / "file" / "inside"))


@pytest.fixture
def meeting(monkeypatch):
    """Meetings of two ranks, which are threads."""
    rank, store = threading.local(), torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank.number)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(Meeting, "_store", lambda self: store)

    monkeypatch.setattr(_meeting, "_PATIENCE", datetime.timedelta(seconds=0.2))

    def of(number: int, word: str = "") -> Meeting:
        rank.number = number
        return Meeting("one", "save_checkpoint()", word)

    return of


def test_all_do_what_rank_0_decides_and_wait_for_its_end(meeting):
    done = []

    def other() -> None:
        with meeting(1, "tag of 1") as there:
            done.append(there.decision())
            there.end("")
            there.result_of(0)
        done.append("end 1")

    with meeting(0) as here:
        thread = threading.Thread(target=other)
        thread.start()
        assert here.words() == {1: "tag of 1"}
        assert done == []
        here.decide("together")
        assert here.result_of(1) == ""
        assert done == ["together"]
        done.append("latest")
        here.end("")
    thread.join()
    assert done == ["together", "latest", "end 1"]


def test_one_that_comes_late_learns_that_it_was_done_without_it(meeting):
    with meeting(0) as here:
        assert here.words() == {}
        here.decide("alone")
        here.end("")
    with meeting(1) as there:
        assert there.decision() == "alone"
        assert there.result_of(0) == ""


def test_a_decision_that_never_comes_is_an_error_with_its_reason(meeting):
    with contextlib.suppress(OSError), meeting(0):
        raise OSError("no space left")
    with pytest.raises(ziggurat.Unavailable, match="rank 0: OSError: no space left"):
        meeting(1).decision()


def test_a_rank_that_fails_in_a_save_is_named(meeting):
    with contextlib.suppress(OSError), meeting(1):
        raise OSError("no space left")
    with pytest.raises(ziggurat.Unavailable, match="rank 1: OSError: no space left"):
        meeting(0).result_of(1)


def test_ranks_that_all_have_to_come_are_named_where_they_do_not(meeting, monkeypatch):
    with meeting(1, "tag of 1"):
        pass
    with meeting(0) as here:
        assert here.words_of_all() == {1: "tag of 1"}
    monkeypatch.setattr(_meeting, "_LONG_PATIENCE", datetime.timedelta(seconds=0.2))
    with pytest.raises(ziggurat.Unavailable, match=r"the ranks \[1\] have not called it"):
        Meeting("two", "save_checkpoint()", "").words_of_all()


def test_a_rank_that_fails_before_it_has_prepared_is_named(meeting):
    with contextlib.suppress(OSError), meeting(1):
        raise OSError("no space left")
    with pytest.raises(ziggurat.Unavailable, match="rank 1: OSError: no space left"):
        meeting(0).wait_prepared(1)


def test_tags_that_differ_are_said_or_refused(capsys, monkeypatch):
    monkeypatch.setattr(deepspeed.logger.handlers[0], "stream", sys.stderr)
    words = {1: "a", 2: "b"}
    _checkpoint._look_at_tags("IGNORE", "a", words)
    assert capsys.readouterr().err == ""
    _checkpoint._look_at_tags("WARN", "a", words)
    assert '"b" on rank 2' in capsys.readouterr().err
    with pytest.raises(ziggurat.InvalidArgument, match='"b" on rank 2'):
        _checkpoint._look_at_tags("FAIL", "a", words)


def test_masters_come_out_of_a_checkpoint_without_an_engine(tmp_path):
    engine = made()
    engine.module[2].bias.requires_grad_(False)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    names = dict(engine.module.named_parameters())
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == names.keys()
    for name, value in found.items():
        assert torch.equal(value, deepspeed.utils.safe_get_full_fp32_param(names[name]))
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(small_model(), tmp_path)
    assert torch.equal(model[2].weight, found["2.weight"])
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, exclude_frozen_parameters=True
    )
    assert found.keys() - trained.keys() == {"2.bias"}
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(written[name], found[name]) for name in found)


class Tied(torch.nn.Module):
    """Its head has the weight of its embedding, under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(61, 48)
        self.head = torch.nn.Linear(48, 61)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).mean(1))


def test_a_weight_of_two_names_has_one_master_under_both(tmp_path):
    engine = made(Tied())
    train(engine, 0, 4)  # the rate of the first two is 0
    engine.save_checkpoint(tmp_path)
    master = deepspeed.utils.safe_get_full_fp32_param(engine.module.embed.weight)
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(found["embed.weight"], master)
    assert torch.equal(found["head.weight"], master)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), tmp_path)
    assert torch.equal(model.embed.weight, master)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
