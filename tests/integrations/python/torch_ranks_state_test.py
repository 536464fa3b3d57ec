# SPDX-License-Identifier: Apache-2.0
"""The state of optimizers among ranks: read, saved and loaded, by all ranks or by one.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import contextlib
import copy
import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ziggurat._checkpoint.checkpoint
import ziggurat._memory.placement
import ziggurat._ranks.ranks
import ziggurat.torch


def train(rank, model, optimizer, first=0, steps=3):
    for step in range(first, first + steps):
        tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(7 * step + rank))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


def ours(model, dtype=None, **where):
    return ziggurat.torch.AdamW(model.parameters(), lr=1e-3, group=dist.group.WORLD, **where)


def params(model):
    return [p.detach().clone() for p in model.parameters()]


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_is_whole_and_one_rank_alone_may_ask_for_it(dtype, tmp_path):
    def run(rank):
        model = small_model(dtype)
        optimizer = ours(model, placement=f"nvme:{tmp_path}/{dtype}")
        train(rank, model, optimizer)
        # The other ranks are in a barrier, which is not ours.
        state = optimizer.state_dict() if rank == 1 else None
        dist.barrier()
        every = optimizer.state_dict()
        optimizer.close()
        return state, every, [tuple(p.shape) for p in model.parameters()]

    (_, first, shapes), (alone, second, _) = on_ranks(2, run)
    for state in (first, second, alone):
        assert [tuple(s["exp_avg"].shape) for s in state["state"].values()] == shapes
        for entry, other in zip(state["state"].values(), first["state"].values(), strict=True):
            assert entry.keys() == other.keys()
            assert all(torch.equal(entry[key], other[key]) for key in entry)
            assert entry["step"] == 3 and entry["exp_avg_sq"].abs().max() > 0
            assert ("master" in entry) == (dtype != torch.float32)


def test_a_rank_refuses_a_state_dict_by_reference_though_another_has_what_was_written(tmp_path):
    """One rank alone may ask, as Trainer lets it."""

    def run(rank):
        model = small_model()
        optimizer = ours(model, placement=f"nvme:{tmp_path}/state", state="store")
        train(rank, model, optimizer)
        optimizer.synchronize()
        weight, before = model[2].weight, model[2].weight.detach().clone()
        with torch.no_grad():
            weight[-1, -1] += 1  # the last slice is rank 1's
        dist.barrier()
        if rank == 0:
            with pytest.raises(ziggurat.InvalidArgument, match="was written since the newest step"):
                optimizer.state_dict()
        dist.barrier()
        with torch.no_grad():
            weight.copy_(before)
            model[5].bias[0] += 1  # rank 1 has no slice of it
        if rank == 1:
            with pytest.raises(ziggurat.InvalidArgument, match="'group0.6' was written since"):
                optimizer.state_dict()
        dist.barrier()
        train(rank, model, optimizer, first=3, steps=1)
        reference = optimizer.state_dict()
        optimizer.close()
        return len(reference["state"])

    assert on_ranks(2, run) == [0, 0]


@pytest.mark.parametrize("failing", [False, True])
def test_a_rank_that_is_done_waits_for_others_and_one_that_fails_does_not(monkeypatch, failing):
    """Others may read a large state for longer than a minute; or wait for the one that fails."""
    waited = []
    meet = ziggurat._ranks.ranks.Ranks._meet
    monkeypatch.setattr(
        ziggurat._ranks.ranks.Ranks, "_meet", lambda ranks, s: waited.append(s) or meet(ranks, s)
    )

    def run(rank):
        model = small_model()
        optimizer = ours(model)
        with contextlib.suppress(KeyError):
            try:
                train(rank, model, optimizer, steps=1)
                if failing:
                    raise KeyError("a sample")
            finally:
                optimizer.close()
        return waited

    patience = ziggurat._ranks.ranks._PATIENCE.total_seconds()
    assert on_ranks(2, run) == [[ziggurat._ranks.ranks._ASKS_FOR if failing else patience]] * 2


def handles_an_error(raised):
    try:
        raise raised
    except BaseException:
        return ziggurat._ranks.ranks._handles_an_error()


def test_what_ends_all_ranks_alike_is_no_error_of_one():
    """One of them may then be saving, and reads from the others."""
    assert handles_an_error(KeyError()) and handles_an_error(SystemExit(1))
    alike = (KeyboardInterrupt(), StopIteration(), SystemExit(), SystemExit(0))
    assert not any(handles_an_error(raised) for raised in alike)


def test_torchs_optimizer_goes_on_from_it_and_ours_from_torchs():
    def run(rank):
        model, other = small_model(), small_model()
        optimizer = ours(model)
        train(rank, model, optimizer)
        other.load_state_dict(model.state_dict())
        ddp = DistributedDataParallel(other)
        torchs = torch.optim.AdamW(other.parameters(), lr=1e-3)
        torchs.load_state_dict(optimizer.state_dict())
        train(rank, ddp, torchs, first=3)
        saved, weights = copy.deepcopy(torchs.state_dict()), params(other)
        train(rank, model, optimizer, first=3)
        again = small_model()
        again.load_state_dict(other.state_dict())
        third = ours(again)
        third.load_state_dict(saved)
        train(rank, ddp, torchs, first=6)
        train(rank, again, third, first=6)
        return weights, params(model), params(other), params(again)

    for theirs, own, later, own_later in on_ranks(2, run):
        for a, b in zip((*theirs, *later), (*own, *own_later), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_another_number_of_ranks_goes_on_from_a_state_dict():
    def begin(rank):
        model = small_model(torch.bfloat16)
        optimizer = ours(model)
        train(0, model, optimizer)  # the same batches on all ranks, so on any number of them
        state = optimizer.state_dict()
        weights = params(model)
        train(0, model, optimizer, first=3)
        return state, weights, params(model)

    state, weights, after = on_ranks(2, begin)[0]

    def go_on(rank):
        model = small_model(torch.bfloat16)
        with torch.no_grad():
            for param, saved in zip(model.parameters(), weights, strict=True):
                param.copy_(saved)
        optimizer = ours(model)
        optimizer.load_state_dict(state)
        assert alike_state(optimizer.state_dict(), state)  # before a step it is what was loaded
        train(0, model, optimizer, first=3)
        return params(model)

    for world in (1, 4):
        for result in on_ranks(world, go_on):
            # Two or four equal gradients have the mean of one, exactly.
            assert alike(result, after)


def alike_state(one, other):
    pairs = zip(one["state"].values(), other["state"].values(), strict=True)
    return all(torch.equal(a[key], b[key]) for a, b in pairs for key in b)


def test_a_rank_without_a_part_of_a_parameter_knows_its_steps_after_a_resume(tmp_path):
    def run(rank):
        def made():
            model = torch.nn.Linear(5, 3)  # of which the first rank has all
            where = {"placement": f"nvme:{tmp_path}/state", "group": dist.group.WORLD}
            return model, ziggurat.torch.AdamW(model.parameters(), **where)

        torch.manual_seed(1)
        model, optimizer = made()
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = optimizer.state_dict()
        optimizer.close()
        model, optimizer = made()
        optimizer.open(resume=True)
        return before, optimizer.state_dict()

    for before, after in on_ranks(2, run):
        assert before["state"].keys() == after["state"].keys() == {0, 1}
        for number, entry in before["state"].items():
            for name, value in entry.items():
                assert torch.equal(after["state"][number][name], value)


def test_fsdp2s_state_is_dtensors_that_come_back():
    def run(rank):
        def made():
            model = small_model()
            for layer in (model[0], model[2], model[5]):
                fully_shard(layer)
            fully_shard(model)
            return model, ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=model)

        model, optimizer = made()
        train(rank, model, optimizer)
        state = optimizer.state_dict()
        kinds = {type(entry["exp_avg"]) for entry in state["state"].values()}
        model_state = {name: p.clone() for name, p in model.state_dict().items()}
        train(rank, model, optimizer, first=3)
        whole = [p.full_tensor() for p in model.parameters()]
        again, other = made()
        again.load_state_dict(model_state)
        other.load_state_dict(state)
        train(rank, again, other, first=3)
        return kinds == {DTensor}, whole, [p.full_tensor() for p in again.parameters()]

    for dtensors, whole, again in on_ranks(3, run):
        assert dtensors
        assert alike(whole, again)


def test_what_fsdp2_does_not_shard_is_saved_as_the_first_rank_has_it(tmp_path):
    def run(rank):
        def made(value):
            model = small_model()
            model.register_buffer("seen", torch.full((3,), float(value)))
            fully_shard(model)
            return model, ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=model)

        model, optimizer = made(rank)
        train(rank, model, optimizer, steps=1)
        ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)
        again, other = made(7)
        ziggurat.torch.load_checkpoint(tmp_path / "saved", other, again)
        return again.seen.tolist()

    assert on_ranks(3, run) == 3 * [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("made_by, opened_by", [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_store_of_another_number_of_ranks_is_refused_with_that_number(
    made_by, opened_by, tmp_path
):
    def run(rank, resume):
        model = torch.nn.Linear(64, 64)
        torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        named = list(model.named_parameters())
        place = f"nvme:{tmp_path}/state"
        optimizer = ziggurat.torch.AdamW(named, placement=place, group=dist.group.WORLD)
        if resume:
            with pytest.raises((ziggurat.InvalidArgument, ziggurat.Unavailable)) as refused:
                optimizer.open(resume=True)
            return str(refused.value)
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        optimizer.close()
        return ""

    on_ranks(made_by, run, False)
    of = "1 rank" if made_by == 1 else f"{made_by} ranks"
    for words in on_ranks(opened_by, run, True):
        assert f"the store was made by {of}, but is opened by {opened_by}" in words


class Unsaved:
    """Whose state no rank but the first can give."""

    def state_dict(self):
        if dist.get_rank():
            raise OSError("its state is gone")
        return {}


def unsaved(folder, model, optimizer):
    ziggurat.torch.save_checkpoint(f"{folder}/a", optimizer, model, one=Unsaved())


def no_plain_facts(folder, model, optimizer):
    facts = {"where": object()} if dist.get_rank() == 0 else {}
    ziggurat.torch.save_checkpoint(f"{folder}/a", optimizer, model, resume=facts)


def loads_nothing(folder, model, _):
    saved = f"{folder}/saved" if dist.get_rank() == 0 else f"{folder}/nothing"
    ziggurat.torch.load_checkpoint(saved, ours(model), model)


def loads_damaged(folder, model, _):
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # the byte is in what this rank alone reads

            def damaged(*_):
                raise ziggurat.DataLoss("its hash is another")

            patch.setattr(ziggurat._library.native_checkpoint.Checkpoint, "read", damaged)
        ziggurat.torch.load_checkpoint(f"{folder}/saved", ours(model), model)


def loads_nothing_foreign(folder, model, _):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": {}}, f"{folder}/foreign.pt")
    found = f"{folder}/{'foreign' if dist.get_rank() == 0 else 'nothing'}.pt"
    ziggurat.torch.load_foreign_checkpoint(ours(model), model, found, strict=False)


def has_no_memory(folder, model, _):
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # whose machine is another
            patch.setattr(ziggurat._memory.placement, "free_bytes", lambda: 1000)
        ours(model, placement="auto").open()


def has_a_double(folder, model, _):
    """So small that all of it is rank 0's."""
    ours(torch.nn.Linear(2, 1).double()).open()


