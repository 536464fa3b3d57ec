# SPDX-License-Identifier: Apache-2.0
"""Killed at any instant and started again, a script goes on with the same bits.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. ZIGGURAT_KILLS: how
often the run is killed (20).
"""

import os
import random
import shutil
import signal
import sys
import time

try:
    import pytest
    import torch
    from forked_runs import forked_runs
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch

EPOCHS, BATCHES, WORKERS = 3, 14, 4


class Words(torch.utils.data.Dataset):
    """Items that are drawn anew each time, in the worker that makes them."""

    def __len__(self):
        return BATCHES * 8

    def __getitem__(self, index):
        noise = torch.rand(24) + 0.1 * random.random()
        return torch.sin(torch.arange(24.0) * (index + 1)) + 0.1 * noise


def run(directory: str, path: str, placement: str, stop_after: int | None = None) -> None:
    """Trains to the end, and leaves parameters and losses in `path`."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    random.seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 24)
    )
    optimizer = ziggurat.torch.AdamW(
        model.parameters(),
        lr=1e-2,
        placement=f"nvme:{directory}",
        threads=1,
        model=model if placement == "model" else None,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES // 2)
    loader = torch.utils.data.DataLoader(Words(), 8, shuffle=True, num_workers=WORKERS)
    resume = ziggurat.torch.Resume(optimizer, scheduler, loader)
    for _ in resume.epochs(EPOCHS):
        for count, batch in enumerate(resume):
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            if resume.batch % 2 == 0:  # two backwards a step
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if count == stop_after:
                os._exit(9)
    optimizer.synchronize()
    state = [p.detach().clone() for p in model.parameters()]
    state.append(torch.tensor([scheduler.get_last_lr()[0], resume.steps]))
    torch.save(state, path + ".part")
    os.rename(path + ".part", path)
    optimizer.close()


@pytest.mark.parametrize("placement", ["plain", "model"])
def test_a_run_that_was_killed_again_and_again_has_the_bits_of_one_that_was_not(
    placement, tmp_path
):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    whole, parts = str(tmp_path / "whole.pt"), str(tmp_path / "parts.pt")
    kills = int(os.environ.get("ZIGGURAT_KILLS", "20")) // 2
    with forked_runs() as runs:
        begun = time.monotonic()
        assert runs.status_of(runs.started(run, one, whole, placement)) == 0
        took = time.monotonic() - begun

        def begin_anew():
            compare(whole, parts)
            shutil.rmtree(two)
            os.unlink(parts)

        runs.kill_and_resume(lambda: runs.started(run, two, parts, placement), kills, took, begin_anew)
    compare(whole, parts)


def compare(one: str, other: str) -> None:
    for a, b in zip(torch.load(one), torch.load(other), strict=True):
        assert torch.equal(a, b)


def test_the_store_is_free_while_helpers_of_a_killed_run_still_live(tmp_path):
    """Workers find out only after seconds that their trainer has died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        model = torch.nn.Linear(4, 4)
        optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.engine.make_durable()
        helper = os.fork()
        if helper == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writer, str(helper).encode())
        time.sleep(60)
        os._exit(1)
    helper = int(os.read(reader, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
        optimizer.open(resume=True)
        assert optimizer.engine.resumed
        os.kill(helper, 0)  # it still lives
        optimizer.close()
    finally:
        os.kill(helper, signal.SIGKILL)


def test_a_store_is_adopted_by_resume_only(tmp_path):
    def optimizer(value):
        model = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(model.weight, value)
        made = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return model, made

    first_model, first = optimizer(1.0)
    first.step()
    first.close()
    second_model, second = optimizer(2.0)
    with pytest.raises(ziggurat.InvalidArgument, match="there is a store already"):
        second.step()
    with pytest.raises(ziggurat.DataLoss, match="made without Resume"):
        ziggurat.torch.Resume(second)
    assert torch.equal(second_model.weight, first_model.weight)  # it was read


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "renamed"])
@pytest.mark.parametrize("state_format", ["fp32", "8bit"])
def test_a_store_goes_on_where_small_parameters_stand_between_large_ones(
    state_format, compiled, tmp_path
):
    def made():
        torch.manual_seed(3)
        layers = [torch.nn.Linear(200, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 200)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(200, 3))

    def adamw(model, placement):
        wrapped = torch.compile(model) if compiled and placement != "host" else model
        return ziggurat.torch.AdamW(
            wrapped.named_parameters(), placement=placement, state_format=state_format, threads=1
        )

    def step(model, optimizer, number):
        for index, param in enumerate(model.parameters()):
            absent = (index + number) % 3 == 0
            param.grad = None if absent else torch.sin(param.detach() * (number + 1))
        optimizer.step()

    plain = made()
    expected = adamw(plain, "host")
    for number in range(6):
        step(plain, expected, number)
    expected.synchronize()
    where = f"nvme:{tmp_path}/state"
    for first in (0, 2, 4):
        model = made()
        optimizer = adamw(model, where)
        optimizer.open(resume=True)
        for number in (first, first + 1):
            step(model, optimizer, number)
        optimizer.close()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
    expected.close()


