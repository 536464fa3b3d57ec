# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.plan(): its bytes are those that the engine counts, and what cannot fit is refused before anything is
allocated.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import functools
import json
import math
import re
import sys
import time

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, memory_of
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument, ResourceExhausted
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import ROOT, divide

WIDTH = 128
BF16 = torch.bfloat16
IN_FILES = "params=nvme,grads=nvme"


class Block(torch.nn.Module):
    def __init__(self, wide: int = 2) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, wide * WIDTH), torch.nn.Linear(wide * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(torch.nn.Module):
    """A frozen block with adapters beside it that are trained."""

    def __init__(self, wide: int = 2) -> None:
        super().__init__()
        self.base = Block(wide).requires_grad_(False)
        self.narrow = torch.nn.Linear(WIDTH, 16, bias=False)
        self.widen = torch.nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.widen(self.narrow(x))


class Scaled(torch.nn.Module):
    """A block with one small parameter, which has a record of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.scale * x)


class Tied(torch.nn.Module):
    """Its first and last layers have one weight, which is not there all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(12))
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.cat([x, x], 1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(dtype=torch.float32, blocks=8, block=Block):
    torch.manual_seed(1)
    if block is Tied:
        return Tied().to(dtype)
    layers = [torch.nn.Linear(64, WIDTH), *(block() for _ in range(blocks)), torch.nn.Linear(WIDTH, 10)]
    return torch.nn.Sequential(*layers).to(dtype)


def memory_for(model: torch.nn.Module, units: float | None) -> int:
    """Returns memory for the root and so many blocks; None: the least that works."""
    division = divide(model, "auto", also_meta=True)
    if units is None:
        return division.smallest()[0]
    root = sum(unit.size_bytes for unit in division.units if unit.name == ROOT)
    return int(root + units * max(unit.size_bytes for unit in division.units[1:]))


def counted(model, optimizer, accumulation, clips, planned=math.inf, steps=3, again=9):
    """Returns what the engine counts in a step, on average, once the first three are made, in which the engine learns
    the order of units."""
    dtype = next(model.parameters()).dtype

    def step():
        for _ in range(accumulation):
            model(torch.ones(4, 64, dtype=dtype)).float().square().mean().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    settled(optimizer)
    for _ in range(steps):
        step()
    found = {name: value / steps for name, value in settled(optimizer).items()}
    # On a busy machine what is brought ahead may come too early, and again.
    if found["nvme_read_bytes"] > planned and again > 0:
        return counted(model, optimizer, accumulation, clips, planned, again=again - 1)
    return found


def settled(optimizer):
    """Returns the figures when nothing moves any more: a step also brings what the next one uses first."""
    optimizer.synchronize()
    if optimizer.placement != "host":
        optimizer.engine.make_durable()
    figures = optimizer.figures()
    for _ in range(100):
        time.sleep(0.05)
        more = optimizer.figures()
        for name in ("nvme_read_bytes", "nvme_write_bytes", "state_read_bytes", "state_write_bytes"):
            figures[name] += more[name]
        if more["nvme_read_bytes"] == more["nvme_write_bytes"] == 0:
            return figures
    raise AssertionError("the drive does not come to rest")


RUNS = {
    "fp32, all fits": {"units": 9},
    "bf16, all fits": {"units": 9, "dtype": BF16},
    "fp32, 3 of 8 units": {"units": 3.3},
    "bf16, 3 of 8 units, accumulation 4": {"units": 3.3, "dtype": BF16, "accumulation": 4},
    "smallest memory": {"units": None, "blocks": 24},
    "tied layers, 5 of 12 units": {"units": 5, "block": Tied, "accumulation": 2, "slack": 0.04},
    "gradients in files, clipping": {"units": 4.5, "placement": IN_FILES, "clips": True},
    "bf16, gradients in files, accumulation 4, clipping": {
        "units": 9, "placement": IN_FILES, "dtype": BF16, "accumulation": 4, "clips": True,
    },
    "gradients in files, small ones alone": {"units": 9, "placement": IN_FILES, "block": Scaled, "accumulation": 2},
    "frozen base with adapters": {"units": 9, "block": Adapted},
    "frozen base with adapters, 4 of 8 units": {"units": 4.3, "block": Adapted, "dtype": BF16},
    "frozen base in host memory with adapters": {
        "units": 9, "block": Adapted, "placement": "host", "blocks": 24, "host_memory": "14MiB",
    },
    "parameters in host memory": {"units": 3.3, "placement": "host", "clips": True},
    "state in host memory": {"units": 3.3, "placement": "host", "tier": "host"},
    "8-bit state, little host memory": {"units": 9, "state_format": "8bit", "host_memory": "6MiB"},
    "split state, little host memory": {
        "units": 3.3, "dtype": BF16, "state_format": "split", "host_memory": "6MiB", "placement": "host",
    },
    "parameters that live in memory, little host memory": {
        "units": 9, "dtype": BF16, "state_format": "split", "host_memory": "5MiB", "placement": "host",
    },
    "gradients in files, little host memory": {"units": 9, "placement": IN_FILES, "host_memory": "10MiB"},
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_a_step_moves_what_the_plan_says(tmp_path, run, one_thread):  # noqa: F811
    model = made(run.get("dtype", torch.float32), run.get("blocks", 8), run.get("block", Block))
    memory = memory_for(model, run["units"])
    placement = run.get("placement", "nvme")
    accumulation, clips = run.get("accumulation", 1), run.get("clips", False)
    tier = run.get("tier", f"nvme:{tmp_path}/state")
    state = {name: run[name] for name in ("state_format", "host_memory") if name in run}
    plan = ziggurat.torch.plan(
        model,
        tokens=4,
        accumulation=accumulation,
        memory=memory,
        placement=placement,
        optimizer_placement=tier,
        clips=clips,
        **state,
    )
    assert not list(tmp_path.iterdir())
    ziggurat.torch.offload(model, memory=memory, placement=placement)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-3, placement=tier, **state)
    its = ziggurat.torch.plan(model, tokens=4, accumulation=accumulation, clips=clips)
    assert its.step == plan.step, "the offloaded model's plan differs"
    found = counted(model, optimizer, accumulation, clips, plan.step.read)
    assert its.step == ziggurat.torch.plan(model, tokens=4, accumulation=accumulation, clips=clips).step
    kept = sum(part.home_bytes for unit in streaming_of(trained[0])[0].division.units for part in unit.parts())
    if placement == "host" and plan.all_fits:
        kept = 0
    if run.get("block") is not Tied:  # of whose units two modules use one
        assert found["brought_bytes"] == 2 * accumulation * kept
    assert (kept > 0) <= plan.step.brought_forward + plan.step.brought_backward <= found["brought_bytes"]
    slack = run.get("slack", 0.02)  # what several modules share may stay between their uses, or not
    close(plan.step.read, found["nvme_read_bytes"], plan.step.written, slack)
    close(plan.step.written, found["nvme_write_bytes"])
    assert plan.step.state_read == found["state_read_bytes"]
    optimizer.close()


def close(planned: float, counted: float, beside: float = 0, slack: float = 0.0) -> None:
    """Never above the plan, and below it by at most `slack` of all that moves."""
    assert counted <= planned
    assert planned - counted <= slack * (planned + beside), (planned, counted)


BASES = {
    "all fits": {"units": 99},
    "bf16, accumulation 3": {"units": 3.3, "dtype": BF16, "accumulation": 3},
    "smallest memory, in host memory": {"units": None, "tier": "host", "placement": "host"},
    "checkpointed, reentrant": {"units": 3.3, "reentrant": True, "accumulation": 2},
    "checkpointed, not reentrant": {"units": 3.3, "reentrant": False, "placement": IN_FILES},
}  # fmt: skip


@pytest.mark.parametrize("run", BASES.values(), ids=BASES.keys())
def test_a_frozen_base_in_its_files_is_read_as_the_plan_says(tmp_path, run, one_thread):  # noqa: F811
    file, dtype, accumulation = tmp_path / "base.pt", run.get("dtype", torch.float32), run.get("accumulation", 1)
    make = functools.partial(made, dtype, block=functools.partial(Adapted, 12))
    torch.save(make().state_dict(), file)
    model = frozen(make(), run.get("reentrant"))
    model.load_state_dict(torch.load(file, mmap=True), assign=True)
    model = frozen(model)
    division = divide(model, "auto")
    division.leave_in_files({param for param in model.parameters() if param.requires_grad})
    least, largest = division.smallest()[0], max(unit.size_bytes for unit in division.units)
    memory = least if run["units"] is None else int(run["units"] * largest)
    tier = run.get("tier", f"nvme:{tmp_path}/state")
    of_step = {"tokens": 4, "accumulation": accumulation, "recomputes": "reentrant" in run}
    settings = of_step | {"memory": memory, "placement": run.get("placement", "nvme"), "optimizer_placement": tier}
    plan = ziggurat.torch.plan(model, **settings)
    on_meta = ziggurat.torch.plan(frozen(make().to("meta")), **settings)
    assert on_meta == plan
    base = 8 * 2 * 12 * WIDTH * WIDTH * dtype.itemsize
    assert plan.frozen_in_files == base
    assert base not in plan.on_drive.values()
    reads = 0 if run["units"] == 99 else accumulation * base
    assert (plan.step.frozen_read_forward, plan.step.frozen_read_backward) == (reads, reads)
    assert ("frozen parameters in their files" in str(plan)) == (tier != "host" or reads > 0)
    other = settings | {"memory": 2 * memory, "frozen_in_files": False}
    copied = ziggurat.torch.plan(frozen(make().to("meta")), **other)
    assert copied.frozen_in_files == copied.step.frozen_read_forward == 0
    ziggurat.torch.offload(model, memory=memory, placement=settings["placement"])
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-3, placement=tier)
    its = ziggurat.torch.plan(model, **of_step)
    assert its.step == plan.step, "the offloaded model's plan differs"
    found = counted(model, optimizer, accumulation, False, plan.step.read)
    assert found["frozen_read_bytes"] == 2 * reads
    close(plan.step.read, found["nvme_read_bytes"] + found["frozen_read_bytes"], plan.step.written, 0.02)
    close(plan.step.written, found["nvme_write_bytes"])
    assert "of frozen parameters in their own files" in str(optimizer.why_slow())  # once, where all fits
    optimizer.close()


