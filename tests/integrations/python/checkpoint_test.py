# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the engine's own format: saved and loaded by any number of ranks with the same bits,
read by other tools, and refused by name where they are damaged or do not fit.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. With the command as
ZIGGURAT_COMMAND, its checkpoints are loaded too, and ours verified by it.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

try:
    import pytest
    import torch
    import torch.distributed as dist
    from device_double import Double
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import ziggurat
import ziggurat.torch
from ziggurat._optimizer.rounding import rounded
from ziggurat.torch import load_checkpoint, load_foreign_checkpoint, save_checkpoint

COMMAND = os.environ.get("ZIGGURAT_COMMAND", "")
KINDS = ("AdamW", "Lion", "Adagrad", "SGD")


class Model(torch.nn.Module):
    """With a weight of two names, a frozen layer, buffers of several types and of no dimension, and
    sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(61, 36)
        self.frozen = torch.nn.Linear(36, 36)
        self.frozen.requires_grad_(False)
        self.middle = torch.nn.Linear(36, 132)
        self.norm = torch.nn.BatchNorm1d(132)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("temperature", torch.rand(()) + 0.5)
        self.last = torch.nn.Linear(132, 36)
        self.head = torch.nn.Linear(36, 61)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens).mean(1))
        hidden = self.norm(torch.nn.functional.gelu(self.middle(hidden)))
        return self.head(self.last(hidden) * self.scale / self.temperature.to(hidden.dtype))


def new_model(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    return Model().to(dtype)


def loss_of(model, step, rank=0):
    draws = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(61, (8, 9), generator=draws)
    return torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])


def train(model, optimizer, steps, first=0, rank=0):
    for step in range(first, first + steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(model, how):
    """As it is trained on several ranks, and what the optimizer is told of it."""
    if how == "fsdp":
        for layer in (model.middle, model.frozen):
            fully_shard(layer, shard_placement_fn=lambda p: Shard(p.dim() - 1))  # boxes
        fully_shard(model.last)
        fully_shard(model)
        return model, {"model": model}
    if how == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, {"model": model}
    return model, {"group": dist.group.WORLD} if how == "group" else {}


def made(dtype=torch.float32, seed=1, how="alone", kind="AdamW", **where):
    model, told = wrapped(new_model(dtype, seed), how)
    trained = [p for p in model.parameters() if p.requires_grad]
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(ziggurat.torch, kind)(trained, lr=1e-2, threads=1, **more, **told, **where)
    return model, optimizer


def whole(tensor):
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().cpu().clone()


def bits(model, optimizer):
    """Values, buffers and state of the optimizer, by name; whole, on every rank."""
    inner = getattr(model, "module", model)
    found = {name: whole(value) for name, value in inner.state_dict().items()}
    for name, param in inner.named_parameters():
        if param.requires_grad:
            state = optimizer.state_of(param)
            found |= {f"{name}: {key}": whole(value) for key, value in state.items()}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


def saved_by(ranks, folder, how, dtype=torch.float32, placement="host", **more):
    """The bits that `ranks` ranks save behind their third step."""

    def run(rank):
        where = placement.format(folder)
        model, optimizer = made(dtype, how=how, placement=where, **more)
        train(model, optimizer, 3, rank=rank)
        path = save_checkpoint(folder, optimizer, model)
        assert path == f"{folder}/step-000000003"
        found = bits(model, optimizer)
        optimizer.close()
        return found

    if ranks == 1:
        return run(0)
    every = on_ranks(ranks, run)
    for other in every[1:]:
        assert {n for n in other if not torch.equal(other[n], every[0][n])} <= BUFFERS
    return every[0]


# Each rank's own: those of rank 0 are saved.
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def loaded_by(ranks, folder, how, dtype=torch.float32, placement="host", **more):
    """The bits that `ranks` ranks load, and those behind one more step, which other ranks' own
    layout makes from the same state."""

    def run(rank):
        model, optimizer = made(dtype, 9 + rank, how, placement=placement.format(folder), **more)
        found = load_checkpoint(folder, optimizer, model)
        assert (found.step, found.missing, found.unexpected) == (3, [], [])
        loaded = bits(model, optimizer)
        assert optimizer.engine.generation == 3
        state = optimizer.state_dict()
        train(model, optimizer, 2, first=3, rank=rank)
        after = bits(model, optimizer)
        optimizer.close()
        # The same by PyTorch's own means, in this layout.
        again, second = made(dtype, 9, how, **more)
        inner = getattr(again, "module", again)
        if how != "fsdp":
            inner.load_state_dict({n: v for n, v in loaded.items() if ": " not in n})
            second.load_state_dict(state)
            train(again, second, 2, first=3, rank=rank)
            assert_same(bits(again, second), after)
        second.close()
        return loaded

    return [run(0)] if ranks == 1 else on_ranks(ranks, run)


@pytest.mark.parametrize("placement", ["host", "nvme:{}/state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_from_what_it_saved(kind, dtype, placement, tmp_path):
    folder = tmp_path / "saved"
    saved = saved_by(1, folder, "alone", dtype, placement, kind=kind)
    other = placement.replace("state", "other")
    for found in loaded_by(1, folder, "alone", dtype, other, kind=kind):
        assert_same(found, saved)


@pytest.mark.parametrize(
    ("by", "at"),
    [
        ((1, "alone"), (2, "ddp")),
        ((2, "ddp"), (1, "alone")),
        ((2, "group"), (3, "ddp")),
        ((3, "fsdp"), (2, "group")),
        ((2, "ddp"), (3, "fsdp")),
        ((3, "fsdp"), (1, "alone")),
        ((1, "alone"), (4, "group")),
    ],
    ids=lambda its: f"{its[0]}-{its[1]}",
)
@pytest.mark.parametrize("placement", ["host", "nvme:{}/state"])
def test_any_ranks_go_on_from_what_any_ranks_saved(by, at, placement, tmp_path):
    folder, dtype = tmp_path / "saved", torch.bfloat16
    saved = saved_by(*by[:1], folder, by[1], dtype, placement)
    other = placement.replace("state", "other")
    for found in loaded_by(at[0], folder, at[1], dtype, other):
        assert_same(found, saved)
    verify(folder / "step-000000003")


def said_by(*arguments):
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def verify(path):
    if not COMMAND:
        return
    code, said = said_by("ckpt", "verify", str(path))
    assert code == 0, said


FACTS = ("consumed_samples", "consumed_tokens", "data_cursor", "data", "evaluation", "tokenizer")


def test_other_tools_read_what_is_saved(tmp_path):
    model, optimizer = made(torch.bfloat16)
    train(model, optimizer, 3)
    path = Path(save_checkpoint(tmp_path, optimizer, model, resume=dict.fromkeys(FACTS, 1)))
    assert (tmp_path / "latest").read_text() == "step-000000003\n"
    saved = bits(model, optimizer)

    safetensors = pytest.importorskip("safetensors.torch")
    found = {}
    for shard in path.glob("*.safetensors"):
        found |= safetensors.load_file(shard)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert torch.equal(found[name], param)
            continue
        assert torch.equal(found[name], saved[f"{name}: master"]), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"optimizer.{moment}.{name}"], saved[f"{name}: {moment}"])
    for name in ("norm.running_mean", "temperature"):
        assert torch.equal(found[name], saved[name])

    if COMMAND:
        code, said = said_by("ckpt", "verify", str(tmp_path))
        assert code == 0 and "resume_manifest_complete: true" in said, said
        code, said = said_by("ckpt", "inspect", str(path))
        assert code == 0 and "Model at step 3, parameters in bf16, adamw in fp32" in said, said
        other = tmp_path / "other"
        save_checkpoint(other, optimizer, model)
        code, said = said_by("ckpt", "verify", str(other))
        assert "resume_manifest_complete: false" in said and "tokenizer" in said, said
        code, said = said_by("ckpt", "diff", str(tmp_path), str(other))
        assert code == 0, said
        code, said = said_by("ckpt", "to-hf", str(path), str(tmp_path / "hf"))
        assert code == 0 and "config.json was not written" in said, said
        weights = safetensors.load_file(tmp_path / "hf/model.safetensors")
        tied_or_whole_numbers = {"head.weight", "norm.num_batches_tracked"}
        assert weights.keys() == model.state_dict().keys() - tied_or_whole_numbers
        assert torch.equal(weights["norm.running_mean"], saved["norm.running_mean"])
        for name, param in model.named_parameters():
            assert torch.equal(weights[name], saved[f"{name}: master"] if param.requires_grad else param), name
    optimizer.close()


def test_pytorchs_distributed_checkpoint_reads_the_shards_of_several_ranks(tmp_path):
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    saved = saved_by(3, tmp_path, "ddp", torch.bfloat16)
    wanted = {
        name: torch.zeros(saved[f"{name}: master"].shape)
        for name, param in new_model().named_parameters()
        if param.requires_grad
    }
    reader = storage.HuggingFaceStorageReader(str(tmp_path / "step-000000003"))
    torch.distributed.checkpoint.load(wanted, storage_reader=reader)
    for name, value in wanted.items():
        assert torch.equal(value, saved[f"{name}: master"]), name


@pytest.mark.parametrize("state_format", ["bf16-moments", "8bit", "split", "bf16"])
def test_every_format_of_state_keeps_its_bits(state_format, tmp_path):
    model, optimizer = made(torch.bfloat16, state_format=state_format)
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, optimizer, model)
    saved = bits(model, optimizer)
    optimizer.close()
    again, other = made(torch.bfloat16, 5, state_format=state_format)
    load_checkpoint(tmp_path, other, again)
    assert_same(bits(again, other), saved)
    other.close()
    widened, fp32 = made(torch.bfloat16, 6)
    load_checkpoint(tmp_path, fp32, widened)
    assert_same(bits(widened, fp32), saved)  # the values are the same ones
    fp32.close()
    verify(tmp_path)


def test_8_bits_of_several_ranks_are_saved_as_the_values_that_they_stand_for(tmp_path):
    saved = saved_by(2, tmp_path, "group", torch.bfloat16, state_format="8bit")
    model, optimizer = made(torch.bfloat16, 5)
    load_checkpoint(tmp_path, optimizer, model)
    assert_same(bits(model, optimizer), saved)
    optimizer.close()
    alone = tmp_path / "alone"
    saved_by(1, alone, "alone", torch.bfloat16, state_format="8bit")

    def run(rank):
        model, optimizer = made(torch.bfloat16, 5, "group")
        with pytest.raises(ziggurat.Unimplemented, match="8 bits, with scales for blocks of the whole"):
            load_checkpoint(alone, optimizer, model)

    on_ranks(2, run)


def test_what_a_script_keeps_comes_back_with_groups_and_random_states(tmp_path):
    def begun(seed):
        model = new_model(seed=seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2], "weight_decay": 0.5}, {"params": trained[2:]}]
        optimizer = ziggurat.torch.AdamW(groups, lr=1e-2, threads=1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = begun(1)
    train(model, optimizer, 2)
    scheduler.step()
    save_checkpoint(tmp_path, optimizer, model, step=20, scheduler=scheduler, resume={"data": 7})
    drawn = torch.rand(3)
    optimizer.close()
    again, other, later = begun(2)
    other.param_groups[0]["weight_decay"] = 0.0
    found = load_checkpoint(tmp_path, other, again, scheduler=later)
    assert (found.path, found.step) == (f"{tmp_path}/step-000000020", 20)
    assert found.resume["data"] == 7 and found.notes == []
    assert torch.equal(torch.rand(3), drawn)
    assert [g["lr"] for g in other.param_groups] == [5e-3, 5e-3]
    assert other.param_groups[0]["weight_decay"] == 0.5
    assert later.state_dict() == scheduler.state_dict()
    assert other.state_of(again.scale)["step"] == 2
    other.close()
    again, other, _ = begun(2)
    with pytest.raises(ziggurat.InvalidArgument, match="has no state for ema; it was saved with scheduler"):
        load_checkpoint(tmp_path, other, again, ema=later)


def test_a_parameter_that_was_written_and_a_state_that_was_loaded_are_saved(tmp_path):
    model, optimizer = made(torch.bfloat16)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    optimizer.close()
    again, other = made(torch.bfloat16)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(state)  # in no engine yet
    save_checkpoint(tmp_path, other, again, step=1)
    before = bits(again, other)
    with torch.no_grad():
        again.scale.fill_(3.0)
    save_checkpoint(tmp_path, other, again, step=2)
    train(again, other, 1, first=2)
    after = bits(again, other)
    other.close()
    for step in (1, 2):
        third, loaded = made(torch.bfloat16, 4)
        load_checkpoint(tmp_path / f"step-{step:09}", loaded, third)
        found = bits(third, loaded)
        if step == 1:
            assert_same(found, before)
        else:
            assert third.scale.item() == 3.0 and found["scale: master"].item() == 3.0
            train(third, loaded, 1, first=2)
            assert_same(bits(third, loaded), after)
        loaded.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_open_optimizer_takes_over_from_another_trainer_is_saved(dtype, tmp_path):
    """The other trainer's file has no masters, so the weights are the masters."""
    theirs = new_model(dtype, seed=5)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    their_optimizer = torch.optim.AdamW(trained, lr=1e-2)
    train(theirs, their_optimizer, 2)
    both = {"model": theirs.state_dict(), "optimizer": their_optimizer.state_dict()}
    torch.save(both, tmp_path / "theirs.pt")
    model, optimizer = made(dtype)
    train(model, optimizer, 3)
    load_foreign_checkpoint(optimizer, model, tmp_path / "theirs.pt")
    save_checkpoint(tmp_path / "saved", optimizer, model)
    again, loaded = made(dtype, seed=4)
    load_checkpoint(tmp_path / "saved", loaded, again)
    assert_same(dict(again.state_dict()), dict(theirs.state_dict()))
    train(model, optimizer, 1, first=3)
    train(again, loaded, 1, first=3)
    assert_same(bits(again, loaded), bits(model, optimizer))


