# SPDX-License-Identifier: Apache-2.0
"""optimizer.why_slow(): what limits the steps of an offloaded model, and what a change would save. The judgement is tried
on figures that are made up, since no test's time is another's; runs of the engine give it real ones.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import sys
import time

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, memory_of, tokens_of, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument, Unimplemented
from ziggurat._memory.placement import Homes
from ziggurat._plan.asked import Asked
from ziggurat._plan.why_slow import Seen, judged
from ziggurat._units.units import divide

RATE = 1e9
NOTHING = dict.fromkeys(
    (
        "nvme_read_bytes",
        "nvme_write_bytes",
        "nvme_busy_s",
        "frozen_read_bytes",
        "prefetch_hits",
        "prefetch_misses",
        "wait_sweep_s",
        "waited_units_s",
        "waited_gradients_s",
        "waited_step_s",
    ),
    0,
)


def blocks(count: int = 8) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512)) for _ in range(count)))


def asked(units: float = 9.0, grads: str = "host", host_memory: int | None = 1 << 26, **other) -> Asked:
    """A run with memory for so many of its 8 units."""
    division = divide(blocks(), "auto", also_meta=True)
    settings = {
        "division": division,
        "homes": Homes("nvme", grads),
        "memory_bytes": int(units * division.units[0].size_bytes),
        "optimizer": "adamw",
        "state_format": "fp32",
        "state_on_drive": True,
        "path": None,
        "host_memory": host_memory,
        "accumulation": 1,
        "clips": False,
        "free": 1 << 40,
    }
    return Asked(**settings | other)


def seen(run: Asked, compute_s: float, steps: int = 10, **waited: float) -> Seen:
    """Figures of steps that compute and wait so long each, and move what the plan says at RATE."""
    step = run.plan(has_room=True).step
    moved = {"nvme_read_bytes": step.read, "nvme_write_bytes": step.written}
    moved["nvme_busy_s"] = sum(moved.values()) / RATE
    moved |= {"prefetch_hits": 30, "prefetch_misses": 10}
    figures = {name: value * steps for name, value in (NOTHING | moved | waited).items()}
    waits = sum(waited.get(f"waited_{name}_s", 0) for name in ("units", "gradients", "step"))
    return Seen(steps, steps * (compute_s + waits), figures)


def changes_of(run: Asked, compute_s: float, **waited: float) -> dict[str, float]:
    found = judged(run, seen(run, compute_s, **waited))
    return {change.what: change.step_s for change in found.changes}


def test_a_run_that_waits_for_little_is_limited_by_compute():
    found = judged(asked(), seen(asked(), 1.0, waited_units_s=0.05, wait_sweep_s=0.03))
    assert found.limit == "compute"
    assert found.seconds == pytest.approx({"compute": 1.0, "units": 0.02, "update": 0.03, "gradients": 0})
    assert found.changes == ()
    assert "neither memory nor a faster drive" in str(found)


@pytest.mark.parametrize(
    ("waited", "limit"),
    [
        ({"waited_units_s": 0.5, "wait_sweep_s": 0.1}, "units"),
        ({"waited_units_s": 0.5, "wait_sweep_s": 0.4}, "update"),
        ({"waited_units_s": 0.2, "waited_step_s": 0.5}, "update"),
        ({"waited_units_s": 0.2, "waited_gradients_s": 0.3}, "gradients"),
    ],
)
def test_the_limit_is_what_a_run_waits_for_most(waited, limit):
    run = asked(units=3.5, grads="nvme")
    found = judged(run, seen(run, 1.0, **waited))
    assert found.limit == limit
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert found.prefetch_hits == 0.75
    assert found.drive_bytes_per_s == pytest.approx(RATE)


def test_memory_is_named_with_which_so_many_units_more_stay():
    run = asked(units=3.5)
    step = run.plan(has_room=True).step
    reads_s = (step.params_read_forward + step.params_read_backward) / RATE
    found = changes_of(run, reads_s, waited_units_s=reads_s)
    whole = sum(unit.size_bytes for unit in run.division.units)
    # A backward finds all there, and a forward reads what the step has changed.
    less = step.brought_forward + step.brought_backward
    kept = step.brought_backward / less
    assert found[f"memory={whole}, so that all units stay"] == pytest.approx(reads_s * (2 - kept))
    more = [what for what in found if "more stay" in what]
    assert len(more) == 1
    assert found[more[0]] > reads_s * (2 - kept)
    assert found["twice as many tokens in each backward"] == pytest.approx(reads_s)
    assert found["a drive that is twice as fast"] == pytest.approx(reads_s * 1.5)


@pytest.mark.parametrize("where", [{}, {"homes": Homes("host", None), "state_on_drive": False}], ids=["nvme", "host"])
def test_memory_is_named_for_a_frozen_base_that_is_read_in_its_files(where):
    """Adapters beside it are all that the engine has."""
    model = blocks()
    for block in model:
        block[0].weight.requires_grad_(False)
    division = divide(model, "auto", also_meta=True)
    division.leave_in_files(trained := {block[0].bias for block in model}, also_meta=True)
    base = 8 * 512 * 512 * 4
    run = asked(division=division, memory_bytes=3 * base // 8, **where)
    assert len(trained) == 8
    assert run.plan(has_room=True).step.frozen_read_forward == base
    found = judged(run, seen(run, 1.0, waited_units_s=2.0, frozen_read_bytes=2 * base))
    assert "it reads 16.0 MiB of frozen parameters in their own files" in str(found)
    whole = sum(unit.size_bytes for unit in division.units)
    changes = {change.what: change.step_s for change in found.changes}
    assert changes[f"memory={whole}, so that all units stay"] < 1.1


def test_where_all_units_fit_only_larger_steps_read_less():
    run = asked()
    step = run.plan(has_room=True).step
    reads_s = step.params_read_forward / RATE
    found = judged(run, seen(run, reads_s, waited_units_s=reads_s))
    assert found.limit == "units"
    assert "which all stay in memory= until a step changes them" in str(found)
    changes = {change.what: change.step_s for change in found.changes}
    assert changes["twice as many backwards in a step"] == pytest.approx(1.5 * reads_s)  # of one read for two
    assert changes["twice as many tokens in each backward"] == pytest.approx(reads_s)
    assert not any(what.startswith("memory=") for what in changes)


def test_a_run_that_waits_for_updates_is_told_of_larger_steps_and_of_host_memory():
    run = asked(host_memory=run_with_little(asked()))
    step = run.plan(has_room=True).step
    assert step.state_read > 0
    update_s = step.in_update / RATE
    found = changes_of(run, update_s, waited_units_s=update_s, wait_sweep_s=update_s)
    assert found["twice as many backwards in a step"] == pytest.approx(1.5 * update_s)
    named = next(what for what in found if what.startswith("host_memory="))
    host_memory = int(named.split("=")[1].split(",")[0])
    larger = asked(host_memory=host_memory)
    assert larger.plan(has_room=True).step.state_read == 0
    assert found[named] == pytest.approx(2 * update_s - step.state_read / RATE)


def run_with_little(run: Asked) -> int:
    """Returns the least host_memory that works."""
    with pytest.raises(InvalidArgument, match="smallest that works is") as error:
        asked(host_memory=4096).plan(has_room=True)
    return int(str(error.value).split()[-1])


def test_an_update_in_memory_does_not_hide_behind_more_tokens():
    run = asked(state_on_drive=False, homes=Homes("host", None))
    found = changes_of(run, 1.0, waited_step_s=1.0)
    assert found == {"twice as many tokens in each backward": pytest.approx(1.5)}


def test_gradients_in_files_may_go_to_memory():
    run = asked(grads="nvme", accumulation=4)
    step = run.plan(has_room=True).step
    grads_s = (step.grads_read_backward + step.grads_written) / RATE
    found = changes_of(run, 1.0, waited_gradients_s=grads_s + 1)
    assert next(its for what, its in found.items() if what.startswith("grads=host")) == pytest.approx(1.0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_of_the_engine_is_judged_by_what_it_counts(tmp_path, accumulate, one_thread):  # noqa: F811
    model = gpt()
    ziggurat.torch.offload(model, memory=memory_of(model), placement="params=nvme,grads=nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    with pytest.raises(InvalidArgument, match="no step was made"):
        optimizer.why_slow()

    def steps(count):
        for step in range(count):
            for part in range(accumulate):
                loss_of(model, tokens_of(step + part)).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    assert optimizer.why_slow().steps == 3
    optimizer.figures()
    passes = []
    judge = optimizer._passes
    optimizer._passes = lambda *given: passes.append(judge(*given)) or passes[-1]
    steps(4)
    found = optimizer.why_slow()
    assert passes == [accumulate]
    assert found.steps == 4
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert min(found.seconds.values()) >= 0
    assert found.seconds["units"] + found.seconds["update"] > 0
    assert found.seconds["gradients"] > 0
    figures = optimizer.figures()
    assert found.read_bytes > 0
    assert found.written_bytes > 0
    assert figures["waited_units_s"] > 0
    assert str(found).startswith("the limit is ")
    with pytest.raises(InvalidArgument, match="no step was made"):
        optimizer.why_slow()
    optimizer.close()


@pytest.mark.parametrize("twice", [False, True], ids=["last blocks", "a block twice"])
def test_backwards_are_counted_where_not_each_unit_has_one(twice, tmp_path, monkeypatch):
    class Model(torch.nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            return self[-1](x) if twice else x

    model = Model(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)))
    model[:4].requires_grad_(False)
    ziggurat.torch.offload(model, memory=memory_of(model), placement="nvme")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, placement=f"nvme:{tmp_path}/state")
    asked = []
    monkeypatch.setattr("ziggurat._optimizer.reports.judged", lambda *given: asked.append(given[0]) or judged(*given))
    for _ in range(2):
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.why_slow()
    assert asked[0].accumulation == 3
    optimizer.close()


class Clock:
    """The clock of this machine, and the hours that are added to it."""

    def __init__(self, monkeypatch) -> None:
        self.hours = 0
        clock, clock_ns = time.perf_counter, time.perf_counter_ns
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * self.hours)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: clock_ns() + 3600 * self.hours * 10**9)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_evaluation_is_left_out(tmp_path, monkeypatch, checkpointing, one_thread):  # noqa: F811
    model = gpt(checkpointing=checkpointing)
    ziggurat.torch.offload(model, memory=memory_of(model), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    clock = Clock(monkeypatch)

    def judgement(evaluations: int):
        asked = []
        for step in range(4):
            loss_of(model, tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for part in range(evaluations):
                    loss_of(model, tokens_of(part))
                clock.hours += evaluations  # a metric, say
        with monkeypatch.context() as patched:
            patched.setattr(
                "ziggurat._optimizer.reports.judged", lambda *given: asked.append(given[0]) or judged(*given)
            )
            return optimizer.why_slow(), asked[0].accumulation

    judgement(0)
    plain, accumulation = judgement(0)
    evaluated, its = judgement(6)
    assert accumulation == its == 1
    assert evaluated.step_s < 3600
    assert evaluated.read_bytes < 2 * plain.read_bytes  # and not four times as much
    assert min(evaluated.seconds.values()) >= 0
    optimizer.close()


def test_a_frozen_part_of_a_forward_is_training(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.body = (torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))) for _ in range(2))
            self.tower.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                x = self.tower(x)
            clock.hours += 1
            return self.body(x)

    model = Model()
    ziggurat.torch.offload(model, memory=memory_of(model), placement="nvme")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, placement=f"nvme:{tmp_path}/state")
    for _ in range(3):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.why_slow().step_s > 3000
    optimizer.close()


def test_a_model_that_is_not_offloaded_is_refused():
    model = gpt()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(Unimplemented, match="only knows models that were given to offload"):
        optimizer.why_slow()
    optimizer.close()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
