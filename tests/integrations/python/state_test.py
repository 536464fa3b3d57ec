# SPDX-License-Identifier: Apache-2.0
"""state_dict() and load_state_dict() of ziggurat.torch's optimizers: among themselves, with
torch.optim's, and under a kill.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. ZIGGURAT_KILLS: how
often a process is killed (6).
"""

import io
import multiprocessing
import os
import random
import shutil
import sys
import time
from multiprocessing.connection import Connection

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ziggurat
import ziggurat.torch
from ziggurat._library.state_kinds import moments_of
from ziggurat._optimizer.rounding import rounded

OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.95)},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3},
}
FORMATS = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("fp32", torch.float16),
    ("bf16-moments", torch.float32),
    ("8bit", torch.float32),
    ("split", torch.bfloat16),
    ("bf16", torch.bfloat16),
]


def small_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(61, 48), torch.nn.LayerNorm(48), torch.nn.Linear(48, 130)
    ).to(dtype)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """With gradients that depend on its number only."""
    torch.manual_seed(100 + number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    as_integers = {2: torch.int16, 4: torch.int32}
    return [p.detach().view(as_integers[p.element_size()]).clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved(*objects):
    """Their state dicts, through a file."""
    memory = io.BytesIO()
    torch.save([each.state_dict() for each in objects], memory)
    return torch.load(io.BytesIO(memory.getvalue()), weights_only=True)


def assert_same_state(one: dict, other: dict) -> None:
    assert one["state"].keys() == other["state"].keys()
    for index, entry in one["state"].items():
        assert entry.keys() == other["state"][index].keys()
        for key, value in entry.items():
            assert torch.equal(value, other["state"][index][key]), (index, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_entry_is_torchs_and_the_engine_has_its_names(name):
    model = small_model(torch.bfloat16)
    optimizer = getattr(ziggurat.torch, name)(model.parameters(), **OPTIMIZERS[name])
    param = next(model.parameters())
    assert optimizer.state_of(param) == {}
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    moments = moments_of(optimizer._kind)
    assert optimizer.engine.state_names() == ["master", *moments]
    entry = optimizer.state_of(param)
    assert list(entry) == ["step", *moments, "master"]
    assert entry["step"].item() == 2 and entry["step"].dtype == torch.float32
    for key in (*moments, "master"):
        assert entry[key].shape == param.shape and entry[key].dtype == torch.float32
    assert torch.equal(rounded(entry["master"], param.dtype), param.detach())
    assert optimizer.state[param].keys() == entry.keys()


def test_the_state_is_read_as_that_of_torch_optim():
    model, other = small_model(), small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    theirs = torch.optim.AdamW(other.parameters())
    assert not optimizer.state and optimizer.state[next(model.parameters())] == {}
    step(model, optimizer, 0)
    step(other, theirs, 0)
    assert list(optimizer.state) == list(model.parameters()) and len(optimizer.state) == 5
    for param, reference in zip(model.parameters(), theirs.state.values(), strict=True):
        assert param in optimizer.state and optimizer.state[param]["step"] == 1
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], reference["exp_avg"])
    with pytest.raises(ziggurat.InvalidArgument, match="because the engine has the state"):
        optimizer.state = {}
    for param, entry in optimizer.state.items():  # as Lightning does after a load
        optimizer.state[param] = {name: value.clone() for name, value in entry.items()}
    with pytest.raises(ziggurat.InvalidArgument, match="because the engine has the state"):
        optimizer.state[next(model.parameters())] = {}


def test_pytorchs_distributed_state_dict_makes_no_step():
    """It makes one where it takes an optimizer to have no state."""
    model, other = small_model(), small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    alone = ziggurat.torch.AdamW(other.parameters())
    for number in range(2):
        step(model, optimizer, number)
        step(other, alone, number)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["0.weight"]["step"] == 2
    again_of = small_model(seed=2)
    again = ziggurat.torch.AdamW(again_of.parameters())
    again_of.load_state_dict(model.state_dict())
    set_optimizer_state_dict(again_of, again, state)
    for its, of in ((model, optimizer), (other, alone), (again_of, again)):
        step(its, of, 2)
    assert same(bits(model), bits(other)) and same(bits(model), bits(again_of))


def test_hooks_of_a_load_see_the_state_and_may_change_it():
    model, other = small_model(), small_model()
    seen = []

    def without_moments(optimizer, given):
        entries = {number: dict(entry) for number, entry in given["state"].items()}
        for entry in entries.values():
            entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        return {**given, "state": entries}

    ends = []
    for library, its in ((ziggurat.torch, model), (torch.optim, other)):
        optimizer = library.AdamW(its.parameters(), lr=1e-3)
        step(its, optimizer, 0)
        optimizer.register_load_state_dict_pre_hook(without_moments)
        optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
        optimizer.load_state_dict(optimizer.state_dict())
        step(its, optimizer, 1)
        ends.append(list(its.parameters()))
    assert seen == [5, 5]
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize(("state_format", "dtype"), FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_from_its_state_dict_with_the_same_bits(
    name, state_format, dtype, placement, tmp_path
):
    def made(model, where):
        arguments = OPTIMIZERS[name] | {"state_format": state_format, "placement": where}
        return getattr(ziggurat.torch, name)(model.parameters(), threads=1, **arguments)

    model = small_model(dtype)
    optimizer = made(model, "host")
    for number in range(3):
        step(model, optimizer, number)
    of_model, of_optimizer = saved(model, optimizer)

    other = small_model(dtype, seed=2)
    resumed = made(other, "host" if placement == "host" else f"nvme:{tmp_path}/state")
    if placement == "nvme":  # an engine that has state of its own, and the optimizer's comes first
        step(other, resumed, 50)
        resumed.load_state_dict(of_optimizer)
        other.load_state_dict(of_model)
    else:
        other.load_state_dict(of_model)
        resumed.load_state_dict(of_optimizer)
    if state_format != "8bit":
        assert_same_state(resumed.state_dict(), of_optimizer)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    if state_format == "8bit":  # codes may move by one when they are read and written
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        return
    assert same(bits(model), bits(other))
    assert_same_state(optimizer.state_dict(), resumed.state_dict())


WITH_TORCH = [name for name in OPTIMIZERS if name != "Lion"]


@pytest.mark.parametrize("direction", ["ours to torch", "torch's to ours"])
@pytest.mark.parametrize("name", WITH_TORCH)
def test_torch_goes_on_from_ours_and_ours_from_torchs(name, direction):
    here, there = ziggurat.torch, torch.optim
    if direction == "torch's to ours":
        here, there = there, here
    model, other = small_model(), small_model(seed=2)
    first = getattr(here, name)(model.parameters(), **OPTIMIZERS[name])
    for number in range(4):
        step(model, first, number)
    then = getattr(there, name)(other.parameters(), lr=0.5)
    of_model, of_optimizer = saved(model, first)
    other.load_state_dict(of_model)
    then.load_state_dict(of_optimizer)
    assert then.param_groups[0]["lr"] == OPTIMIZERS[name]["lr"]
    for number in range(4, 8):
        step(model, first, number)
        step(other, then, number)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


# With 4 MiB, most records are read from the drive, and some are kept in memory.
@pytest.mark.parametrize(
    ("placement", "host_memory"), [("host", None), ("nvme", None), ("nvme", "4MiB")]
)
def test_a_parameter_of_several_records_is_read_and_written_whole(
    placement, host_memory, tmp_path
):
    def made(seed, where):
        torch.manual_seed(seed)
        model = torch.nn.Linear(1100, 1001, bias=False).bfloat16()
        optimizer = ziggurat.torch.AdamW(
            model.parameters(),
            placement="host" if placement == "host" else f"nvme:{tmp_path}/{where}",
            host_memory=host_memory,
            state_format="split",
        )
        return model, optimizer

    model, optimizer = made(1, "one")
    step(model, optimizer, 0)
    other, resumed = made(2, "other")
    step(other, resumed, 50)
    of_model, of_optimizer = saved(model, optimizer)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    step(model, optimizer, 1)
    step(other, resumed, 1)
    assert same(bits(model), bits(other))
    assert_same_state(optimizer.state_dict(), resumed.state_dict())


def test_a_damaged_record_is_no_state(tmp_path):
    model = torch.nn.Linear(1100, 1001)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), placement=f"nvme:{tmp_path}/state", host_memory="4MiB"
    )
    step(model, optimizer, 0)
    optimizer.engine.make_durable()
    (store,) = (tmp_path / "state").iterdir()
    with store.open("r+b") as file:
        for at in range(1 << 20, store.stat().st_size, 4096):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(ziggurat.DataLoss, match="rank00000"):
        optimizer.state_dict()


