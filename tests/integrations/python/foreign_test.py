# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch's own, by torch.save and by torch.distributed.checkpoint: taken over with
the same bits, refused where they do not fit or would run code.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import copy
import os
import pickle
import re
import sys
import warnings
from pathlib import Path

try:
    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from foreign_runs import BEFORE, LR, groups_of, loss_of, new_model
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ziggurat.torch
from ziggurat._foreign.dcp import _are_all_of
from ziggurat._optimizer.rounding import rounded
from ziggurat.torch import load_foreign_checkpoint

PEERS = {
    "AdamW": {"lr": LR},
    "Adam": {"lr": LR},
    "Adagrad": {"lr": LR, "initial_accumulator_value": 0.5},
    "SGD": {"lr": LR, "momentum": 0.9},
}


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def torchs_run(name="AdamW", dtype=torch.float32):
    """A model and the optimizer of torch.optim that trained it."""
    model = new_model(dtype)
    optimizer = getattr(torch.optim, name)(groups_of(model), **PEERS[name])
    train(model, optimizer, BEFORE)
    return model, optimizer


def ours(trained, name="AdamW", **where):
    return getattr(ziggurat.torch, name)(groups_of(trained), **PEERS[name], **where)


def both(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def assert_taken_over(model, optimizer, theirs, their_optimizer):
    """The same bits of weights, buffers and state, and as many steps."""
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(model.state_dict()[name].dtype)), name
    their_names = dict(theirs.named_parameters())
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        wanted, found = their_optimizer.state[their_names[name]], optimizer.state_of(param)
        for key, value in wanted.items():
            assert torch.equal(found[key], value.float()), (name, key)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("name", PEERS)
def test_torchs_run_goes_on(name, placement, tmp_path):
    theirs, optimizer = torchs_run(name)
    torch.save(both(theirs, optimizer), tmp_path / "saved.pt")
    where = "host" if placement == "host" else f"nvme:{tmp_path}/state"

    model, by_state_dict = new_model(seed=2), copy.deepcopy(theirs)
    taken = ours(model, name, placement=where, threads=1)
    if placement == "nvme":
        train(model, taken, 2)  # an engine that has state of its own
    found = load_foreign_checkpoint(taken, model, tmp_path / "saved.pt")
    assert found.missing == found.unexpected == []
    assert [group["lr"] for group in found.param_groups] == [LR, LR]
    assert_taken_over(model, taken, theirs, optimizer)

    # What is loaded by PyTorch's own means goes on with the same bits.
    second = ours(by_state_dict, name)
    second.load_state_dict(optimizer.state_dict())
    train(model, taken, 3, first=BEFORE)
    train(by_state_dict, second, 3, first=BEFORE)
    for one, other in zip(model.parameters(), by_state_dict.parameters(), strict=True):
        assert torch.equal(one, other)
    if placement == "nvme":
        taken.close()
        again = ours(new_model(seed=3), name, placement=where, threads=1)
        again.open(resume=True)
        for param, other in zip(again._order, second._order, strict=True):
            for key, value in second.state_of(other).items():
                assert torch.equal(again.state_of(param)[key], value)


def test_it_need_not_be_opened_or_made_of_the_same_type(tmp_path):
    """fp32 weights are the masters of 16-bit ones, which are what the engine rounds them to."""
    theirs, optimizer = torchs_run()
    torch.save(both(theirs, optimizer), tmp_path / "saved.pt")
    for dtype in (torch.bfloat16, torch.float16):
        model = new_model(dtype, seed=2)
        taken = ours(model)
        load_foreign_checkpoint(taken, model, tmp_path / "saved.pt")
        for step in (None, BEFORE):
            if step is not None:  # with a rate of zero the step writes what was loaded
                for group in taken.param_groups:
                    group["lr"] = 0.0
                train(model, taken, 1, first=step)
            for one, other in zip(taken._order, optimizer.param_groups[0]["params"], strict=False):
                assert torch.equal(taken.state_of(one)["master"], other)
                assert torch.equal(rounded(other, one.dtype), one.detach())


