# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.plan() of a model whose units are brought to a GPU: its bytes are those that the engine counts, over
the double of the CUDA runtime.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload()
takes.
"""

import contextlib
import sys
import types

try:
    import pytest
    from cuda_double import Gpu  # first, as it chooses the library
    import torch
    from plan_test import BF16, counted, made, memory_for
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._units import refusals
from ziggurat._units.units import divide
from ziggurat.torch import offload, plan

STATE = "optimizer state that stays or is on its way"
STAGED = "units that are put together for the GPU"
RUNS = {
    "parameters live there": {"units": 9, "placement": "host"},
    "parameters live there, little host memory": {
        "units": 9, "placement": "host", "dtype": BF16, "state_format": "split", "host_memory": "6MiB",
    },
    "parameters in host memory": {"units": 3.3, "placement": "host", "host_memory": "12MiB"},
    "parameters on the drive, accumulation 2": {"units": 3.3, "placement": "nvme", "accumulation": 2},
}  # fmt: skip


def budget_of(its):
    """The host memory that the engine divides, as the plan's rows have it."""
    homes = its.in_host_memory.get("parameters", 0)
    return its.in_host_memory[STATE] + its.in_host_memory.get(STAGED, 0) + homes


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_the_engine_takes_and_moves_what_the_plan_says(run, tmp_path):
    model = made(run.get("dtype", torch.float32), 8)
    memory, placement = memory_for(model, run["units"]), run["placement"]
    state = {name: run[name] for name in ("state_format", "host_memory") if name in run}
    accumulation, tier = run.get("accumulation", 1), f"nvme:{tmp_path}/state"
    asked = {"tokens": 4, "accumulation": accumulation}
    before = plan(
        model, **asked, memory=memory, placement=placement, optimizer_placement=tier, device="cuda:0", **state
    )
    assert before.gpu == "cuda:0" and sum(before.on_gpu.values()) >= sum(p.nbytes for p in model.parameters()) / 4
    assert ("parameters" in before.on_gpu) == (run["units"] == 9)
    with Gpu(21) as gpu:
        offload(model, memory=memory, placement=placement, device="cuda:0")
        gpu.computes(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, threads=1, placement=tier, **state)
        found = counted(model, optimizer, accumulation, clips=False, planned=before.step.read)
        after = plan(model, **asked)
        assert (after.step, after.in_host_memory, after.on_gpu) == (before.step, before.in_host_memory, before.on_gpu)
        assert budget_of(after) == optimizer.figures()["host_budget_bytes"]
        assert before.step.state_read == found["state_read_bytes"]
        assert before.step.written == found["nvme_write_bytes"]
        assert optimizer.why_slow() is not None
        optimizer.close()
    assert gpu.findings == []


def on_each_rank(rank, world, folder):
    with Gpu(22 + rank) as gpu:
        model = gpt()
        division = divide(model, "auto")
        division.set_ranks(world)
        memory = division.smallest()[0]
        asked = {"tokens": 4, "memory": memory, "placement": "nvme", "optimizer_placement": f"nvme:{folder}"}
        before = plan(model, **asked, device="cuda:0")
        without = plan(model, **asked)
        offload(model, memory=memory, placement="nvme", device="cuda:0")
        gpu.computes(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, threads=1, placement=f"nvme:{folder}")
        train(model, optimizer, range(1))
        took = optimizer.figures()["host_budget_bytes"]
        optimizer.close()
    return before, without, took, gpu.findings


def test_ranks_have_memory_in_which_units_are_put_together(tmp_path):
    for rank, (before, without, took, findings) in enumerate(on_ranks(2, on_each_rank, 2, str(tmp_path))):
        assert findings == []
        assert STAGED not in without.in_host_memory and before.in_host_memory[STAGED] > 0
        if rank == 0:  # which has most
            assert budget_of(before) == took


def test_the_page_names_the_gpu_which_need_not_be_there():
    page = str(plan(made(BF16, 8), tokens=4, memory="8MiB", device="cuda:3"))
    rows = [line.split() for line in page.splitlines() if " cuda:3 " in line]
    assert [row[0] for row in rows] == ["sums", "largest", "parameters", "sum"]
    with pytest.raises(ziggurat.Unimplemented, match=r'plan.device="xpu"'):
        plan(made(BF16, 8), tokens=4, memory="8MiB", device="xpu")


@pytest.mark.parametrize(("name", "is_there"), [("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)])
def test_cuda_alone_is_the_gpu_that_has_the_parameters(name, is_there):
    param = types.SimpleNamespace(device=torch.device("cuda:0"))  # which need not be there
    with contextlib.nullcontext() if is_there else pytest.raises(ziggurat.Unimplemented, match="'w' is on cuda:0"):
        refusals._check_device(param, "w", torch.device(name))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