def test_torch_takes_the_state_of_bf16_parameters():
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    ours = ziggurat.torch.AdamW(model.parameters(), **OPTIMIZERS["AdamW"])
    step(model, ours, 0)
    of_model, of_optimizer = saved(model, ours)
    theirs = torch.optim.AdamW(other.parameters())
    other.load_state_dict(of_model)
    theirs.load_state_dict(of_optimizer)
    step(model, ours, 1)
    step(other, theirs, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


def test_parameters_without_a_step_have_no_entry_and_begin_anew_when_loaded():
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    assert optimizer.state_dict()["state"] == {}
    first, *_ = model.parameters()
    first.grad = torch.ones_like(first)
    optimizer.step()
    state = optimizer.state_dict()
    assert list(state["state"]) == [0]
    step(model, optimizer, 1)
    assert list(optimizer.state_dict()["state"]) == [0, 1, 2, 3, 4]
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), state)

    fresh = small_model()
    fresh.load_state_dict(model.state_dict())
    other = ziggurat.torch.AdamW(fresh.parameters())
    other.load_state_dict(state)
    step(model, optimizer, 2)
    step(fresh, other, 2)
    assert same(bits(model), bits(fresh))


def test_what_is_loaded_and_not_yet_opened_is_saved_again():
    """As Accelerate does when it prepares an optimizer."""
    model = small_model(torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 0)
    state = optimizer.state_dict()
    again = ziggurat.torch.AdamW(small_model(torch.bfloat16).parameters())
    again.load_state_dict(state)
    assert again.engine is None
    assert_same_state(again.state_dict(), state)