ADDED = {
    "state in host memory": {"tier": "host", "placement": "host"},
    "state on NVMe": {"accumulation": 2},
    "little host memory": {"host_memory": "7MiB", "narrow": 1024},
    "little host memory, small ones": {"host_memory": "3MiB", "narrow": 120},
    "gradients in files": {"placement": IN_FILES, "clips": True, "narrow": 256},
    "nothing in the engine": {"file": True, "memory": "8MiB"},
}  # fmt: skip


@pytest.mark.parametrize("run", ADDED.values(), ids=ADDED.keys())
def test_adapters_that_came_after_offload_are_in_the_plan(tmp_path, run, one_thread):  # noqa: F811
    model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH, bias=False), *(Adapted(12) for _ in range(8)))
    for block in model[1:]:
        block.narrow = block.widen = torch.nn.Identity()
        block.base.up.bias = block.base.down.bias = None
    model.requires_grad_(False)
    if "file" in run:
        del model[0].weight
        model[0] = torch.nn.ZeroPad1d((0, WIDTH - 64))
        torch.save(model.state_dict(), tmp_path / "base.pt")
        model.load_state_dict(torch.load(tmp_path / "base.pt", mmap=True), assign=True)
        model.requires_grad_(False)
    tier, accumulation = run.get("tier", f"nvme:{tmp_path}/state"), run.get("accumulation", 1)
    ziggurat.torch.offload(model, memory=run.get("memory", "64MiB"), placement=run.get("placement", "nvme"))
    for block in model[1:]:
        block.narrow = torch.nn.Linear(WIDTH, run.get("narrow", 16), bias=False)
        block.widen = torch.nn.Linear(run.get("narrow", 16), WIDTH, bias=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    state = {name: run[name] for name in ("state_format", "host_memory") if name in run}
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-3, placement=tier, **state)
    of_step = {"tokens": 4, "accumulation": accumulation, "clips": run.get("clips", False)}
    plan = ziggurat.torch.plan(model, **of_step)
    assert plan.trained == sum(param.numel() for param in trained)
    assert plan.in_host_memory["parameters that came after offload()"] == 4 * plan.trained
    found = counted(model, optimizer, accumulation, run.get("clips", False), plan.step.read)
    assert ziggurat.torch.plan(model, **of_step).step == plan.step
    assert plan.step.read == found["nvme_read_bytes"] + found["frozen_read_bytes"]
    assert plan.step.written == found["nvme_write_bytes"]
    assert plan.step.state_read == found["state_read_bytes"]
    assert plan.step.state_read > 0 or "host_memory" not in run
    assert optimizer.why_slow().steps == 7
    optimizer.close()