def test_what_resume_keeps_comes_back_and_must_be_asked_for(tmp_path):
    class Seen:
        """What a script counts for itself: more than 64 KiB of it."""

        def __init__(self):
            self.values = torch.zeros(40_000)

        def state_dict(self):
            return {"values": self.values}

        def load_state_dict(self, state):
            self.values = state["values"]

    def begun(**more):
        model = torch.nn.Linear(3, 3)
        optimizer = ziggurat.torch.SGD(
            model.parameters(), lr=0.1, placement=f"nvme:{tmp_path}/state"
        )
        return model, optimizer, ziggurat.torch.Resume(optimizer, **more)

    seen = Seen()
    model, optimizer, resume = begun(seen=seen)
    assert not resume.resumed
    optimizer.param_groups[0]["lr"] = 0.25
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    seen.values[3] = 5.0
    torch.manual_seed(123)
    optimizer.close()
    expected = torch.rand(3)

    seen = Seen()
    _, optimizer, resume = begun(seen=seen)
    assert resume.resumed and resume.steps == 1
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert seen.values[3] == 5.0
    assert torch.equal(torch.rand(3), expected)
    optimizer.close()
    with pytest.raises(ziggurat.InvalidArgument, match="the store has a state of seen"):
        begun()


class Kept:
    def __init__(self, count):
        self.values = torch.zeros(count)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_what_a_store_cannot_hold_is_named_at_once_and_where_it_grows(tmp_path):
    def begun(**kept):
        model = torch.nn.Linear(3, 3)
        place = f"nvme:{tmp_path}/state"
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1, placement=place)
        return model, optimizer, ziggurat.torch.Resume(optimizer, **kept)

    words = r"of which ema takes 1\d{6}, but a store holds at most 1048576: leave ema out of Resume"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        begun(ema=Kept(300_000), seen=Kept(1000))
    assert not (tmp_path / "state").exists()
    grows = Kept(1000)
    model, optimizer, resume = begun(ema=grows)
    for count in (2000, 300_000):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        grows.values = torch.ones(count)
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        optimizer.step()
    grows.values = torch.ones(3000)
    optimizer.close()
    again = Kept(1000)
    _, optimizer, resume = begun(ema=again)
    assert resume.steps == 2
    assert torch.equal(again.values, torch.ones(3000))
    optimizer.close()


def test_the_names_of_many_parameters_take_little_of_what_a_store_holds(tmp_path):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for index in range(400):
                name = f"layers_{index % 48}_feed_forward_experts_{index // 48}_" + "w" * 3000
                self.register_parameter(name, torch.nn.Parameter(torch.ones(1)))

    def begun():
        model = Experts()
        place = f"nvme:{tmp_path}/state"
        named = list(model.named_parameters())
        optimizer = ziggurat.torch.SGD(named, lr=0.1, placement=place)
        return model, optimizer, ziggurat.torch.Resume(optimizer)

    model, optimizer, _ = begun()
    names = optimizer.param_groups[0]["param_names"]
    assert sum(map(len, names)) > 1 << 20
    sum(param.sum() for param in model.parameters()).backward()
    optimizer.step()
    optimizer.close()
    _, optimizer, resume = begun()
    assert resume.steps == 1
    assert optimizer.param_groups[0]["param_names"] == names
    optimizer.close()


def test_groups_that_a_store_cannot_hold_are_said_to_be_the_optimizers(tmp_path):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "tag": f"{i:04}" * 1000} for i in range(300)]
    optimizer = ziggurat.torch.SGD(groups, lr=0.1, placement=f"nvme:{tmp_path}/state")
    with pytest.raises(ziggurat.InvalidArgument, match="give the optimizer fewer groups"):
        ziggurat.torch.Resume(optimizer, seen=Kept(1000))


def test_an_accelerators_random_states_come_back(tmp_path, monkeypatch):
    states = [torch.arange(3, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]
    found = []
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.xpu, "set_rng_state_all", found.extend)

    def begun():
        model = torch.nn.Linear(3, 3)
        place = f"nvme:{tmp_path}/state"
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1, placement=place)
        return model, optimizer, ziggurat.torch.Resume(optimizer)

    model, optimizer, _ = begun()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert not found
    _, optimizer, _ = begun()
    optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(found, states, strict=True))


def test_parameters_that_come_after_resume_are_refused(tmp_path):
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.1, placement=f"nvme:{tmp_path}/state")
    ziggurat.torch.Resume(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model.bias.requires_grad_(True)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ziggurat.Unimplemented, match="'group0.1' was added after Resume"):
        optimizer.step()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
