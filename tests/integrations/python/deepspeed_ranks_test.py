# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed's engine on two ranks, beside one rank that has both ranks' batches.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import ctypes
import datetime
import os
import resource
import shutil
import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from deepspeed_rank_runs import (
        BF16,
        CONFIG,
        assert_same_state,
        batch,
        bits,
        both_batches,
        made,
        on_drive,
        same,
        states_loaded_by,
        train,
    )
    from deepspeed_runs import loss_of
    from rank_runs import on_ranks
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
import ziggurat.torch
from ziggurat.deepspeed import _meeting

_M_MMAP_THRESHOLD = -3  # malloc.h


@pytest.mark.parametrize(("drive", "bf16"), [(False, False), (True, True)])
def test_two_ranks_are_one_with_both_batches(tmp_path, drive, bf16):
    more = (on_drive(tmp_path) if drive else {}) | (BF16 if bf16 else {})

    def run(rank):
        engine = made(**more)
        rows = train(engine, lambda step: batch(rank, step), 0, 12)
        assert engine.train_batch_size() == 24
        assert engine.global_samples == 4 * 24
        result = rows, bits(engine)
        engine.destroy()
        return result

    (rows, ours), (other_rows, others) = on_ranks(2, run)
    assert same(ours, others)

    def run_alone(rank):
        whole = made(train_micro_batch_size_per_gpu=8, **(BF16 if bf16 else {}))
        return train(whole, both_batches, 0, 12), bits(whole)

    ((expected, plain_bits),) = on_ranks(1, run_alone)
    # fp32: the mean of two means is summed in another order. bf16: each rank rounds its gradients.
    tolerance = 2e-2 if bf16 else 1e-4
    for one, other, plain in zip(rows, other_rows, expected, strict=True):
        assert one[1:] == other[1:]
        assert (one[0] + other[0]) / 2 == pytest.approx(plain[0], rel=tolerance)
        assert one[2] == plain[2]
        if plain[1] is not None:
            assert one[1] == pytest.approx(plain[1], rel=tolerance)
    for one, plain in zip(ours, plain_bits, strict=True):
        assert (one.float() - plain.float()).abs().mean() < (2e-3 if bf16 else 1e-5)


def test_an_optimizer_of_ours_trains_the_ranks_that_it_was_made_for():
    config = {key: value for key, value in CONFIG.items() if key not in ("optimizer", "scheduler")}

    def engine_of(model, **more):
        client = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, **more)
        return deepspeed.initialize(model=model, optimizer=client, config=config)[0]

    def run(rank):
        words = "divides its state among 1 ranks, but 2 ranks train the model.*group="
        with pytest.raises(ziggurat.InvalidArgument, match=words):
            engine_of(small_model())
        engine = engine_of(small_model(), group=dist.group.WORLD)
        named = made(scheduler=None)
        for one in (engine, named):
            for step in range(6):
                one.backward(loss_of(one, batch(rank, step)))
                one.step()
        return bits(engine), bits(named)

    (one, named), (other, _) = on_ranks(2, run)
    assert same(one, other) and same(one, named)


def test_all_begin_with_the_parameters_of_rank_0():
    def run(rank):
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 4)
        engine = deepspeed.initialize(model=model, config=CONFIG | {"scheduler": None})[0]
        return bits(engine)

    torch.manual_seed(0)
    first = [param.detach() for param in torch.nn.Linear(4, 4).parameters()]
    for found in on_ranks(2, run):
        assert same(found, first)


def test_a_rank_whose_gradients_are_not_finite_leaves_the_step_out_on_all():
    def run(rank):
        engine = made(gradient_accumulation_steps=1, **BF16)
        found = []
        for step in range(3):
            factor = float("inf") if (rank, step) == (1, 1) else 1.0
            engine.backward(loss_of(engine, batch(rank, step)) * factor)
            engine.step()
            found.append(engine.was_step_applied())
        return found, bits(engine)

    (one, ours), (other, others) = on_ranks(2, run)
    assert one == other == [True, False, True]
    assert same(ours, others)