def test_a_parameter_that_is_not_its_masters_is_the_master():
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    optimizer = ziggurat.torch.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, 0)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["master"] = entry["master"] * (1 + 2**-12)  # rounds to the parameter, or beside it
    changed = next(other.parameters())
    with torch.no_grad():
        changed.fill_(3.0)
    then = ziggurat.torch.SGD(other.parameters(), lr=0.0)
    then.load_state_dict(state)
    step(other, then, 1)
    assert torch.equal(then.state_of(changed)["master"], torch.full(changed.shape, 3.0))


@pytest.mark.parametrize("where", ["host", "another store", "the same store"])
def test_a_master_counts_whichever_of_its_neighbours_its_parameter_was_drawn_as(where, tmp_path):
    place = {"host": "host"}.get(where, f"nvme:{tmp_path}/state")
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16, seed=2)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-3, placement=place, param_rounding="stochastic"
    )
    for number in range(3):
        step(model, optimizer, number)
    of_model, of_optimizer = saved(model, optimizer)
    optimizer.close()
    if where == "another store":
        place = f"nvme:{tmp_path}/other"
    again = ziggurat.torch.AdamW(
        other.parameters(), lr=0.0, placement=place, param_rounding="stochastic"
    )
    if where == "the same store":
        again.open(resume=True)
    other.load_state_dict(of_model)
    again.load_state_dict(of_optimizer)
    for param in other.parameters():
        param.grad = torch.zeros_like(param)
    again.param_groups[0]["lr"] = 0.0
    again.step()
    for number, param in enumerate(other.parameters()):
        expected = of_optimizer["state"][number]["master"]
        assert torch.equal(again.state_of(param)["master"], expected)
    again.close()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"exp_avg_sq": None}, ziggurat.InvalidArgument, "'group0.1' has step, exp_avg, but no exp_avg_sq"),
        ({"exp_avg": torch.ones(3)}, ziggurat.InvalidArgument, "'exp_avg' of parameter 'group0.1'"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, error, words):
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    step(model, optimizer, 0)
    before, wrong = optimizer.state_dict(), optimizer.state_dict()
    wrong["state"][1].update(change)
    wrong["param_groups"][0]["lr"] = 7.0
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(wrong)
    assert_same_state(optimizer.state_dict(), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_what_makes_no_state_is_named(tmp_path):
    params = list(small_model().parameters())
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ziggurat.Unimplemented, match="amsgrad"):
        ziggurat.torch.AdamW(params).load_state_dict(amsgrad.state_dict())
    with pytest.raises(ziggurat.InvalidArgument, match='give "full" or "store"'):
        ziggurat.torch.AdamW(params, state="disk")
    with pytest.raises(ziggurat.InvalidArgument, match="needs a store"):
        ziggurat.torch.AdamW(params, state="store")
    with pytest.raises(ValueError, match="parameter group"):
        ziggurat.torch.AdamW(params).load_state_dict(torch.optim.AdamW(params[1:]).state_dict())