def test_masters_of_our_own_are_taken_over(tmp_path):
    theirs = new_model(torch.bfloat16)
    first = ours(theirs)
    train(theirs, first, BEFORE)
    torch.save(both(theirs, first), tmp_path / "saved.pt")
    model = new_model(torch.bfloat16, seed=2)
    second = ours(model)
    load_foreign_checkpoint(second, model, tmp_path / "saved.pt")
    for one, other in zip(second._order, first._order, strict=True):
        for key, value in first.state_of(other).items():
            assert torch.equal(second.state_of(one)[key], value), key
    train(model, second, 2, first=BEFORE)
    train(theirs, first, 2, first=BEFORE)
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_never_had_a_gradient_begins_anew(tmp_path):
    theirs = new_model()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR)  # has the frozen ones too
    theirs.norm.requires_grad_(False)
    train(theirs, optimizer, 2)
    torch.save(both(theirs, optimizer), tmp_path / "saved.pt")
    model = new_model()
    taken = ziggurat.torch.AdamW(model.parameters(), lr=LR)
    train(model, taken, 1)
    assert load_foreign_checkpoint(taken, model, tmp_path / "saved.pt").missing == []
    assert taken.state_of(model.norm.weight) == {}
    train(model, taken, 1)
    assert taken.state_of(model.norm.weight)["step"] == 1
    assert taken.state_of(model.middle.weight)["step"] == 3


KEYS = {
    "plain": lambda model, optimizer: both(model, optimizer),
    "long": lambda model, optimizer: {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    },
    "Lightning": lambda model, optimizer: {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    },
    "by name": lambda model, optimizer: {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
    },
}


@pytest.mark.parametrize("keys", KEYS)
def test_the_keys_that_trainers_give_are_known(keys, tmp_path):
    theirs, optimizer = torchs_run()
    torch.save(KEYS[keys](theirs, optimizer), tmp_path / "saved.pt")
    model = new_model(seed=2)
    taken = ours(model)
    load_foreign_checkpoint(taken, model, tmp_path / "saved.pt")
    assert_taken_over(model, taken, theirs, optimizer)


