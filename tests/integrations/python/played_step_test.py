# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.plan(model, batch, tokens=...): an offloaded model's step is played by steps of the model as it is, on
this machine as a profile says that it is.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import json
import sys
from dataclasses import replace

try:
    import pytest
    import torch
    import torch.utils.checkpoint
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, tokens_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument, ResourceExhausted
from ziggurat._plan import times
from ziggurat._plan.plan_page import PlayedStep
from ziggurat._plan.recorded_times import recorded_times
from ziggurat._units.units import divide

BLOCKS, WIDTH = 6, 512
COMPUTE = {
    "measured_at": "2026-01-01T00:00:00Z",
    "threads": 2,
    "layer_gflop_per_s": 100.0,
    "layer_fp32_gflop_per_s": 100.0,
    "unaligned_gflop_per_s": 100.0,
    "attention_gflop_per_s": 100.0,
    "pass_gb_per_s": 10.0,
    "copy_gb_per_s": 1.0,
    "weights_gb_per_s": 0.0,
    "kernels_gb_per_s": 10.0,
}
DRIVE = {
    "device": "/dev/a",
    "filesystem": "b",
    "engine": "c",
    "measured_at": "2026-01-01T00:00:00Z",
    "read_gb_per_s": 1.0,
    "write_gb_per_s": 1.0,
    "mix_gb_per_s": 1.0,
    "block_bytes": 1 << 20,
    "queue_depth": 2,
    "flags": [],
}