@pytest.mark.parametrize("master", ["none", "another"])
def test_a_parameter_that_becomes_its_master_is_saved_as_its_master(master, tmp_path):
    model, optimizer = made(torch.bfloat16)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        if master == "none":
            del entry["master"]
        else:
            entry["master"] = entry["master"] + 1.0
    optimizer.load_state_dict(state)
    save_checkpoint(tmp_path, optimizer, model)
    again, loaded = made(torch.bfloat16, seed=4)
    load_checkpoint(tmp_path, loaded, again)
    for param in loaded._order:
        assert torch.equal(loaded.state_of(param)["master"], param.float())
    train(model, optimizer, 1, first=2)
    train(again, loaded, 1, first=2)
    assert_same(bits(again, loaded), bits(model, optimizer))


def test_parameters_that_were_trained_later_are_saved_with_the_others(tmp_path):
    """They are in an engine of their own, and in one when they are loaded."""
    model = new_model(torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
    train(model, optimizer, 2)
    model.frozen.requires_grad_(True)
    train(model, optimizer, 1, first=2)
    assert len(optimizer._opened) == 2
    save_checkpoint(tmp_path, optimizer, model)
    again = new_model(torch.bfloat16, seed=4)
    again.frozen.requires_grad_(True)
    other = ziggurat.torch.AdamW(again.parameters(), lr=1e-2, threads=1)
    assert load_checkpoint(tmp_path, other, again).step == 3
    assert other.state_of(again.frozen.weight)["step"] == 1
    assert other.state_of(again.middle.weight)["step"] == 3
    train(model, optimizer, 2, first=3)
    train(again, other, 2, first=3)
    assert_same(bits(again, other), bits(model, optimizer))
    optimizer.close()
    other.close()


def test_a_loop_of_resume_saves_too(tmp_path):
    """A step's own blob comes later, and updates beside the next forward."""
    model = new_model(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    where = {"placement": f"nvme:{tmp_path}/state", "host_memory": "1MiB"}
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-2, threads=1, model=model, **where)
    resume = ziggurat.torch.Resume(optimizer, loader=range(4))
    for step in resume:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            save_checkpoint(tmp_path / "saved", optimizer, model, loader=Counter(resume.batch))
    after = bits(model, optimizer)
    optimizer.close()
    again, other = made(torch.bfloat16, 4)
    read = Counter(0)
    load_checkpoint(tmp_path / "saved", other, again, loader=read)
    assert read.batches == 2
    train(again, other, 2, first=2)
    assert_same(bits(again, other), after)
    other.close()


@pytest.mark.parametrize("seed", range(3))
def test_parameters_on_an_accelerator_are_saved_and_loaded(seed, tmp_path):
    def run(folder):
        model, optimizer = made(torch.bfloat16)
        train(model, optimizer, 2)
        with torch.no_grad():
            model.scale.fill_(3.0)
        save_checkpoint(folder, optimizer, model)
        train(model, optimizer, 2, first=2)
        again, other = made(torch.bfloat16, 4)
        load_checkpoint(folder, other, again)
        train(again, other, 2, first=2)
        optimizer.synchronize()
        other.synchronize()
        found = bits(model, optimizer), bits(again, other)
        optimizer.close()
        other.close()
        return found

    expected, _ = run(tmp_path / "cpu")
    with Double(seed):
        for found in run(tmp_path / "double"):
            assert_same(found, expected)


class Counter:
    """What keeps the place in the data."""

    def __init__(self, batches):
        self.batches = batches

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_a_model_that_is_given_before_its_optimizer_is_refused(call, tmp_path):
    model, optimizer = made()
    with pytest.raises(ziggurat.InvalidArgument, match="a Model was given as the optimizer: give the folder, an"):
        call(tmp_path, model, optimizer)


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path):
    model, optimizer = made()
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, optimizer, model)
    optimizer.close()

    def other_model():
        other = new_model(seed=3)
        other.extra = torch.nn.Linear(4, 4)
        del other.last
        trained = [p for p in other.parameters() if p.requires_grad]
        return other, ziggurat.torch.AdamW(trained, lr=1e-2, threads=1)

    other, second = other_model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=r"missing: extra.weight: exp_avg, .*unexpected: last.weight, .*strict=False",
    ):
        load_checkpoint(tmp_path, second, other)
    assert second.engine is None
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name])
    found = load_checkpoint(tmp_path, second, other, strict=False)
    assert {"extra.weight", "extra.bias: exp_avg"} <= set(found.missing)
    assert {"last.weight", "last.bias: exp_avg_sq"} <= set(found.unexpected)
    assert torch.equal(other.extra.weight, before["extra.weight"])
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert second.state_of(other.extra.weight) == {}  # it has made no step
    opened = second._opened_with[other.extra.weight]
    assert opened.read_state(other.extra.weight, "exp_avg").abs().max() == 0
    assert torch.equal(opened.read_state(other.extra.weight, "master"), other.extra.weight.detach())
    assert second.state_of(other.embed.weight)["step"] == 1
    with pytest.raises(ziggurat.InvalidArgument, match="before its first step and before Resume"):
        load_checkpoint(tmp_path, second, other)
    second.close()
    other = new_model()
    other.middle.weight = torch.nn.Parameter(torch.zeros(2, 2))
    second = ziggurat.torch.AdamW([other.middle.weight], lr=1e-2, threads=1)
    with pytest.raises(ziggurat.InvalidArgument, match=r"middle.weight is \(132, 36\) .*\(2, 2\)"):
        load_checkpoint(tmp_path, second, other, strict=False)
    with pytest.raises(ziggurat.InvalidArgument, match="does not exist, so there is no checkpoint"):
        load_checkpoint(tmp_path / "step-000000001" / "none", second, other)
    with pytest.raises(ziggurat.InvalidArgument, match="use load_foreign_checkpoint"):
        load_checkpoint(tmp_path / "latest", second, other)
    with pytest.raises(ziggurat.InvalidArgument, match="own format: use load_checkpoint"):
        ziggurat.torch.load_foreign_checkpoint(second, other, tmp_path)