def frozen(model: torch.nn.Module, reentrant: bool | None = None) -> torch.nn.Module:
    """Returns a model of Adapted, trained in its adapters alone, and checkpointed if `reentrant` is not None."""
    for name, param in model.named_parameters():
        param.requires_grad_("narrow" in name or "widen" in name)
    if reentrant is not None:
        model[0].register_forward_hook(lambda module, given, x: x.requires_grad_(torch.is_grad_enabled()))
        for block in model[1:-1]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return model


@pytest.mark.parametrize("host_memory", ["4MiB", "6MiB", "9MiB", "14MiB", None])
@pytest.mark.parametrize("placement", ["host", "nvme", IN_FILES])
@pytest.mark.parametrize("state_format", ["fp32", "8bit", "bf16-moments"])
def test_the_records_that_stay_are_those_of_the_engine(tmp_path, host_memory, placement, state_format):
    model = made()
    given = {"state_format": state_format} | ({} if host_memory is None else {"host_memory": host_memory})
    memory = memory_for(model, 9)
    arguments = {"memory": memory, "placement": placement, "optimizer_placement": "nvme"} | given
    try:
        plan = ziggurat.torch.plan(model, tokens=1, **arguments)
    except InvalidArgument as error:
        smallest = int(re.search(r"smallest that works is (\d+)", str(error))[1])
        with pytest.raises(InvalidArgument, match="is too small"):
            ziggurat.torch.plan(model, tokens=1, **arguments | {"host_memory": smallest - 4096})
        refused = made()
        ziggurat.torch.offload(refused, memory=memory, placement=placement)
        where = {"placement": f"nvme:{tmp_path}/0"} | given
        with pytest.raises(ResourceExhausted):
            ziggurat.torch.AdamW(refused.parameters(), **where).open()
        given["host_memory"] = smallest
        plan = ziggurat.torch.plan(model, tokens=1, **arguments | given)
    ziggurat.torch.offload(model, memory=memory, placement=placement)
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/1", **given)
    optimizer.open()
    said = re.search(r"a step writes ([\d.]+ \w+) of records and reads ([\d.]+ \w+)", optimizer.engine.describe())
    read = "0 B" if plan.step.state_read == 0 else text_of(plan.step.state_read)
    assert read == (said[2] if said else text_of(plan.step.state_read))
    optimizer.close()