def test_a_state_dict_that_memory_does_not_hold_is_refused(monkeypatch):
    model = small_model(torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(model.parameters())
    step(model, optimizer, 0)
    needed = sum(12 * p.numel() for p in model.parameters())
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: needed)
    optimizer.state_dict()
    monkeypatch.setattr(ziggurat._optimizer.state, "free_bytes", lambda: needed - 1)
    with pytest.raises(ziggurat.ResourceExhausted, match="the whole state takes .* KiB"):
        optimizer.state_dict()


def test_a_store_of_another_run_at_the_same_generation_is_refused(tmp_path):
    states = []
    for seed in (1, 2):
        model = small_model(seed=seed)
        arguments = {"placement": f"nvme:{tmp_path}/{seed}", "state": "store"}
        optimizer = ziggurat.torch.AdamW(model.parameters(), **arguments)
        step(model, optimizer, 0)
        states.append(optimizer.state_dict())
        optimizer.close()
    again = ziggurat.torch.AdamW(small_model().parameters(), **arguments)
    with pytest.raises(ziggurat.InvalidArgument, match=r"/2 has other parameters"):
        again.load_state_dict(states[0])
    again.load_state_dict(states[1])


def test_a_state_dict_by_reference_is_good_while_the_store_is_there(tmp_path):
    def made(model, where="state"):
        return ziggurat.torch.AdamW(
            model.parameters(), placement=f"nvme:{tmp_path}/{where}", state="store", threads=1
        )

    model = small_model()
    optimizer = made(model)
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    state = optimizer.state_dict()
    assert state["state"] == {} and state["ziggurat"]["generations"] == [2]
    optimizer.load_state_dict(state)
    optimizer.close()

    with pytest.raises(ziggurat.InvalidArgument, match="not in this checkpoint but in the store"):
        made(model, "elsewhere").load_state_dict(state)
    with pytest.raises(ziggurat.InvalidArgument, match="not in this checkpoint but in the store"):
        ziggurat.torch.AdamW(model.parameters()).load_state_dict(state)
    other = small_model(seed=2)
    resumed = made(other)
    resumed.load_state_dict(state)
    assert same(bits(other), bits(model))
    assert resumed.engine.generation == 2
    step(other, resumed, 2)
    with pytest.raises(ziggurat.InvalidArgument, match=r"generation \[2\] of the store"):
        resumed.load_state_dict(state)