def test_weights_alone_begin_at_step_0(tmp_path):
    model, optimizer = made(torch.bfloat16, kind="Lion")
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, optimizer, model)
    saved = bits(model, optimizer)
    optimizer.close()
    again, adamw = made(torch.bfloat16, 5)  # another optimizer
    found = load_checkpoint(tmp_path, adamw, again, weights_only=True)
    assert found.missing == found.unexpected == []
    assert adamw.engine.generation == 0
    for name, param in again.named_parameters():
        assert torch.equal(param, saved[name])
        if param.requires_grad:
            opened = adamw._opened_with[param]
            assert torch.equal(opened.read_state(param, "master").view_as(param), saved[f"{name}: master"])
            assert opened.read_state(param, "exp_avg").abs().max() == 0
    train(again, adamw, 1)
    adamw.close()


def test_names_may_be_others(tmp_path):
    model, optimizer = made()
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, optimizer, model)
    again = torch.nn.ModuleDict({"inner": new_model(seed=4)})
    trained = [p for p in again.parameters() if p.requires_grad]
    other = ziggurat.torch.AdamW(trained, lr=1e-2, threads=1)
    load_checkpoint(tmp_path, other, again, rename=lambda name: f"inner.{name}")
    assert_same(bits(again["inner"], other), bits(model, optimizer))
    optimizer.close()
    other.close()