@pytest.fixture
def measured(tmp_path, monkeypatch, one_thread):  # noqa: F811
    """Lets this machine have been measured, with a drive of so many GB a second."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def measure(drive: float = 2.0, adam: float = 10.0) -> str:
        machine = {"cpu_model": "a", "kernel": "b", "host_adam_gb_per_s": adam}
        drives = [{"path": str(tmp_path), "sweep_gb_per_s": drive} | DRIVE]
        profile = {"ziggurat_profile": 1, "machine": machine, "drives": drives, "compute": COMPUTE}
        (tmp_path / "ziggurat").mkdir(exist_ok=True)
        (tmp_path / "ziggurat" / "profile.json").write_text(json.dumps(profile))
        return f"nvme:{tmp_path}/state"

    return measure


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(1)
    blocks = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(BLOCKS))
    return torch.nn.Sequential(*blocks)


def plan_of(model: torch.nn.Module, **how):
    given = {"loss": lambda out, batch: out.square().mean(), "tokens": 8, "memory": "8MiB"}
    return ziggurat.torch.plan(model, **({"batch": torch.ones(8, WIDTH)} | given | how))


def played(model: torch.nn.Module, **how) -> PlayedStep:
    found = plan_of(model, **how).played
    assert found is not None
    return found


def test_a_step_is_what_is_computed_and_updated(measured):
    """AdamW in fp32 reads and writes three values of a record, reads a gradient and writes a parameter, in the step
    where all is in memory. The engine has as many workers as PyTorch has threads, on the two cores that were
    measured."""
    measured(adam=1.0)
    model = mlp()
    step = played(model)
    update_s = 32 * sum(param.numel() for param in model.parameters()) / (1e9 * torch.get_num_threads() / 2)
    assert step.update_s == pytest.approx(update_s, rel=0.1)
    assert step.seconds == pytest.approx(step.compute_s + step.python_s + step.update_s, rel=0.01)
    assert step.units_s == step.drive_busy_s == 0


def test_a_drive_that_takes_longer_than_compute_binds(measured):
    where = measured(drive=0.01)
    how = {"optimizer_placement": where, "placement": "nvme", "host_memory": "16MiB", "memory": "4MiB"}
    plan = plan_of(mlp(), **how)
    assert plan.played.seconds >= 0.95 * plan.bound.seconds
    assert plan.played.limit.startswith("the drive")
    assert plan.played.written_bytes == pytest.approx(plan.step.written, rel=0.05)
    assert plan.played.read_bytes <= 1.05 * plan.step.read
    fast = played(mlp(), drive="10GB", **how)
    assert fast.seconds < 0.2 * plan.played.seconds
    assert f"a step takes about {plan.played.seconds:.3g} s: " in str(plan)


def test_units_that_come_and_go_are_copied(measured):
    measured()
    stays, comes = played(mlp()), played(mlp(), memory="4MiB")
    assert stays.copies_busy_s == 0
    brought = plan_of(mlp(), memory="4MiB").step
    assert comes.copies_busy_s == pytest.approx((brought.brought_forward + brought.brought_backward) / 1e9, rel=0.15)


def test_backwards_of_a_step_are_played_one_after_another(measured):
    measured()
    assert played(mlp(), accumulation=4).compute_s > 2.5 * played(mlp()).compute_s


def test_without_a_profile_the_least_is_said_and_how_to_get_more(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plan = plan_of(mlp(), optimizer_placement=f"nvme:{tmp_path}/state", drive="1GB")
    assert plan.played is None
    assert plan.bound is not None
    assert "not known: measure this machine with `ziggurat profile --measure`" in str(plan)


def test_what_is_not_played_yet_is_said(measured):
    measured()
    assert "steps are played of one rank on the CPU" in str(plan_of(mlp(), ranks=2))


def test_the_model_is_as_it_was(measured):
    measured()
    model = mlp()
    before = [param.clone() for param in model.parameters()]
    plan_of(model)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_recording_has_each_unit_and_gradient_in_order(one_thread):  # noqa: F811
    model = gpt()
    division = divide(model, "auto")
    batch = tokens_of(0)[:, :-1]
    found = recorded_times(model, division, lambda its: ((out := model(its)).mean(), out), batch)
    names = [one.what for one in found.happened]
    assert names.count(times.ENTER) == names.count(times.LEAVE) == len(division.entries)
    assert names.count(times.BEGIN) == names.count(times.END) == len(division.entries)
    assert names.count(times.GRADIENT) == sum(1 for _ in model.parameters())
    begun = [one.of for one in found.happened if one.what == times.BEGIN]
    called = [one.of for one in found.happened if one.what == times.ENTER]
    blocks = [number for number in called if number != 0]
    assert [number for number in begun if number != 0] == blocks[::-1]
    assert all(one.seconds >= 0 for one in found.happened)


def test_the_least_time_lets_the_drive_write_what_stays_through_all_of_the_step(measured):
    """The update of a state that stays in memory is written in forward or in backward."""
    how = {"batch": None, "loss": None, "optimizer_placement": measured(), "compute_s": 1.0, "host_memory": "12MiB"}
    written = plan_of(mlp(), **how, state_format="8bit").step.written
    kept, read = (plan_of(mlp(), **how, drive=written / 0.8, state_format=its) for its in ("8bit", "fp32"))
    assert kept.step.read == 0 < read.step.read
    assert kept.bound.seconds == 1.0
    assert kept.bound.limit == "compute"
    assert read.bound.seconds > 1.5


def test_a_step_that_moves_less_than_the_most_is_not_said_to_take_longer(measured):
    """Of experts a batch calls some, and the least time is that of a step that calls all."""
    plan = plan_of(mlp(), optimizer_placement=measured(drive=0.1), host_memory="64MiB")
    assert "a step takes at least" in str(plan)
    less = replace(plan, played=replace(plan.played, seconds=0.9 * plan.bound.seconds))
    assert "a step takes at least" not in str(less)
    assert "a step takes about" in str(less)


def test_steps_that_memory_has_no_room_for_are_not_made(measured, monkeypatch):
    measured()
    model = mlp()
    needed = sum(param.nbytes for param in model.parameters())
    monkeypatch.setattr("ziggurat._plan.plan.free_bytes", lambda: needed)
    with pytest.raises(ResourceExhausted, match="for gradients above all.*: leave out the batch"):
        plan_of(model, free_memory="1GiB")
    assert all(param.grad is None for param in model.parameters())


def test_a_loss_that_is_none_is_named(measured):
    measured()
    with pytest.raises(InvalidArgument, match="loss= has returned a tensor of 4096 elements"):
        plan_of(mlp(), loss=lambda out, batch: out)
    with pytest.raises(InvalidArgument, match="loss= has returned a float"):
        plan_of(mlp(), loss=lambda out, batch: 1.0)


class Checkpointed(torch.nn.Module):
    """Its blocks are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = mlp(), reentrant

    def forward(self, its: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            its = torch.utils.checkpoint.checkpoint(block, its, use_reentrant=self.reentrant)
        return its


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_computes_again_is_let_go_of(measured, reentrant):
    """Checkpointing ends a forward by an error as soon as it has what it needs, or runs a backward in a backward."""
    measured()
    model, batch = Checkpointed(reentrant), torch.ones(8, WIDTH, requires_grad=True)
    division = divide(model, "auto")
    found = recorded_times(model, division, lambda its: ((out := model(its)).square().mean(), out), batch)
    in_use: set[int] = set()
    for one in found.happened:
        if one.what in (times.ENTER, times.BEGIN):
            in_use.add(one.of)
        elif one.what in (times.LEAVE, times.END):
            in_use.discard(one.of)
        assert len(in_use) <= 2, f"{one} beside {in_use}"
    names = [one.what for one in found.happened]
    assert names.count(times.ENTER) == names.count(times.LEAVE)
    assert played(model, batch=batch, memory="4MiB").seconds > 0


def test_gradients_that_are_summed_in_files_begin_in_their_own_type(measured):
    """Their drive is not asked for more than the plan says that it is at most."""
    where = measured()
    how = {"optimizer_placement": where, "placement": "grads=nvme", "host_memory": "64MiB", "accumulation": 2}
    model = mlp().bfloat16()
    plan = plan_of(model, batch=torch.ones(8, WIDTH, dtype=torch.bfloat16), **how)
    assert 0 < plan.played.read_bytes <= 1.02 * plan.step.read
    assert plan.played.written_bytes <= 1.02 * plan.step.written


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"compute_s": 1.0}, "leave out compute_s= and flops="),
        ({"machine": "h100"}, "neither machine="),
    ],
)
def test_what_a_batch_tells_is_not_given_too(arguments, match):
    with pytest.raises(InvalidArgument, match=match):
        plan_of(mlp(), **arguments)


def test_what_computes_nothing_here_cannot_be_recorded(one_thread):  # noqa: F811
    with pytest.raises(InvalidArgument, match="on the meta device computes nothing"):
        plan_of(mlp().to("meta"))
    model = mlp()
    ziggurat.torch.offload(model, memory="8MiB")
    with pytest.raises(InvalidArgument, match="the model is offloaded: leave out the batch"):
        plan_of(model)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