@pytest.mark.parametrize(
    "call, of_rank, words",
    [
        (unsaved, 1, "its state is gone"),
        (no_plain_facts, 0, "not JSON serializable"),
        (loads_nothing, 1, "nothing"),
        (loads_damaged, 1, "its hash is another"),
        (loads_nothing_foreign, 1, "nothing.pt does not exist"),
        (has_no_memory, 1, "of free memory"),
        (has_a_double, None, "must be fp32, bf16 or fp16"),
    ],
)
def test_no_rank_waits_for_one_that_has_failed(call, of_rank, words, tmp_path):
    """All go on together from there."""

    def run(rank):
        model = small_model()
        optimizer = ours(model)
        train(rank, model, optimizer, steps=1)
        ziggurat.torch.save_checkpoint(f"{tmp_path}/saved", optimizer, model)
        with pytest.raises(Exception, match=words) as failed:  # noqa: PT011: it may be of any class
            call(tmp_path, model, optimizer)
        train(rank, model, optimizer, first=1, steps=1)
        saved = ziggurat.torch.save_checkpoint(f"{tmp_path}/then", optimizer, model)
        optimizer.close()
        return str(failed.value), saved

    for rank, (said, saved) in enumerate(on_ranks(2, run)):
        own = of_rank is None or rank == of_rank
        assert own or f"was given up, because rank {of_rank} failed: " in said
        assert saved == f"{tmp_path}/then/step-000000002"


def test_ranks_are_told_alike_what_a_checkpoint_is_called(monkeypatch, tmp_path):
    """One that does not see the file that says it asks another."""
    named = ziggurat._checkpoint.checkpoint._saved_as

    def seen(*given):
        if dist.get_rank() == 1:
            raise FileNotFoundError("latest")
        return named(*given)

    monkeypatch.setattr(ziggurat._checkpoint.checkpoint, "_saved_as", seen)

    def run(rank):
        model = small_model()
        optimizer = ours(model)
        train(rank, model, optimizer, steps=1)
        return ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)

    assert on_ranks(2, run) == [f"{tmp_path}/step-000000001"] * 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
