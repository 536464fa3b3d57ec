# SPDX-License-Identifier: Apache-2.0
"""A store that is divided anew among other ranks, in place, has the same bits as whole parameters.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import os
import random
import subprocess
import sys
import time

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import RankProcesses, on_ranks
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ziggurat.torch

_ARRAYS = ("master", "exp_avg", "exp_avg_sq")
_FORMATS = {
    "fp32": torch.float32,
    "split": torch.bfloat16,
    "bf16-moments": torch.float32,
    "8bit": torch.float32,
}


def made(kind, folder, state_format="fp32"):
    """The model as it is trained, the model itself, and its optimizer."""
    inner = model = small_model(_FORMATS[state_format])
    settings = {"placement": f"nvme:{folder}", "state_format": state_format, "threads": 1}
    if dist.get_world_size() == 1:
        return model, inner, ziggurat.torch.AdamW(model.parameters(), 1e-3, model=model, **settings)
    if kind == "ddp":
        model = DistributedDataParallel(inner)
    elif kind == "fsdp":
        for layer in (inner[0], inner[2], inner[5]):
            fully_shard(layer)
        fully_shard(inner)
    else:
        settings["group"] = dist.group.WORLD
    return model, inner, ziggurat.torch.AdamW(inner.parameters(), 1e-3, model=model, **settings)


def train(model, optimizer, steps):
    """The same gradients on all ranks, but for one parameter's, which one step lacks."""
    for step in range(steps):
        tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def whole(values):
    return values.full_tensor() if isinstance(values, DTensor) else values.detach().clone()


def state_of(inner, optimizer):
    """All that belongs to each parameter, as whole tensors."""
    found = {}
    for opened in optimizer._opened:
        for name, param in inner.named_parameters():
            arrays = [
                whole(optimizer._sharing.whole_state(opened, param, array)).view(-1)
                for array in _ARRAYS
            ]
            arrays.append(whole(param).view(-1))
            found[name] = arrays, opened.steps_of(param)
    found["step"] = [], optimizer.engine.generation
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, (arrays, steps) in one.items():
        assert other[name][1] == steps, name
        for a, b in zip(arrays, other[name][0], strict=True):
            assert torch.equal(a, b), name


def opened(_, kind, folder, state_format, resume, steps):
    model, inner, optimizer = made(kind, folder, state_format)
    optimizer.open(resume=resume)
    train(model, optimizer, steps)
    state = state_of(inner, optimizer)
    optimizer.close()
    return state


@pytest.mark.parametrize(
    ("kind", "state_format"),
    [("own", name) for name in _FORMATS]
    + [("fsdp", name) for name in _FORMATS if name != "8bit"]
    + [("ddp", "fp32")],
)
def test_of_2_ranks_to_3_to_1_and_back_keeps_every_bit(kind, state_format, tmp_path):
    folder = tmp_path / "state"
    first, *_ = on_ranks(2, opened, kind, folder, state_format, False, 3)
    assert first["step"][1] == 3
    for world in (3, 1, 2):
        for state in on_ranks(world, opened, kind, folder, state_format, "reshard", 0):
            assert_same(state, first)
        for state in on_ranks(world, opened, kind, folder, state_format, "auto", 0):
            assert_same(state, first)
    assert not (folder / "resharded").exists()


def test_fsdp2s_store_goes_on_as_ddps_and_the_other_way_round(tmp_path):
    first, *_ = on_ranks(2, opened, "fsdp", tmp_path / "state", "fp32", False, 3)
    for kind in ("ddp", "fsdp"):
        for state in on_ranks(2, opened, kind, tmp_path / "state", "fp32", "reshard", 0):
            assert_same(state, first)


def refused(_, kind, folder, state_format, resume):
    _, _, optimizer = made(kind, folder, state_format)
    with pytest.raises(ziggurat.ZigguratError) as error:
        optimizer.open(resume=resume)
    return str(error.value)


def test_other_ranks_and_other_parts_are_refused_by_the_call_that_divides_anew(tmp_path):
    folder = tmp_path / "state"
    on_ranks(2, opened, "own", folder, "fp32", False, 1)
    for world, kind in ((3, "own"), (1, "own"), (2, "fsdp")):
        for words in on_ranks(world, refused, kind, folder, "fp32", True):
            assert 'resume="reshard"' in words, words
    for words in on_ranks(3, refused, "own", folder, "fp32", "resherd"):
        assert 'resume="resherd": give "auto", "reshard" or "never"' in words