def text_of(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def on_meta(**arguments):
    with torch.device("meta"):
        return made(**arguments)


def test_a_model_on_the_meta_device_has_the_plan_of_a_real_one():
    arguments = {"tokens": 8, "placement": "nvme", "optimizer_placement": "nvme", "free_memory": "8GiB"}
    plans = [
        ziggurat.torch.plan(model, memory=memory_for(model, 4), **arguments)
        for model in (made(BF16), on_meta(dtype=BF16))
    ]
    assert plans[0] == plans[1]
    model = gpt()  # with tied weights and a root that has parameters
    assert ziggurat.torch.plan(model, memory=memory_of(model), **arguments).units == 8


def test_the_smallest_memory_is_the_one_that_offload_says():
    model = made()
    smallest = memory_for(model, None)
    for call in (ziggurat.torch.offload, lambda *one, **other: ziggurat.torch.plan(*one, tokens=1, **other)):
        with pytest.raises(InvalidArgument, match=f"the smallest that works is {smallest}"):
            call(model, memory=smallest - 1)
    plan = ziggurat.torch.plan(model, tokens=1, memory=smallest)
    assert plan.smallest_memory_bytes == smallest
    assert not plan.all_fits


def test_buffers_are_in_memory_beside_what_is_brought():
    models = [made(), on_meta()]
    for model in models:
        model[1].register_buffer("table", torch.empty(1000, 256, dtype=BF16, device=model[0].weight.device))
    for model in models:
        plan = ziggurat.torch.plan(model, tokens=1, memory="8MiB")
        assert plan.in_host_memory["buffers"] == 1000 * 256 * 2
    assert "buffers" not in ziggurat.torch.plan(on_meta(), tokens=1, memory="8MiB").in_host_memory
    ziggurat.torch.offload(models[0], memory="8MiB")
    optimizer = ziggurat.torch.AdamW(models[0].parameters())
    assert ziggurat.torch.plan(models[0], tokens=1).in_host_memory == plan.in_host_memory
    optimizer.close()


def test_what_activations_have_in_memory_is_in_the_plan(tmp_path):
    plan = ziggurat.torch.plan(on_meta(), tokens=1, memory="8MiB", activation_memory="32MiB")
    assert plan.in_host_memory["activations, within activation_memory"] == 32 << 20
    assert "without other activations" in str(plan)
    model = ziggurat.torch.offload(
        made(), memory="8MiB", activations=f"nvme:{tmp_path}", activation_memory="32MiB"
    )
    optimizer = ziggurat.torch.AdamW(model.parameters())
    assert ziggurat.torch.plan(model, tokens=1).in_host_memory == plan.in_host_memory
    optimizer.close()


def test_what_memory_has_no_room_for_is_refused_with_the_next_thing_to_do(tmp_path):
    model = on_meta(blocks=24)
    all_fits = memory_for(model, 25)
    plenty = ziggurat.torch.plan(model, tokens=1, memory=all_fits, free_memory="1GiB")
    some = ziggurat.torch.plan(model, tokens=1, memory=memory_for(model, 6), free_memory="1GiB")
    once, twice = (sum(plan.in_host_memory.values()) for plan in (plenty, some))
    assert "units that are in use" not in plenty.in_host_memory
    assert twice - once == pytest.approx(some.in_host_memory["units that are in use"], rel=0.2)

    def refused(match, free, **arguments):
        with pytest.raises(ResourceExhausted, match=match) as error:
            ziggurat.torch.plan(model, **{"tokens": 1, "memory": all_fits, "free_memory": free} | arguments)
        return str(error.value)

    def advised(said):
        return int(re.search(r"give memory=(\d+)", said)[1])

    # In host memory all units take less than all parameters and some units beside them.
    said = refused("in which all parameters then live", twice - 1, memory=memory_for(model, 6))
    ziggurat.torch.plan(model, tokens=1, memory=advised(said), free_memory=twice - 1)
    refused("the optimizer placement=.nvme", once - 1)
    # On NVMe less memory takes less.
    needed = {"optimizer_placement": "nvme", "placement": "nvme", "host_memory": "6MiB"}
    its = ziggurat.torch.plan(model, tokens=1, memory=all_fits, free_memory="1GiB", **needed)
    takes = sum(its.in_host_memory.values())
    said = refused("give memory=", takes - 1, **needed)
    assert advised(said) == its.in_host_memory["units that are in use"] - 1
    ziggurat.torch.plan(model, tokens=1, memory=advised(said), free_memory=takes - 1, **needed)
    drive = {"optimizer_placement": "nvme"}
    refused("offload.. placement=.nvme", "12MiB", memory=memory_for(model, None), **drive)
    refused("grads=nvme", "7MiB", memory=memory_for(model, None), placement="nvme", **drive)


@pytest.mark.parametrize(
    "dtype, accumulation, element_bytes", [(torch.float32, 1, 4), (BF16, 1, 6), (BF16, 2, 4)]
)
def test_clipping_takes_the_largest_gradient_of_those_on_the_drive(dtype, accumulation, element_bytes):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 4096, bias=False)).to(dtype)

    def read(**changed):
        given = {"placement": IN_FILES, "optimizer_placement": "nvme", "clips": True} | changed
        plan = ziggurat.torch.plan(model, tokens=1, memory="64MiB", accumulation=accumulation, **given)
        return plan.in_host_memory.get("largest gradient, while clipping reads it", 0)

    assert read() == 512 * 4096 * element_bytes
    assert read(clips=False) == read(placement="params=nvme,grads=host") == 0


