# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is saved in the background has the bytes of one that is waited for, whatever is
trained meanwhile; it is committed or absent, whenever the process is killed; and what goes wrong is
said.

ZIGGURAT_KILLS sets how many runs are killed. Run by pytest; as a script it exits with 77 where
PyTorch or pytest is missing.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ziggurat
import ziggurat.torch
from ziggurat._checkpoint import background_save, checkpoint as checkpoint_module
from ziggurat.torch import load_checkpoint, save_checkpoint

_KILLS = int(os.environ.get("ZIGGURAT_KILLS", "4"))
SLOW = 4e6  # bytes a second: a save of MODEL takes about a second


class Model(torch.nn.Module):
    """Large and small parameters, one that is frozen, one that has no gradient in every other step,
    and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 256)
        self.frozen = torch.nn.Linear(256, 256)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(256)
        self.at_times = torch.nn.Linear(256, 256)
        self.last = torch.nn.Linear(256, 64)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(torch.tanh(self.first(x))))
        self.used += 1
        if self.used % 2:
            x = x + self.at_times(x)
        return self.last(torch.tanh(x))


def train(model, optimizer, steps, rank=0):
    for _ in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).to(
            next(model.parameters()).dtype
        )
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def new_run(tmp_path, placement="host", dtype=torch.float32, **settings):
    torch.manual_seed(1)
    model = Model().to(dtype)
    place = placement if placement == "host" else f"nvme:{tmp_path}/store"
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=place, **settings)
    return model, optimizer


def tensors_in(checkpoint):
    """The bytes of the files with tensors, by their names."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize(
    ("dtype", "state_format"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "bf16"),
        (torch.float32, "8bit"),
    ],
)
def test_a_background_save_has_the_bytes_of_one_that_is_waited_for(
    tmp_path, placement, dtype, state_format
):
    model, optimizer = new_run(tmp_path, placement, dtype, state_format=state_format)
    train(model, optimizer, 3)
    with torch.no_grad():
        model.last.weight.mul_(0.5)  # becomes its master with the next step
    waited = save_checkpoint(tmp_path / "waited", optimizer, model)
    save = save_checkpoint(tmp_path / "beside", optimizer, model, background=True, bandwidth=SLOW / 3)
    assert not save.done
    train(model, optimizer, 4)
    assert not save.done, "the save was over before the steps, so they prove nothing"
    beside = save.wait()
    assert save.done
    assert tensors_in(beside) == tensors_in(waited)
    optimizer.close()


def test_a_background_save_has_everything_as_of_its_call(tmp_path):
    model, optimizer = new_run(tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train(model, optimizer, 2)
    schedule.step()
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    buffer = model.norm.running_mean.clone()
    save = save_checkpoint(
        tmp_path / "saved", optimizer, model, background=True, bandwidth=SLOW, schedule=schedule
    )
    for _ in range(3):
        train(model, optimizer, 1)
        schedule.step()
    path = save.wait()
    other, its = new_run(tmp_path / "other")
    its_schedule = torch.optim.lr_scheduler.StepLR(its, step_size=2, gamma=0.5)
    found = load_checkpoint(path, its, other, schedule=its_schedule)
    assert found.step == save.step == 2
    assert torch.equal(other.norm.running_mean, buffer)
    assert its_schedule.last_epoch == 1
    assert torch.equal(torch.rand(3), drawn)


def both_saves(rank, placement, make, folder):
    """Returns whether a waited and a background save of several ranks have equal bytes."""
    torch.manual_seed(1)
    model, wrapped = make()
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=placement, model=wrapped
    )
    train(wrapped, optimizer, 3, rank=rank)
    waited = save_checkpoint(f"{folder}/waited", optimizer, model)
    save = save_checkpoint(
        f"{folder}/beside", optimizer, model, background=True, bandwidth=SLOW / 2
    )
    train(wrapped, optimizer, 4, rank=rank)
    beside = save.wait()
    dist.barrier()
    same = tensors_in(beside) == tensors_in(waited)
    optimizer.close()
    return same


def ddp():
    model = Model()
    return model, DistributedDataParallel(model, find_unused_parameters=True)


def fsdp():
    model = Model()
    model.norm.track_running_stats = False
    for layer in (model.first, model.frozen, model.at_times, model.last):
        fully_shard(layer)
    fully_shard(model)
    return model, model


@pytest.mark.parametrize("make", [ddp, fsdp])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_ranks_save_in_the_background_together(tmp_path, make, placement):
    place = placement if placement == "host" else f"nvme:{tmp_path}/store"
    assert on_ranks(2, both_saves, place, make, str(tmp_path)) == [True, True]