@pytest.mark.parametrize("what", ["master", "exp_avg", "manifest"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_byte_is_refused_by_name(ranks, what, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    saved_by(1, tmp_path, "alone")
    path = tmp_path / "step-000000003"
    name = {"master": "last.weight", "exp_avg": "optimizer.exp_avg.last.weight"}.get(what)
    if name is None:
        damaged = path / "manifest.json"
        at, words = damaged.stat().st_size // 2, "is wrong, because the text was changed"
    else:
        damaged = next(iter(path.glob("*.safetensors")))
        with safetensors.safe_open(damaged, "pt") as shard:
            value = shard.get_tensor(name).numpy().tobytes()
        at = damaged.read_bytes().index(value) + 1000
        words = f"'{name}', are damaged"
    with damaged.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))

    def run(rank):
        how = "alone" if ranks == 1 else "group"
        model, optimizer = made(seed=5, how=how)
        # Every rank reads values; of the state each reads its own.
        with pytest.raises(ziggurat.ZigguratError) as refused:
            load_checkpoint(tmp_path, optimizer, model)
        return str(refused.value)

    said = [run(0)] if ranks == 1 else on_ranks(ranks, run)
    assert any(words in one and damaged.name in one for one in said), said
    if COMMAND:
        assert said_by("ckpt", "verify", str(path))[0] != 0


def test_a_save_that_cannot_be_leaves_nothing_on_any_rank(tmp_path):
    def run(rank):
        model, optimizer = made(how="group")
        train(model, optimizer, 1, rank=rank)
        save_checkpoint(tmp_path / "a", optimizer, model)
        with pytest.raises(ziggurat.ZigguratError, match="exists already|rank 0 could"):
            save_checkpoint(tmp_path / "a", optimizer, model)
        if rank == 0:
            (tmp_path / "file").write_text("")
        dist.barrier()
        with pytest.raises(ziggurat.ZigguratError, match="file"):
            save_checkpoint(tmp_path / "file" / "b", optimizer, model)
        # A rank that refuses by itself keeps none of the others waiting.
        broken = {"broken": object()} if rank == 1 else {}
        with pytest.raises(Exception, match="state_dict" if rank == 1 else "rank 1 failed: .*state_dict"):
            save_checkpoint(tmp_path / "c", optimizer, model, **broken)
        for step in (2, 3, 4):
            train(model, optimizer, 1, first=step, rank=rank)
            save_checkpoint(tmp_path / "a", optimizer, model, keep_last=2)
        optimizer.close()

    on_ranks(2, run)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        ".lock",
        "latest",
        "step-000000003",
        "step-000000004",
    ]
    assert not (tmp_path / "c").exists()