def test_host_memory_has_room_for_a_frozen_parameter_larger_than_the_state():
    """As of adapters whose base is in the engine: nobody has to give host_memory."""

    def adapted(narrow: int) -> torch.nn.Module:
        with torch.device("meta"):
            wide = 16384
            base = torch.nn.Linear(wide, wide, bias=False).requires_grad_(False)
            adapter = (torch.nn.Linear(wide, narrow, bias=False), torch.nn.Linear(narrow, wide, bias=False))
            return torch.nn.Sequential(torch.nn.Sequential(base, *adapter)).bfloat16()

    settings = {"tokens": 1, "memory": "2GiB", "placement": "nvme", "optimizer_placement": "nvme", "free_memory": "8GiB"}
    settings["frozen_in_files"] = False
    for narrow in (8, 512):  # with state of 3 and of 200 MB
        plan = ziggurat.torch.plan(adapted(narrow), **settings)
        assert plan.in_host_memory["optimizer state that stays or is on its way"] > 2 * 16384 * 16384


def test_what_the_drive_has_no_room_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1 << 20}))
    model = on_meta()
    with pytest.raises(ResourceExhausted, match="the drive of .* has no room"):
        where = f"nvme:{tmp_path}/state"
        ziggurat.torch.plan(model, tokens=1, memory="8MiB", optimizer_placement=where)