def test_the_next_save_and_close_wait_for_the_one_before(tmp_path):
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    first = save_checkpoint(tmp_path / "saved", optimizer, model, background=True, bandwidth=SLOW)
    train(model, optimizer, 1)
    second = save_checkpoint(tmp_path / "saved", optimizer, model, background=True, bandwidth=SLOW)
    assert first.done
    assert not second.done
    optimizer.close()
    assert second.done
    assert load_checkpoint(second.wait(), *reversed(new_run(tmp_path / "other"))).step == 2
    assert Path(first.wait()).is_dir()


def test_a_save_is_made_though_its_optimizer_goes_out_of_scope(tmp_path):
    def trained(folder):
        model, optimizer = new_run(folder)
        train(model, optimizer, 1)
        save_checkpoint(folder / "saved", optimizer, model, background=True, bandwidth=SLOW)

    (tmp_path / "store").mkdir()
    trained(tmp_path / "store")
    assert [found.name for found in (tmp_path / "store" / "saved").glob("step-*")] == [
        "step-000000001"
    ]


def test_limits_are_for_the_background_alone_and_may_be_infinite(tmp_path):
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    for limit in ({"bandwidth": 1e6}, {"stall_max": 5}):
        with pytest.raises(ziggurat.InvalidArgument, match="give background=True too"):
            save_checkpoint(tmp_path / "saved", optimizer, model, **limit)
    none = float("inf")
    save = save_checkpoint(
        tmp_path / "saved", optimizer, model, background=True, bandwidth=none, stall_max=none
    )
    assert Path(save.wait()).is_dir()


def test_a_failure_is_raised_by_wait_and_steps_go_on(tmp_path):
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    (tmp_path / "file").write_text("no folder")
    save = save_checkpoint(tmp_path / "file", optimizer, model, background=True)
    with pytest.raises(ziggurat.ZigguratError, match="cannot make the folder"):
        save.wait()
    train(model, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_checkpoint(tmp_path / "saved", optimizer, model, background=True).wait()
    assert Path(path).is_dir()


def test_a_failure_that_nobody_asked_for_is_a_warning(tmp_path):
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    (tmp_path / "file").write_text("no folder")
    save_checkpoint(tmp_path / "file", optimizer, model, background=True)
    with pytest.warns(UserWarning, match="the checkpoint of step 1 is not saved: cannot make"):
        optimizer.close()


def test_steps_that_have_waited_long_enough_give_the_save_up(tmp_path, monkeypatch):
    monkeypatch.setattr(background_save, "memory_share", lambda: 0)
    monkeypatch.setattr(checkpoint_module, "check_copied", lambda copied_bytes, twice_bytes: 0)
    model, optimizer = new_run(tmp_path)
    twin, its = new_run(tmp_path / "twin")
    train(model, optimizer, 1)
    train(twin, its, 1)
    save = save_checkpoint(
        tmp_path / "saved", optimizer, model, background=True, bandwidth=1e4, stall_max=0.05
    )
    train(model, optimizer, 3)
    train(twin, its, 3)
    with pytest.raises(ziggurat.ZigguratError, match="bandwidth is too small.*raise stall_max"):
        save.wait()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)
    assert not list((tmp_path / "saved").glob("step-*"))


def test_what_would_not_fit_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(background_save, "memory_share", lambda: 1000)
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    with pytest.raises(ziggurat.InvalidArgument, match=r"would copy .* KiB .* save without"):
        save_checkpoint(tmp_path / "saved", optimizer, model, background=True)
    with pytest.raises(ziggurat.InvalidArgument, match="bandwidth is 0: give bytes a second"):
        monkeypatch.undo()
        save_checkpoint(tmp_path / "saved", optimizer, model, background=True, bandwidth=0)
    with pytest.raises(ziggurat.InvalidArgument, match="stall_max is -1: give seconds"):
        save_checkpoint(tmp_path / "saved", optimizer, model, background=True, stall_max=-1)


def test_a_forked_child_leaves_the_save_to_its_parent(tmp_path):
    model, optimizer = new_run(tmp_path)
    train(model, optimizer, 1)
    save = save_checkpoint(tmp_path / "saved", optimizer, model, background=True, bandwidth=SLOW)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(model, optimizer, 2)
    assert Path(save.wait()).is_dir()