def test_never_replaces_the_store(tmp_path):
    folder = tmp_path / "state"
    on_ranks(2, opened, "own", folder, "fp32", False, 2)
    for state in on_ranks(3, opened, "own", folder, "fp32", "never", 1):
        assert state["step"][1] == 1
    for state in on_ranks(3, opened, "own", folder, "fp32", True, 0):
        assert state["step"][1] == 1


def adds(_, folder, resume, steps):
    """The head is added to the optimizer after the rest was opened."""
    model = small_model()
    head = list(model[5].parameters())
    rest = [param for param in model.parameters() if all(param is not one for one in head)]
    its = {"placement": f"nvme:{folder}", "threads": 1, "model": model}
    if dist.get_world_size() > 1:
        its["group"] = dist.group.WORLD
    optimizer = ziggurat.torch.AdamW(rest, 1e-3, **its)
    optimizer.open(resume=resume)
    optimizer.add_param_group({"params": head})
    optimizer.open(resume=resume)
    train(model, optimizer, steps)
    state = state_of_all(model, optimizer)
    optimizer.close()
    return state


def state_of_all(model, optimizer):
    found = {}
    for opened in optimizer._opened:
        for name, param in model.named_parameters():
            if any(param is member for member in opened.members):
                arrays = [
                    optimizer._sharing.whole_state(opened, param, array).view(-1)
                    for array in _ARRAYS
                ]
                found[name] = arrays, opened.steps_of(param)
    return found


def test_what_was_added_later_is_divided_too_and_never_replaced_unseen(tmp_path):
    folder = tmp_path / "state"
    first, *_ = on_ranks(2, adds, folder, False, 2)
    assert len(first) == 7
    assert {steps for _, steps in first.values()} == {2}
    for world in (1, 3):
        for state in on_ranks(world, adds, folder, "reshard", 0):
            assert_same(state, first)
    for words in on_ranks(3, refused, "own", folder, "fp32", "never"):
        assert "are not replaced" in words
        assert str(folder / "added-1") in words
    for state in on_ranks(3, adds, folder, "auto", 0):
        assert_same(state, first)


def divides(_, folder, out, told):
    """Divides the store anew, and may be killed meanwhile."""
    _, _, optimizer = made("own", folder)
    told(0)
    optimizer.open(resume="reshard")
    optimizer.close()


def test_a_kill_while_the_store_is_divided_leaves_one_of_the_two(tmp_path):
    generator = random.Random(int(os.environ.get("ZIGGURAT_SEED", "1")))
    folder = tmp_path / "state"
    first, *_ = on_ranks(2, opened, "own", folder, "fp32", False, 3)
    for kill in range(int(os.environ.get("ZIGGURAT_KILLS", "4"))):
        world = 3 - kill % 2
        with RankProcesses(world, divides, folder, str(tmp_path / "out")) as ranks:
            if ranks.wait_for_a_step():
                time.sleep(0.2 * generator.random())
                ranks.kill(generator.randrange(world))
                for _ in ranks.end(within=time.monotonic() + 20):
                    pass
        if kill % 2:  # whoever comes next
            for state in on_ranks(1, opened, "alone", folder, "fp32", "reshard", 0):
                assert_same(state, first)
    for state in on_ranks(2, opened, "own", folder, "fp32", "reshard", 0):
        assert_same(state, first)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((9,), index % 61)