def test_a_store_that_is_there_counts_as_room(tmp_path, monkeypatch):
    """Or a script that plans at its start could not start again."""
    where = {"placement": IN_FILES, "optimizer_placement": f"nvme:{tmp_path}/state"}
    plan = ziggurat.torch.plan(gpt(), tokens=1, memory="8MiB", **where)
    model = ziggurat.torch.offload(gpt(), memory="8MiB", placement=IN_FILES)
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=where["optimizer_placement"])
    model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    optimizer.step()
    optimizer.close()
    in_store = plan.on_drive["optimizer state, in two slots"]
    needed = sum(plan.on_drive.values())

    def plan_with(free_bytes, model):
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": free_bytes}))
        ziggurat.torch.plan(model, tokens=1, memory="8MiB", **where)

    plan_with(needed - in_store, gpt())
    free = "[0-9.]+ MiB are free beside [0-9.]+ MiB of the store that is there"
    with pytest.raises(ResourceExhausted, match=f"the drive of .* has no room for this run: .* {free}"):
        plan_with(needed - in_store - 4096, gpt())
    # Parameters and gradients of a smaller model have no room in it.
    with pytest.raises(ResourceExhausted, match="the drive of .* has no room"):
        plan_with(1000, torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 64))))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"memory": None}, 'memory="None": give bytes'),
        ({"memory": "much"}, 'memory="much"'),
        ({"tokens": 0}, "tokens=0"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"drive": "fast"}, "drive='fast'"),
        ({"drive": 1.2}, "drive=1.2"),
        ({"drive": float("inf")}, "drive=inf"),
        ({"placement": "nvme"}, 'optimizer_placement="host" does not have'),
        ({"optimizer_placement": "auto"}, 'give "host" or "nvme:/path"'),
        ({"optimizer_placement": "tape"}, 'placement="tape"'),
        ({"optimizer": "adamx"}, "adamx"),
        ({"state_format": "4bit"}, "4bit"),
        ({"flops": -1}, "flops=-1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments, match):
    with pytest.raises(InvalidArgument, match=re.escape(match)):
        ziggurat.torch.plan(on_meta(), **{"tokens": 1, "memory": "8MiB"} | arguments)


def test_what_lies_in_files_is_no_memory_that_the_run_may_take(tmp_path, monkeypatch):
    def layers():
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))

    monkeypatch.setattr("ziggurat._plan.plan.free_bytes", lambda: 4 << 20)
    with ziggurat.torch.streamed_init(str(tmp_path)):
        in_files = layers()
    for model, free in ((in_files, "4.0 MiB"), (layers(), "16.0 MiB")):
        with pytest.raises(ResourceExhausted, match=f", and {free} are free"):
            ziggurat.torch.plan(model, tokens=1, memory="64MiB")