def test_a_store_that_lacks_what_a_script_has_written_is_no_state_dict(tmp_path):
    def made(model):
        where = {"placement": f"nvme:{tmp_path}/state", "state": "store"}
        return ziggurat.torch.AdamW(model.parameters(), threads=1, **where)

    model = small_model()
    optimizer = made(model)
    step(model, optimizer, 0)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    with pytest.raises(ziggurat.InvalidArgument, match="was written since the newest step"):
        optimizer.state_dict()
    # A checkpoint takes the parameter over, but the store has it with the next step alone.
    ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)
    assert len(optimizer.state_dict()["state"]) == 5
    step(model, optimizer, 1)
    state = optimizer.state_dict()
    assert state["state"] == {}
    optimizer.close()
    other = small_model(seed=2)
    made(other).load_state_dict(state)
    assert same(bits(other), bits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_is_a_state_dict_of_values_that_were_written_back(dtype, tmp_path):
    """As an average of the parameters is put in their place for an evaluation, and taken away."""

    def made(model):
        where = {"placement": f"nvme:{tmp_path}/state", "state": "store"}
        return ziggurat.torch.AdamW(model.parameters(), threads=1, **where)

    model = small_model(dtype)
    optimizer = made(model)
    step(model, optimizer, 0)
    optimizer.synchronize()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(before)
    state = optimizer.state_dict()
    assert state["state"] == {}
    optimizer.close()
    other = small_model(dtype, seed=2)
    other.load_state_dict(before)
    made(other).load_state_dict(state)
    assert same(bits(other), bits(model))


def test_a_store_that_draws_parameters_is_no_state_dict_of_values_that_were_written_back(tmp_path):
    """It would draw the other neighbour of a master again, though a script wrote the nearer one."""
    model = small_model(torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(),
        threads=1,
        placement=f"nvme:{tmp_path}/state",
        state="store",
        param_rounding="stochastic",
    )
    step(model, optimizer, 0)
    assert optimizer.state_dict()["state"] == {}
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(optimizer.state_of(param)["master"])
    with pytest.raises(ziggurat.InvalidArgument, match="was written since the newest step"):
        optimizer.state_dict()


def test_resume_keeps_groups_only_and_state_is_read_before_its_blob_is_given(tmp_path):
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    resume = ziggurat.torch.Resume(optimizer, loader=[0, 1])
    for _ in resume:
        step(model, optimizer, 0)
        assert len(optimizer.state_dict()["state"]) == 5
    optimizer.close()
    again = ziggurat.torch.AdamW(small_model().parameters(), placement=f"nvme:{tmp_path}/state")
    assert ziggurat.torch.Resume(again, loader=[0, 1]).resumed
    kept = torch.load(io.BytesIO(again.engine.blob), weights_only=True)["kept"]["optimizer"]
    assert kept["state"] == {} and kept["param_groups"][0]["lr"] == 1e-3
    assert len(again.state_dict()["state"]) == 5


def opened_state(directory: str) -> tuple[int, list[torch.Tensor]]:
    """A store's generation, and all that is in it."""
    model = small_model(torch.bfloat16)
    optimizer = adamw(model, directory)
    optimizer.open(resume=True)
    entries = [optimizer.state_of(param).values() for param in model.parameters()]
    state = [value for entry in entries for value in entry]
    generation = optimizer.engine.generation
    optimizer.close()
    return generation, [*state, *bits(model)]


def adamw(model: torch.nn.Module, directory: str | None) -> torch.optim.Optimizer:
    placement = "host" if directory is None else f"nvme:{directory}"
    return ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=placement, threads=1)


def load_and_step(directory: str, checkpoint: str, pipe: Connection) -> None:
    """In a process of its own, which is killed."""
    torch.set_num_threads(1)
    model = small_model(torch.bfloat16)
    optimizer = adamw(model, directory)
    optimizer.open(resume=True)
    of_model, of_optimizer = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    pipe.send("loaded")
    if pipe.recv() == "step":
        step(model, optimizer, 30)
        optimizer.engine.make_durable()
        pipe.send("durable")
    time.sleep(60)


def test_a_kill_leaves_what_was_there_or_what_was_loaded_and_stepped(tmp_path):
    model = small_model(torch.bfloat16)
    optimizer = adamw(model, f"{tmp_path}/store")
    for number in range(3):
        step(model, optimizer, number)
    optimizer.close()
    old = opened_state(f"{tmp_path}/store")
    model = small_model(torch.bfloat16, seed=3)
    optimizer = adamw(model, None)
    for number in range(20, 25):
        step(model, optimizer, number)
    checkpoint = f"{tmp_path}/checkpoint.pt"
    torch.save(saved(model, optimizer), checkpoint)
    step(model, optimizer, 30)
    entries = [optimizer.state_of(param).values() for param in model.parameters()]
    new = 4, [*(value for entry in entries for value in entry), *bits(model)]
    optimizer.close()

    draw = random.Random(int(os.environ.get("ZIGGURAT_SEED", "1")))
    kills = int(os.environ.get("ZIGGURAT_KILLS", "6"))
    # Not forked from here: this process has threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ziggurat.torch"])
    found = []
    for kill in range(kills + 2):
        directory = f"{tmp_path}/{kill}"
        shutil.copytree(f"{tmp_path}/store", directory)
        pipe, its_end = context.Pipe()
        child = context.Process(target=load_and_step, args=(directory, checkpoint, its_end))
        child.start()
        assert pipe.poll(60) and pipe.recv() == "loaded"
        if kill > 0:  # the first is killed before the step, the last behind it
            pipe.send("step")
            if kill > kills:
                assert pipe.poll(60) and pipe.recv() == "durable"
            else:
                time.sleep(draw.uniform(0, 0.03))
        child.kill()
        child.join()
        generation, state = opened_state(directory)
        assert generation in (3, 4)
        assert same(state, (old if generation == 3 else new)[1])
        found.append(generation)
    assert found[0] == 3 and found[-1] == 4


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