def test_each_rank_has_its_share_of_the_data():
    def run(rank):
        data = torch.utils.data.TensorDataset(torch.arange(24))
        loader = deepspeed.initialize(model=small_model(), training_data=data, config=CONFIG)[2]
        return torch.cat([rows for (rows,) in loader])

    one, other = on_ranks(2, run)
    assert len(one) == len(other) == 12
    assert sorted([*one.tolist(), *other.tolist()]) == list(range(24))


@pytest.mark.parametrize(("drive", "saved_by"), [(False, [0]), (True, [0, 1])])
def test_a_job_goes_on_with_the_same_bits(tmp_path, drive, saved_by):
    """Saved by both ranks, or by rank 0 alone."""
    more = BF16 | (on_drive(tmp_path / "drive") if drive else {})

    def straight(rank):
        engine = made(**more)
        train(engine, lambda step: batch(rank, step), 0, 12)
        result = bits(engine)
        engine.destroy()
        return result

    def stopped(rank):
        _meeting._PATIENCE = datetime.timedelta(seconds=10 if len(saved_by) == 2 else 0.5)
        engine = made(**more)
        train(engine, lambda step: batch(rank, step), 0, 6)
        if rank in saved_by:
            engine.save_checkpoint(tmp_path / "out", client_state={"step": 6})
        train(engine, lambda step: batch(rank, step), 6, 9)  # to go back from
        engine.destroy()

    def resumed(rank):
        engine = made(**more)
        _, found = engine.load_checkpoint(tmp_path / "out")
        train(engine, lambda step: batch(rank, step), found["step"], 12)
        result = bits(engine)
        engine.destroy()
        return result

    expected = on_ranks(2, straight)
    on_ranks(2, stopped)
    for found, one in zip(on_ranks(2, resumed), expected, strict=True):
        assert same(found, one)


def test_other_ranks_go_on_from_what_two_have_saved(tmp_path):
    def save(rank):
        engine = made()
        train(engine, lambda step: batch(rank, step), 0, 6)
        engine.save_checkpoint(tmp_path)
        return engine.optimizer.state_dict()["state"]

    saved = on_ranks(2, save)[0]
    for ranks in (1, 3):
        assert_same_state(states_loaded_by(ranks, tmp_path), saved)


def saved_by_rank_0(folder, **more):
    """The state behind six steps of two ranks, of which rank 0 alone saves."""

    def save(rank):
        _meeting._PATIENCE = datetime.timedelta(seconds=0.5)
        engine = made(**more)
        train(engine, lambda step: batch(rank, step), 0, 6)
        if rank == 0:
            engine.save_checkpoint(folder)
        state = engine.optimizer.state_dict()["state"]
        dist.barrier()
        engine.destroy()
        return state

    return on_ranks(2, save)[0]


@pytest.mark.parametrize("state_format", ["bf16-moments", "8bit"])
def test_what_rank_0_saves_alone_is_what_all_have(tmp_path, state_format):
    more = BF16 | {"state_format": state_format}
    saved = saved_by_rank_0(tmp_path, **more)
    for ranks in (1, 2) if state_format == "8bit" else (3,):
        # Blocks of 8 bits are those of what a rank has: they go on as the values themselves.
        other = more | ({"state_format": "fp32"} if state_format == "8bit" else {})
        assert_same_state(states_loaded_by(ranks, tmp_path, **other), saved)


def test_moments_of_8_bits_of_one_rank_are_taken_over_by_two(tmp_path):
    more = BF16 | {"state_format": "8bit", "train_micro_batch_size_per_gpu": 8}

    def save(rank):
        engine = made(**more)
        train(engine, both_batches, 0, 6)
        engine.save_checkpoint(tmp_path)
        return engine.optimizer.state_dict()["state"]

    (saved,) = on_ranks(1, save)
    assert_same_state(states_loaded_by(2, tmp_path, **BF16), saved)