@pytest.mark.parametrize(("free", "tier"), [(1 << 40, "host"), (1 << 20, "nvme")])
def test_an_optimizer_that_has_not_chosen_is_planned_as_it_would_choose(tmp_path, monkeypatch, capsys, free, tier):
    model = ziggurat.torch.offload(made(), memory="8MiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"auto:{tmp_path}/state")
    monkeypatch.setattr("ziggurat._memory.placement.free_bytes", lambda: free)
    plan = ziggurat.torch.plan(model, tokens=1)
    assert capsys.readouterr().err == ""
    optimizer.open()
    assert optimizer.placement.partition(":")[0] == tier
    assert (plan.on_drive == {}) == (tier == "host")
    optimizer.close()


def test_a_trained_parameter_without_elements_takes_nothing():
    def plan_with(*more):
        model = ziggurat.torch.offload(made(), memory="8MiB")
        optimizer = ziggurat.torch.AdamW([*model.parameters(), *more], placement="host")
        plan = ziggurat.torch.plan(model, tokens=1)
        optimizer.close()
        return plan.trained, plan.in_host_memory, plan.step

    assert plan_with(torch.nn.Parameter(torch.empty(0))) == plan_with()


def test_an_offloaded_model_without_an_optimizer_has_no_plan():
    model = ziggurat.torch.offload(made(), memory="8MiB")
    with pytest.raises(InvalidArgument, match="no optimizer has its parameters yet"):
        ziggurat.torch.plan(model, tokens=1)


def bound_of(drive: float, compute_s: float, **arguments):
    given = {"memory": memory_for(on_meta(), 4), "placement": "nvme", "optimizer_placement": "nvme"}
    given |= {"tokens": 100, "host_memory": "4MiB", "drive": drive, "compute_s": compute_s}
    return ziggurat.torch.plan(on_meta(), **given | arguments)


def test_the_bound_is_what_the_drive_or_compute_cannot_do_faster():
    slow_drive = bound_of(1e6, 0.001)
    moved = slow_drive.step.read + slow_drive.step.written
    assert slow_drive.drive_s == moved / 1e6
    assert slow_drive.bound.seconds == pytest.approx(slow_drive.drive_s, rel=0.01)
    assert slow_drive.bound.limit == "the drive, which works all the time"
    slow_compute = bound_of(1e12, 5.0)
    assert slow_compute.bound.limit == "compute"
    assert slow_compute.bound.seconds == 5.0
    # The update does not hide in backward, but for what leases hold.
    between = bound_of(moved / 1.0, 1.0)
    assert 1.0 < between.bound.seconds < 2.0
    assert between.bound.limit.startswith("the drive in forward")
    doubled = bound_of(1e6, 0.002, accumulation=2)
    assert slow_drive.bound.seconds < doubled.bound.seconds < 2 * slow_drive.bound.seconds


def test_operations_are_those_of_the_weights():
    model = on_meta()
    weights = sum(param.numel() for param in model.parameters() if param.dim() > 1)
    arguments = {"tokens": 10, "memory": "8MiB", "flops": 1e6}
    assert ziggurat.torch.plan(model, **arguments).compute_s == 6 * weights * 10 / 1e6
    assert ziggurat.torch.plan(model, recomputes=True, **arguments).compute_s == 8 * weights * 10 / 1e6
    model.requires_grad_(False)
    model[0].requires_grad_(True)
    first = model[0].weight.numel()
    assert ziggurat.torch.plan(model, **arguments).compute_s == (4 * weights + 2 * first) * 10 / 1e6


def test_the_rate_is_that_of_the_nearest_measured_folder(tmp_path, monkeypatch):
    drives = [
        {"path": str(tmp_path), "sweep_gb_per_s": 2.0},
        {"path": str(tmp_path / "fast"), "sweep_gb_per_s": 0, "mix_gb_per_s": 5.0},
    ]
    (tmp_path / "ziggurat").mkdir()
    profile = tmp_path / "ziggurat" / "profile.json"
    profile.write_text(json.dumps({"ziggurat_profile": 1, "drives": drives}))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def rate(folder):
        where = {"memory": "8MiB", "optimizer_placement": f"nvme:{folder}"}
        return ziggurat.torch.plan(on_meta(), tokens=1, **where).drive_bytes_per_s

    assert rate(tmp_path / "state") == 2e9
    assert rate(tmp_path / "fast" / "state") == 5e9
    assert rate("/somewhere/else") is None
    profile.write_text(json.dumps({"ziggurat_profile": 2, "drives": drives}))
    assert rate(tmp_path / "state") is None


def test_the_page_has_what_a_person_asks_first():
    plan = bound_of(1e9, 1.0, accumulation=4)
    page = str(plan)
    for line in (
        "536,970 parameters in 9 units; adamw in fp32",
        "400 tokens in 4 backwards make a step",
        f"it must be at least {memory_for(on_meta(), None)}",
        "optimizer state, in two slots                 nvme        18.0 MiB",
        "at 1 GB a second (as given)",
        "the limit is ",
    ):
        assert line in page
    host = str(ziggurat.torch.plan(on_meta(), tokens=1, memory="8MiB"))
    assert "a step moves nothing over the drive" in host
    assert "bench io" not in host

def test_an_optimizer_of_some_parameters_finds_the_memory_that_they_all_take(tmp_path, one_thread):  # noqa: F811
    """What it is not given lies apart from what it trains."""
    model = made()
    division = divide(model, "auto")
    memory = max(division.smallest()[0], sum(unit.size_bytes for unit in division.units))
    ziggurat.torch.offload(model, memory=memory)
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    optimizer = ziggurat.torch.AdamW(weights, lr=1e-3)
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", IN_FILES])
def test_a_plan_after_a_parameter_was_frozen_leaves_the_run_as_it_is(tmp_path, placement, one_thread):  # noqa: F811
    model = made()
    ziggurat.torch.offload(model, memory=memory_for(model, None), placement=placement)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, placement=f"nvme:{tmp_path}/state")
    division = streaming_of(next(model.parameters()))[0].division

    def step():
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [(unit.number, unit.by_rows, unit.size_bytes) for unit in division.units]
    next(model.parameters()).requires_grad_(False)
    step()
    ziggurat.torch.plan(model, tokens=4)
    optimizer.why_slow()
    assert [(unit.number, unit.by_rows, unit.size_bytes) for unit in division.units] == before
    step()
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_the_engine_takes_no_memory_for_which_it_has_no_use(tmp_path, placement):
    model = made()
    ziggurat.torch.offload(model, memory="2GiB", placement=placement)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, placement=f"nvme:{tmp_path}/state")
    optimizer.open()
    assert streaming_of(next(model.parameters()))[0].engine_bytes < 8 << 20
    optimizer.close()


def test_ranks_in_groups_take_what_a_group_takes_and_copies_of_a_node_more():
    model = torch.nn.Sequential(*(Block(8) for _ in range(4)))

    def rows(**given):
        return ziggurat.torch.plan(model, tokens=4, memory="8MiB", **given).in_host_memory

    two, groups, four = rows(ranks=2), rows(ranks=4, shard_group=2), rows(ranks=4)
    for row in ("parameters", "optimizer state"):
        assert two[row] == groups[row] > four[row]
    copies = rows(ranks=4, hpz=2)["copies of other ranks' parameters (hpz)"]
    assert copies == four["parameters"]  # of two ranks of the other node this one keeps one's
    for given in ({"shard_group": 3}, {"hpz": 4}, {"shard_group": 2, "hpz": 2}):
        with pytest.raises(InvalidArgument, match="does not divide the"):
            rows(ranks=4, **given)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
