# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed's engine on two ranks, beside one rank that has both ranks' batches.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import datetime
import sys

try:
    import pytest
    import torch
    from deepspeed_runs import loss_of
    from rank_runs import on_ranks
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import ziggurat.deepspeed as deepspeed
from ziggurat.deepspeed import _meeting

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
}
BF16 = {"bf16": {"enabled": True}}


def on_drive(path) -> dict:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(61, (4, 9), generator=generator)


def both_batches(step: int) -> torch.Tensor:
    return torch.cat([batch(rank, step) for rank in range(2)])


def made(**more):
    return deepspeed.initialize(model=small_model(), config=CONFIG | more)[0]


def train(engine, tokens_of, first: int, last: int) -> list[tuple]:
    rows = []
    for step in range(first, last):
        loss = loss_of(engine, tokens_of(step))
        engine.backward(loss)
        engine.step()
        rows.append((loss.item(), engine.get_global_grad_norm(), engine.get_lr()[0]))
    return rows


def bits(engine) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        return [param.detach().clone() for param in engine.module.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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

    def load(rank):
        engine = made()
        engine.load_checkpoint(tmp_path)
        return engine.optimizer.state_dict()["state"]

    saved = on_ranks(2, save)[0]
    for ranks in (1, 3):
        loaded = on_ranks(ranks, load)[0]
        for index, state in saved.items():
            for name, value in state.items():
                assert torch.equal(loaded[index][name], value), (ranks, index, name)


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