def test_a_tag_that_is_there_is_replaced_by_rank_0_alone_and_by_all(tmp_path):
    def run(rank):
        _meeting._PATIENCE = datetime.timedelta(seconds=2)
        engine = made()
        for step, saves in enumerate(([0, 1], [0], [0, 1])):
            train(engine, lambda step: batch(rank, step), 3 * step, 3 * step + 3)
            dist.barrier()
            if rank in saves:
                engine.save_checkpoint(tmp_path, tag="newest")
            dist.barrier()
            if rank == 0:
                other = sorted(there.name for there in (tmp_path / "newest").iterdir())
                assert len(other) == 2 and other[1].startswith(f"ziggurat_state_{step + 1}_")
        again = made()
        again.load_checkpoint(tmp_path)
        assert same(bits(again), bits(engine))

    on_ranks(2, run)


def test_with_storage_of_its_own_the_first_rank_of_every_host_saves_all(tmp_path):
    """Three ranks on two hosts, of which each has a folder of that name."""
    more = {"checkpoint": {"use_node_local_storage": True}, "train_micro_batch_size_per_gpu": 4}

    def run(rank):
        host, os.environ["LOCAL_RANK"] = (0, "0") if rank == 0 else (1, str(rank - 1))
        folder = tmp_path / f"host-{host}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        engine = made(**more)
        train(engine, lambda step: batch(rank, step), 0, 6)
        engine.save_checkpoint("out", client_state={"host": host})
        dist.barrier()
        expected = engine.optimizer.state_dict()["state"]
        other = made(**more)
        _, found = other.load_checkpoint("out")
        assert found == {"host": host}
        assert_same_state(other.optimizer.state_dict()["state"], expected)
        dist.barrier()
        return expected

    expected = on_ranks(3, run)[0]
    for host in range(2):  # each has all
        assert_same_state(states_loaded_by(1, tmp_path / f"host-{host}" / "out"), expected)


def test_tags_that_differ_are_one_checkpoint_or_none(tmp_path):
    def run(rank):
        engine = made()
        train(engine, lambda step: batch(rank, step), 0, 3)
        engine.save_checkpoint(tmp_path, tag=f"of-{rank}")
        assert [there.name for there in tmp_path.iterdir() if there.is_dir()] == ["of-0"]
        engine = made(checkpoint={"tag_validation": "Fail"})
        train(engine, lambda step: batch(rank, step), 0, 6)
        with pytest.raises(ziggurat.ZigguratError, match='"other-1" on rank 1'):
            engine.save_checkpoint(tmp_path, tag=f"other-{rank}")
        dist.barrier()
        again = made()
        again.load_checkpoint(tmp_path)
        return again.global_steps

    assert on_ranks(2, run) == [1, 1]
    assert sorted(there.name for there in tmp_path.iterdir()) == ["latest", "of-0"]


def test_a_rank_that_cannot_save_keeps_no_other_waiting(tmp_path):
    def run(rank):
        engine = made()
        train(engine, lambda step: batch(rank, step), 0, 3)
        engine.save_checkpoint(tmp_path, tag="newest")
        before = engine.optimizer._opened[0].settle
        if rank == 1:
            engine.optimizer._opened[0].settle = lambda: 1 / 0
        train(engine, lambda step: batch(rank, step), 3, 6)
        with pytest.raises((ZeroDivisionError, ziggurat.Unavailable)):
            engine.save_checkpoint(tmp_path, tag="newest")
        engine.optimizer._opened[0].settle = before
        dist.barrier()
        again = made()
        again.load_checkpoint(tmp_path)
        assert again.global_steps == 1
        train(engine, lambda step: batch(rank, step), 6, 9)
        engine.save_checkpoint(tmp_path, tag="newest")
        again.load_checkpoint(tmp_path)
        assert same(bits(again), bits(engine))

    on_ranks(2, run)