def resumed_loop(tmp_path, model, optimizer, steps, **saves):
    loader = torch.utils.data.DataLoader(torch.arange(100), batch_size=2, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    resume = ziggurat.torch.Resume(optimizer, schedule, loader, **saves)
    for _ in resume:
        if resume.steps == steps:
            break
        train(model, optimizer, 1)
        schedule.step()
    return resume


def test_a_loop_of_resume_saves_every_so_many_steps(tmp_path):
    torch.manual_seed(1)
    model = Model()
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/store", model=model
    )
    saves = {"checkpoint_every": 2, "checkpoint_dir": tmp_path / "saved", "keep_last": 2}
    resumed_loop(tmp_path, model, optimizer, 7, **saves)
    optimizer.close()
    names = sorted(found.name for found in (tmp_path / "saved").glob("step-*"))
    assert names == ["step-000000004", "step-000000006"]
    other, its = new_run(tmp_path / "other")
    schedule = torch.optim.lr_scheduler.StepLR(its, step_size=2, gamma=0.5)
    assert load_checkpoint(tmp_path / "saved", its, other, scheduler=schedule).step == 6
    twin, of_twin = new_run(tmp_path / "twin")
    of_twin_schedule = torch.optim.lr_scheduler.StepLR(of_twin, step_size=2, gamma=0.5)
    for _ in range(6):
        train(twin, of_twin, 1)
        of_twin_schedule.step()
    assert schedule.last_epoch == 6
    for param, expected in zip(other.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize(
    ("saves", "says"),
    [
        ({"checkpoint_every": 2}, "give both checkpoint_every and checkpoint_dir"),
        ({"checkpoint_dir": "saved"}, "give both checkpoint_every and checkpoint_dir"),
        ({"checkpoint_every": -1}, "give a number of steps"),
        ({"checkpoint_every": 2, "checkpoint_dir": "saved"}, "give Resume the loader"),
        (
            {"checkpoint_every": 2, "checkpoint_dir": "saved", "loader": [1]},
            "give the optimizer model=model",
        ),
    ],
)
def test_what_a_loop_of_resume_cannot_save_is_refused_first(tmp_path, saves, says):
    _, optimizer = new_run(tmp_path, "nvme")
    with pytest.raises(ziggurat.InvalidArgument, match=says):
        ziggurat.torch.Resume(optimizer, **saves)
    assert not (tmp_path / "store").exists()


SCRIPT = """
    import sys, torch, ziggurat.torch
    sys.path.insert(0, {here!r})
    from background_save_test import new_run, train
    from pathlib import Path
    torch.set_num_threads(1)
    folder, ends, bandwidth = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model, optimizer = new_run(folder, "nvme")
    for step in range(1, ends + 1):
        train(model, optimizer, 1)
        if step % 3 == 0:
            ziggurat.torch.save_checkpoint(
                folder / "saved", optimizer, model, background=True, bandwidth=bandwidth
            )
        print(step, flush=True)
"""


def script(folder, steps, bandwidth):
    text = textwrap.dedent(SCRIPT).format(here=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", text, str(folder), str(steps), str(bandwidth)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_that_ends_says_that_its_save_has_failed(tmp_path):
    (tmp_path / "saved").write_text("no folder")
    ended = script(tmp_path, 3, SLOW)
    assert ended.wait() == 0
    assert "the checkpoint of step 3 is not saved: cannot make the folder" in ended.stderr.read()


def test_a_script_that_ends_has_its_checkpoint(tmp_path):
    ended = script(tmp_path, 4, SLOW)
    assert ended.wait() == 0, ended.stderr.read()
    assert [found.name for found in (tmp_path / "saved").glob("step-*")] == ["step-000000003"]


def test_whenever_it_is_killed_a_checkpoint_is_whole_or_absent(tmp_path):
    draws = random.Random(int.from_bytes(os.urandom(4), "little"))
    whole = 0
    for run in range(_KILLS):
        folder = tmp_path / str(run)
        folder.mkdir()
        killed = script(folder, 40, 1e7)
        assert killed.stdout.readline(), killed.stderr.read()
        time.sleep(draws.uniform(0, 1.5))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        for found in sorted((folder / "saved").glob("step-*")):
            if not (found / "manifest.json").exists():
                continue  # never committed: the next save removes it
            whole += 1
            step = int(found.name[5:14])
            model, optimizer = new_run(folder / "loaded")
            assert load_checkpoint(found, optimizer, model).step == step
            twin, its = new_run(folder / "twin")
            train(twin, its, step)
            for (name, value), (_, expected) in zip(
                model.state_dict().items(), twin.state_dict().items(), strict=True
            ):
                assert torch.equal(value, expected), (step, name)
            for mine, theirs in zip(
                optimizer.state_dict()["state"].values(),
                its.state_dict()["state"].values(),
                strict=True,
            ):
                for name, value in theirs.items():
                    assert torch.equal(mine[name], value), (step, name)
    print(f"{_KILLS} runs were killed, and {whole} checkpoints were whole")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-s"]))