def resumed(rank, folder, resume, steps, seed=5):
    """What a script of Resume finds, and trains on with."""
    model, inner, optimizer = made("own", folder)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    size = dist.get_world_size()
    sampler = torch.utils.data.DistributedSampler(Numbers(), size, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(Numbers(), 2, sampler=sampler)
    torch.manual_seed(seed)
    its = ziggurat.torch.Resume(optimizer, scheduler, loader, resume=resume)
    found = {"steps": its.steps, "epoch": its.epoch, "batch": its.batch, "lr": scheduler.get_last_lr()}
    first = None
    for _ in its.epochs(1):
        for tokens in its:
            if first is None:
                first, found["drawn"] = tokens[:, 0].tolist(), torch.rand(1).item()
            if steps == 0:
                break
            torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps -= 1
        break
    optimizer.synchronize()
    optimizer.close()
    return found | {"first": first}


def test_resume_goes_on_from_what_rank_0_kept_with_random_numbers_of_each_ranks_own(tmp_path):
    folder = tmp_path / "state"
    on_ranks(2, resumed, folder, "auto", 6)
    # 6 batches of 2 ranks are 12, 4 of each of 3 ranks. Killed before its first step, and again.
    every = [on_ranks(3, resumed, folder, resume, 0) for resume in ("reshard", "auto", "reshard")]
    for found in every:
        for rank, its in enumerate(found):
            assert (its["steps"], its["epoch"], its["batch"]) == (6, 0, 4)
            assert its["lr"] == [1e-3 * 0.5**3]
            assert its["first"] == [24 + rank, 27 + rank]
        assert len({its["drawn"] for its in found}) == 3
        assert found == every[0]
    for its in on_ranks(3, resumed, folder, "auto", 2):
        assert its["steps"] == 6
    assert [its["steps"] for its in on_ranks(3, resumed, folder, "auto", 0)] == [8, 8, 8]


class Seeded(Numbers):
    """Numbers with the seed of the worker that has loaded them."""

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        return super().__getitem__(index), 0 if worker is None else worker.seed


def shuffled(rank, folder, resume, steps, seeds):
    """The batches of a loader without DistributedSampler, and the seeds of its workers."""
    model, _, optimizer = made("own", folder)
    own = None if seeds is None else torch.Generator().manual_seed(seeds[rank])
    torch.manual_seed(100 + rank)
    loader = torch.utils.data.DataLoader(
        Seeded(), 2, shuffle=True, generator=own, num_workers=1 if own is None else 0
    )
    its = ziggurat.torch.Resume(optimizer, loader=loader, resume=resume)
    batches = []
    for _ in its.epochs(1):
        for tokens, workers in its:
            batches.append((tokens[:, 0].tolist(), workers.tolist()))
            if len(batches) > steps:
                break
            torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    optimizer.synchronize()
    optimizer.close()
    return batches


@pytest.mark.parametrize("seeds", [None, (1, 2, 3), (7, 7, 7)], ids=["default", "own", "alike"])
def test_after_a_division_each_rank_draws_its_own_order_and_seeds_of_workers(seeds, tmp_path):
    folder = tmp_path / "state"
    before, *_ = on_ranks(2, shuffled, folder, "auto", 6, seeds)
    first, second = (
        [batches[0] for batches in on_ranks(3, shuffled, folder, resume, 0, seeds)]
        for resume in ("reshard", "auto")
    )
    assert first == second
    assert first[0] == before[4]  # 6 batches of 2 ranks are 4 of 3
    if seeds == (7, 7, 7):  # as the script wants it
        assert first[1] == first[2] == first[0]
    else:
        assert len({tuple(tokens) for tokens, _ in first}) == 3
    if seeds is None:
        assert len({worker for _, workers in first for worker in workers}) == 3
    # What is drawn is kept.
    *_, last = on_ranks(3, shuffled, folder, "auto", 2, seeds)
    again = on_ranks(3, shuffled, folder, "auto", 0, seeds)
    assert again[2][0] == last[2]


def opens_like(rank, folder, ways):
    _, _, optimizer = made("own", folder)
    with pytest.raises(ziggurat.ZigguratError) as error:
        optimizer.open(resume=ways[rank])
    return str(error.value)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (("reshard", "auto"), 'rank 0 gives resume="reshard", but rank 1 gives resume="auto"'),
        (("never", "reshard"), 'rank 0 gives resume="never", but rank 1 gives resume="reshard"'),
        ((True, False), 'rank 0 gives resume="auto", but rank 1 gives resume=False'),
    ],
)
def test_ranks_that_resume_in_different_ways_are_told_so_at_once(ways, words, tmp_path):
    for said in on_ranks(2, opens_like, tmp_path / "state", ways):
        assert words in said


def test_the_command_reads_the_store_as_whole_parameters(tmp_path):
    if "ZIGGURAT_COMMAND" not in os.environ:
        pytest.skip("ZIGGURAT_COMMAND does not name the command")
    folder = tmp_path / "state"
    first, *_ = on_ranks(2, opened, "own", folder, "fp32", False, 3)

    def said_by(*words):
        done = subprocess.run(
            [os.environ["ZIGGURAT_COMMAND"], "ckpt", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "pieces of 7 whole parameters" in said_by("inspect", folder)
    said_by("verify", folder)
    said_by("save", folder, tmp_path / "saved")
    said_by("verify", tmp_path / "saved")

    def loaded(_):
        _, inner, optimizer = made("alone", tmp_path / "other")
        ziggurat.torch.load_checkpoint(tmp_path / "saved", optimizer, inner)
        state = state_of(inner, optimizer)
        optimizer.close()
        return state

    assert_same(on_ranks(1, loaded)[0], first)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