def test_a_damaged_byte_is_refused_on_all_ranks_and_what_they_have_stays(tmp_path):
    def save(rank):
        engine = made()
        train(engine, lambda step: batch(rank, step), 0, 3)
        engine.save_checkpoint(tmp_path, tag="newest")
        moment = engine.optimizer.state_dict()["state"][1]["exp_avg"]
        return moment.reshape(-1)[-100:].clone()

    wanted = on_ranks(2, save)[0].numpy().tobytes()
    (state,) = (tmp_path / "newest").glob("ziggurat_state_*/step-*")
    (file,) = (shard for shard in state.glob("*.safetensors") if wanted in shard.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(wanted)] ^= 1
    file.write_bytes(content)

    def run(rank):
        engine, plain = made(), made()
        for one in (engine, plain):
            train(one, lambda step: batch(rank, step), 0, 6)
        with pytest.raises(ziggurat.ZigguratError) as refused:
            engine.load_checkpoint(tmp_path)
        engine.module.load_state_dict(plain.module.state_dict())
        found, expected = (one.optimizer.state_dict()["state"] for one in (engine, plain))
        assert_same_state(found, expected)
        return str(refused.value)

    assert any(file.name in said for said in on_ranks(2, run))


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_and_loading_take_memory_for_a_few_chunks(ranks, tmp_path):
    """Of a state of 1152 MiB on NVMe, in sixteen parameters."""
    rows, columns, count = 768, 8192, 16
    # Among ranks each one's slices of the parameters are in it too.
    slices = rows * columns * count * 2 // ranks if ranks > 1 else 0
    config = CONFIG | BF16 | on_drive(tmp_path / "drive") | {"host_memory": (64 << 20) + slices, "threads": 1}

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def engine_of():
        zeros = (torch.zeros(rows, columns, dtype=torch.bfloat16) for _ in range(count))
        model = torch.nn.ParameterList(torch.nn.Parameter(one) for one in zeros)
        engine = deepspeed.initialize(model=model, config=config | {"scheduler": None})[0]
        with torch.no_grad():
            for param in model:
                param.fill_(0.5)
        return engine

    def grown_by(do):
        def run(rank):
            # What is freed goes back at once: what malloc keeps differs from run to run.
            assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17) == 1
            engine = engine_of()
            before = peak()
            do(engine)
            grown = peak() - before
            engine.destroy()
            return grown

        return max(on_ranks(ranks, run))

    # The engine's own memory, which a run without a checkpoint takes too.
    opened = grown_by(lambda engine: engine.optimizer.open())

    def save(engine):
        engine.optimizer.open()
        engine.save_checkpoint(tmp_path / "out", tag="here")

    saved = grown_by(save) - opened

    def load(engine):
        engine.load_checkpoint(tmp_path / "out", tag="here")
        engine.optimizer.open()

    loaded = grown_by(load) - opened
    shards = (tmp_path / "out" / "here").glob("ziggurat_state_*/step-*/*.safetensors")
    written = sum(shard.stat().st_size for shard in shards)
    shutil.rmtree(tmp_path / "out")  # pytest keeps what it has of its newest runs
    assert written > count * rows * columns * 12
    # Two records of 6 MiB at a time, the copies of both that are written, and a little beside.
    assert saved < 2 * 2 * (6 << 20) + (8 << 20)
    # The pages of the module's file, which are no state. Beside them: what was read and is kept for
    # a neighbour, 32 MiB; the records that are made of it; and what ranks exchange parameters with.
    assert loaded < count * rows * columns * 2 + (192 << 20)


def test_gathered_parameters_give_what_one_rank_writes_to_all():
    def run(rank):
        engine = made()
        weight = engine.module[2].weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            if rank == 0:
                weight.fill_(0.25)
        train(engine, lambda step: batch(rank, step), 0, 3)
        return weight.detach().clone()

    one, other = on_ranks(2, run)
    assert torch.equal(one, other)
    assert (one - 0.25).abs().max() < 0.1


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