def test_the_best_checkpoint_stays(tmp_path):
    model, optimizer = made()
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.6)):
        train(model, optimizer, 1, first=step - 1)
        best = {"name": "loss", "step": min(step, 2), "value": min(loss, 2.0)}
        facts = {"best_metric": best}
        save_checkpoint(tmp_path, optimizer, model, keep_last=1, keep_best=True, resume=facts)
    optimizer.close()
    assert {p.name for p in tmp_path.glob("step-*")} == {"step-000000002", "step-000000004"}


def model_of_names(path):
    """Parameters by the names and shapes that a checkpoint has."""
    model = torch.nn.Module()
    for name, _, array, _, shape in json.loads((path / "manifest.json").read_text())["content"]["tensors"]:
        if array != "master":
            continue
        *inside, last = name.split(".")
        module = model
        for one in inside:
            if not hasattr(module, one):
                module.add_module(one, torch.nn.Module())
            module = getattr(module, one)
        module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    return model


@pytest.mark.skipif(not COMMAND, reason="ZIGGURAT_COMMAND is not set")
@pytest.mark.parametrize("state_format", ["fp32", "8bit"])
def test_what_ziggurat_train_saved_is_loaded(state_format, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "text").write_text("a small fast top, a wide cheap base; " * 400)
    command = ["train", "--model", "1x32x2", "--data", str(tmp_path / "text"), "--context", "16"]
    command += ["--store", str(tmp_path / "store"), "--steps", "3", "--threads", "1"]
    command += ["--state-format", state_format, "--checkpoint-dir", str(tmp_path / "saved")]
    code, said = said_by(*command)
    assert code == 0, said
    path = tmp_path / "saved" / "step-000000003"
    saved = {}
    for shard in path.glob("*.safetensors"):
        saved |= safetensors.load_file(shard)

    def run(rank, how):
        model = model_of_names(path)
        model, told = wrapped(model, how)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, threads=1, **told)
        found = load_checkpoint(tmp_path / "saved", optimizer, model)
        assert (found.step, found.missing, found.unexpected) == (3, [], [])
        assert found.resume["consumed_samples"] == 24
        for name, param in model.named_parameters():
            state = optimizer.state_of(param)
            assert state["step"] == 3 and torch.equal(state["master"], saved[name]), name
            assert torch.equal(rounded(saved[name], torch.bfloat16), param)
            for moment in ("exp_avg", "exp_avg_sq"):
                values = saved[f"optimizer.{moment}.{name}"]
                if state_format == "fp32":
                    assert torch.equal(state[moment], values), name
                else:
                    assert (state[moment] != 0).any()
        optimizer.close()

    run(0, "alone")
    if state_format == "fp32":
        on_ranks(3, run, "group")


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_takes_memory_for_a_few_chunks(ranks, tmp_path):
    """Of a parameter of 192 MiB of state, on NVMe."""
    rows, columns = 2048, 8192

    def run(rank):
        model = torch.nn.Module()
        model.big = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
        where = {"placement": f"nvme:{tmp_path}/state", "host_memory": "64MiB"}
        where |= {} if ranks == 1 else {"group": dist.group.WORLD}
        optimizer = ziggurat.torch.AdamW(model.parameters(), threads=1, **where)
        optimizer.open()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        save_checkpoint(tmp_path / "saved", optimizer, model, step=1)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        optimizer.close()
        return grown

    # Two records of 6 MiB at a time, the copies of both that are written, and a little beside.
    assert max(on_ranks(ranks, run)) < 2 * 2 * (6 << 20) + (6 << 20)
    shards = (tmp_path / "saved" / "step-000000001").glob("*.safetensors")
    assert sum(shard.stat().st_size for shard in shards) > rows * columns * 12


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