def saved_by_dcp(state, folder):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def flat_state(model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


DCP = {
    "by name": lambda model, optimizer: {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    },
    "flat": lambda model, optimizer: {
        "model": model.state_dict(),
        "optim": flat_state(model, optimizer),
    },
    "by number": lambda model, optimizer: both(model, optimizer),
}


@pytest.mark.parametrize("kind", DCP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_distributed_checkpoint_goes_on(kind, dtype, tmp_path):
    theirs, optimizer = torchs_run(dtype=dtype)
    saved_by_dcp(DCP[kind](theirs, optimizer), tmp_path / "saved")
    model = new_model(dtype, seed=2)
    taken = ours(model)
    found = load_foreign_checkpoint(taken, model, tmp_path / "saved")
    assert found.missing == found.unexpected == []
    assert_taken_over(model, taken, theirs, optimizer)


def sharded(seed=1, optimizer=None):
    model = new_model(seed=seed)
    fully_shard(model.middle)
    fully_shard(model)
    make = torch.optim.AdamW if optimizer is None else optimizer
    return model, make(groups_of(model), lr=LR)


def wholes(model, optimizer):
    """Of each parameter its weights and state, on any rank."""
    found = {}
    for name, param in model.named_parameters():
        state = optimizer.state[param] if type(optimizer) is torch.optim.AdamW else None
        if state is None:
            state = optimizer.state_of(param) if param.requires_grad else {}
        tensors = {"weights": param.detach(), **state}
        for key, value in tensors.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name} {key}"] = whole.clone()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_fsdp2s_ranks_saved_goes_on_alone_and_on_ranks(ranks, tmp_path):
    def save(rank):
        model, optimizer = sharded()
        train(model, optimizer, BEFORE)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
        return wholes(model, optimizer)

    wanted = on_ranks(ranks, save)[0]

    def go_on(rank):
        model, optimizer = sharded(seed=2, optimizer=ziggurat.torch.AdamW)
        load_foreign_checkpoint(optimizer, model, tmp_path / "saved")
        return wholes(model, optimizer)

    model = new_model(seed=2)
    alone = ours(model)
    load_foreign_checkpoint(alone, model, tmp_path / "saved")
    for found in (wholes(model, alone), *on_ranks(2, go_on)):
        for key, value in wanted.items():
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("way", ["group", "ddp", "fsdp2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_keeps_its_part(way, dtype, tmp_path):
    theirs, optimizer = torchs_run()
    torch.save(both(theirs, optimizer), tmp_path / "saved.pt")
    wanted = wholes(theirs, optimizer)

    def go_on(rank):
        model = new_model(dtype, seed=2)
        where = {}
        if way == "fsdp2":
            fully_shard(model.middle)
            fully_shard(model)
        wrapped = DistributedDataParallel(model) if way == "ddp" else model
        where = {"group": dist.group.WORLD} if way == "group" else {"model": wrapped}
        taken = ours(model, **where)
        load_foreign_checkpoint(taken, wrapped, tmp_path / "saved.pt")
        found = wholes(model, taken)
        train(wrapped, taken, 1, first=BEFORE)
        taken.synchronize()
        return found, wholes(model, taken)

    model = new_model(dtype, seed=2)
    alone = ours(model)
    load_foreign_checkpoint(alone, model, tmp_path / "saved.pt")
    train(model, alone, 1, first=BEFORE)
    for found, after in on_ranks(2, go_on):
        for key, value in wanted.items():
            if dtype == torch.float32 or not key.endswith("weights"):
                assert torch.equal(found[key], value), key
            elif key.replace("weights", "master") in found:
                assert torch.equal(found[key.replace("weights", "master")], value), key
        for key, value in wholes(model, alone).items():  # equal gradients have one's mean
            assert torch.equal(after[key], value), key


# What does not fit.


@pytest.fixture
def saved(tmp_path):
    theirs, optimizer = torchs_run()
    return both(theirs, optimizer), tmp_path / "saved.pt"


def refused(state, path, words, error=ziggurat.InvalidArgument, name="AdamW", **arguments):
    """With nothing changed."""
    torch.save(state, path)
    model = new_model(seed=2)
    taken = ours(model, name)
    train(model, taken, 1)
    before = copy.deepcopy(both(model, taken))
    with pytest.raises(error, match=words) as raised:
        load_foreign_checkpoint(taken, model, path, **arguments)
    assert str(path) in str(raised.value)
    after = both(model, taken)
    assert all(torch.equal(after["model"][key], value) for key, value in before["model"].items())
    for index, entry in before["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(after["optimizer"]["state"][index][key], value)
    return str(raised.value)


def test_what_is_missing_or_unexpected_is_named(saved):
    state, path = saved
    state["model"]["other.weight"] = state["model"].pop("middle.weight")
    del state["model"]["scale"]
    words = refused(state, path, r"missing: .*unexpected: other\.weight")
    assert "missing: scale, middle.weight;" in words and "rename=" in words
    model = new_model(seed=2)
    before = model.middle.weight.detach().clone()
    taken = ours(model)
    found = load_foreign_checkpoint(taken, model, path, strict=False)
    assert found.missing == ["scale", "middle.weight"] and found.unexpected == ["other.weight"]
    assert torch.equal(model.middle.weight, before)
    assert taken.state_of(model.middle.weight)["step"] == BEFORE


def test_state_that_is_missing_or_unexpected_is_named(saved):
    state, path = saved
    entry = state["optimizer"]["state"][1]
    entry["max_exp_avg_sq"] = entry.pop("exp_avg_sq")
    refused(
        state,
        path,
        r"missing: middle\.weight: exp_avg_sq; .*unexpected: middle\.weight: max_exp_avg_sq",
    )
    model = new_model(seed=2)
    taken = ours(model)
    train(model, taken, 2)
    found = load_foreign_checkpoint(taken, model, path, strict=False)
    assert found.missing == ["middle.weight: exp_avg_sq"]
    assert taken.state_of(model.middle.weight) == {}
    assert taken.state_of(model.embed.weight)["step"] == BEFORE


def test_weights_alone_are_taken_if_asked_for(saved):
    state, path = saved
    refused(state["model"], path, "missing: embed.weight: exp_avg")
    model = new_model(seed=2)
    found = load_foreign_checkpoint(ours(model), model, path, strict=False)
    assert found.missing[:2] == ["embed.weight: exp_avg", "embed.weight: exp_avg_sq"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state["model"][name])
    torch.save(state["optimizer"], path)
    other = new_model(seed=3)
    taken = ours(other)
    assert "embed.weight" in load_foreign_checkpoint(taken, other, path, strict=False).missing
    assert taken.state_of(other.embed.weight)["step"] == BEFORE


def test_other_shapes_are_named_and_refused_always(saved):
    state, path = saved
    state["model"]["middle.bias"] = torch.zeros(36)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(37, 61)
    for strict in (True, False):
        words = refused(state, path, "other shapes: ", strict=strict)
        assert f"middle.bias is (36,) in {path}, but (37,) in the model" in words
        assert "embed.weight: exp_avg is (37, 61)" in words


def test_another_optimizers_state_or_groups_are_refused(saved):
    state, path = saved
    refused(state, path, "missing: .*: momentum_buffer.*unexpected: .*: exp_avg", name="SGD")
    group = state["optimizer"]["param_groups"][1]
    group["params"] = group["params"][:-1]
    refused(state, path, "the saved optimizer has 5 parameters, but this optimizer has 6")


def test_their_names_become_ours(saved):
    state, path = saved
    renamed = {f"wrapped.{name}": value for name, value in state["model"].items()}
    renamed["wrapped.gone"] = torch.zeros(3)
    refused({**state, "model": renamed}, path, r"unexpected: wrapped\.scale, wrapped\.embed\.weight")
    model = new_model(seed=2)

    def rename(name):
        return None if name == "wrapped.gone" else name.removeprefix("wrapped.")

    found = load_foreign_checkpoint(ours(model), model, path, rename=rename)
    assert found.missing == found.unexpected == []
    assert torch.equal(model.middle.weight, state["model"]["middle.weight"])
    words = "rename returns 'one' for several"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        load_foreign_checkpoint(ours(model), model, path, rename=lambda name: "one")


def test_what_is_no_checkpoint_says_what_would_be(tmp_path, saved):
    state, path = saved
    refused({"epoch": 3}, path, "has 'epoch', but no state dict")
    refused([1, 2], path, "holds a list")
    model = new_model()
    taken = ours(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "latest").write_text("../../etc")
    for other in ({"module": {}, "param_shapes": 3}, {"module": 1}):
        (tmp_path / "DeepSpeed").mkdir(exist_ok=True)
        torch.save(other, tmp_path / "DeepSpeed" / "mp_rank_00_model_states.pt")
        with pytest.raises(ziggurat.DataLoss, match="cannot be read as a checkpoint"):
            load_foreign_checkpoint(taken, model, tmp_path / "DeepSpeed")
    for place, words in (
        ("nothing", "does not exist"),
        ("empty", "give a file of torch.save, a folder with .metadata"),
        ("tag", "names '../../etc', but .* has no folder of that name"),
    ):
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            load_foreign_checkpoint(taken, model, tmp_path / place)
    elsewhere = new_model()
    with pytest.raises(ziggurat.InvalidArgument, match="is not in the model"):
        torch.save(state, path)
        load_foreign_checkpoint(taken, elsewhere, path)


def test_damaged_files_are_named(tmp_path, saved):
    state, path = saved
    torch.save(state, path)
    model = new_model()
    taken = ours(model)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ziggurat.DataLoss, match=re.escape(f"{path} cannot be read")):
        load_foreign_checkpoint(taken, model, path)
    saved_by_dcp(state, tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(whole[:-20])
    with pytest.raises(ziggurat.DataLoss, match=re.escape(str(metadata))):
        load_foreign_checkpoint(taken, model, tmp_path / "dcp")
    metadata.write_bytes(whole)
    part = next((tmp_path / "dcp").glob("*.distcp"))
    part.write_bytes(b"\0" * part.stat().st_size)
    with pytest.raises(ziggurat.InvalidArgument, match=re.escape(str(part))):
        load_foreign_checkpoint(taken, model, tmp_path / "dcp")


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([((0,), (2,)), ((2,), (2,))], True),
        ([((0,), (2,)), ((1,), (2,))], False),  # the last is in none
        ([((0,), (2,)), ((3,), (2,))], False),
        ([((0, 0), (1, 3)), ((1, 0), (1, 3))], True),
        ([((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2))], True),
        ([((0, 0), (2, 1)), ((0, 1), (1, 2)), ((0, 1), (1, 2))], False),
        ([((0, 0), (2, 3)), ((2, 0), (0, 3))], True),  # a rank that has none of it
        ([((0, 0), (1, 3))], False),
    ],
)
def test_parts_that_leave_elements_out_are_not_all_of_a_tensor(parts, whole):
    chunks = [ChunkStorageMetadata(*map(torch.Size, part)) for part in parts]
    assert _are_all_of(chunks, (4,) if len(parts[0][0]) == 1 else (2, 3)) == whole


def test_parts_that_overlap_are_damage_and_no_values_from_nowhere(tmp_path):
    def save(rank):
        model, _ = sharded()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(tmp_path))

    on_ranks(2, save)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    name = "model.middle.weight"
    first, last = sorted(metadata.state_dict_metadata[name].chunks, key=lambda one: one.offsets)
    place = metadata.storage_data.pop(MetadataIndex(name, last.offsets))
    last.offsets = torch.Size((last.offsets[0] - 1, *last.offsets[1:]))
    metadata.storage_data[MetadataIndex(name, last.offsets)] = place
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = new_model()
    with pytest.raises(ziggurat.DataLoss, match=f"the parts of '{name}' overlap or leave"):
        load_foreign_checkpoint(ours(model), model, tmp_path)


# What would run code.


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Unknown:
    """Of a class that is not read, though it does no harm."""


def load(path):
    model = new_model()
    return load_foreign_checkpoint(ours(model), model, path)


@pytest.fixture
def marker(tmp_path):
    marker = tmp_path / "it_ran"
    yield marker
    assert not marker.exists()


def test_a_file_that_would_run_code_is_refused(marker, saved):
    state, path = saved
    torch.save({**state, "extra": Hostile(marker)}, path)
    words = rf"{re.escape(str(path))} holds a posix\.system.*would run code"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        load(path)
    torch.save({**state, "extra": Unknown()}, path)
    words = r"holds a [\w.]*Unknown, .*add_safe_globals"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        load(path)
    for write in (pickle.dumps, older_format):
        path.write_bytes(write({**state, "extra": Hostile(marker)}))
        with pytest.raises(ziggurat.InvalidArgument, match="not in the format that torch.save has written"):
            load(path)


def older_format(state):
    """torch.save's before PyTorch 1.6."""
    import io

    memory = io.BytesIO()
    torch.save(state, memory, _use_new_zipfile_serialization=False)
    return memory.getvalue()


def test_a_distributed_checkpoint_that_would_run_code_is_refused(marker, saved, tmp_path):
    state, _ = saved
    folder = tmp_path / "dcp"
    saved_by_dcp(state, folder)
    metadata = folder / ".metadata"
    whole = metadata.read_bytes()
    for protocol in (2, 4):
        metadata.write_bytes(pickle.dumps(Hostile(marker), protocol))
        words = rf"{re.escape(str(metadata))} holds a posix\.system"
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            load(folder)
    for hostile in (eval, getattr, torch.load, pickle.loads, torch.serialization.load, Path.unlink):
        metadata.write_bytes(pickle.dumps(hostile))
        with pytest.raises(ziggurat.InvalidArgument, match=r"\.metadata holds a "):
            load(folder)
    # A class that is known is not one that a pickle can change.
    known_class = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for state in (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86"):
        metadata.write_bytes(b"\x80\x02" + known_class + state + b"b.")
        with pytest.raises(ziggurat.DataLoss, match=re.escape(str(folder))):
            load(folder)
        assert not hasattr(dcp.metadata.Metadata, "a")
    metadata.write_bytes(whole)
    part = next(folder.glob("*.distcp"))

    known = pickle.loads(whole)
    # A tensor, and what is none.
    hostile = ("optimizer.state.0.exp_avg", "optimizer.param_groups.0.lr")
    indices = [index for index in known.storage_data if index.fqn in hostile]
    assert len(indices) == 2
    for index in indices:
        path = folder / f"hostile_{index.fqn}"
        torch.save(Hostile(marker), path)
        changed = copy.deepcopy(known)
        changed.storage_data[index].relative_path = path.name
        changed.storage_data[index].offset = 0
        changed.storage_data[index].length = path.stat().st_size
        metadata.write_bytes(pickle.dumps(changed))
        words = rf"{re.escape(str(path))} holds a posix\.system"
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            load(folder)
        changed.storage_data[index].relative_path = f"../{part.name}"
        metadata.write_bytes(pickle.dumps(changed))
        with pytest.raises(ziggurat.InvalidArgument, match="outside its folder"):
            load(folder)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
