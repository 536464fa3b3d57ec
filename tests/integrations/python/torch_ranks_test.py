# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch's optimizers on several ranks: DistributedDataParallel, FSDP2, and alone.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import contextlib
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ziggurat
import ziggurat.torch

_STEPS = 5


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(61, (4, 9), generator=generator)


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])


def trained(rank, model, inner, optimizer, *, accumulate=1, clip=None, no_sync=None, steps=_STEPS):
    """Losses, norms and parameters after some steps."""
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            quiet = contextlib.nullcontext() if last or no_sync is None else no_sync()
            with quiet:
                loss = loss_of(model, batch_of(rank, step * accumulate + micro)) / accumulate
                loss.backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(inner.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if isinstance(optimizer, ziggurat._optimizer.optimizer.EngineOptimizer):
        optimizer.synchronize()
    return losses, norms, [p.detach().clone() for p in inner.parameters()]


def plain_ddp(rank, **how):
    inner = small_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    sync = model.no_sync if how.pop("quiet", False) else None
    return trained(rank, model, inner, optimizer, no_sync=sync, **how)


def our_ddp(rank, placement="host", view=True, exchange="torch", **how):
    inner = small_model()
    model = DistributedDataParallel(inner, gradient_as_bucket_view=view)
    optimizer = ziggurat.torch.AdamW(
        inner.parameters(), lr=1e-3, placement=placement, model=model, exchange=exchange
    )
    sync = model.no_sync if how.pop("quiet", False) else None
    result = trained(rank, model, inner, optimizer, no_sync=sync, **how)
    optimizer.close()
    return result


def our_own(rank, placement="host", exchange="torch", **how):
    model = small_model()
    optimizer = ziggurat.torch.AdamW(
        model.parameters(),
        lr=1e-3,
        placement=placement,
        group=dist.group.WORLD,
        exchange=exchange,
    )
    sync = optimizer.no_sync if how.pop("quiet", False) else None
    result = trained(rank, model, model, optimizer, no_sync=sync, **how)
    optimizer.close()
    return result


def sharded(model, mesh=None):
    """One unit for each layer that has parameters, and one for the rest."""
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(result):
    losses, norms, params = result
    return losses, norms, [p.full_tensor() for p in params]


def plain_fsdp(rank, **how):
    model = sharded(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how.pop("quiet", None)
    return whole(trained(rank, model, model, optimizer, **how))


def our_fsdp(rank, placement="host", exchange="torch", **how):
    model = sharded(small_model())
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-3, placement=placement, model=model, exchange=exchange
    )
    how.pop("quiet", None)
    result = whole(trained(rank, model, model, optimizer, **how))
    optimizer.close()
    return result


_LOOPS = {
    "plain": {},
    "clipped": {"clip": 0.1},
    "accumulated": {"accumulate": 3, "quiet": True},
    "exchanged each time": {"accumulate": 3},
    "clipped and accumulated": {"accumulate": 2, "quiet": True, "clip": 0.1},
}


def close(one, other, atol):
    assert one[0] == pytest.approx(other[0], abs=atol)
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    for a, b in zip(one[2], other[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def same(one, other):
    return one[:2] == other[:2] and all(
        torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True)
    )


@pytest.mark.parametrize("train", [our_ddp, our_own, our_fsdp])
@pytest.mark.parametrize("world", [2, 3])
def test_bits_do_not_depend_on_placement_or_on_what_carries_them(world, train, tmp_path):
    def run(rank):
        how = {"accumulate": 2, "quiet": True, "clip": 0.1}
        return [
            train(rank, placement, exchange=exchange, **how)
            for placement, exchange in [
                ("host", "torch"),
                ("host", "ziggurat"),
                (f"nvme:{tmp_path}/torch", "torch"),
                (f"nvme:{tmp_path}/ziggurat", "ziggurat"),
            ]
        ]

    for first, *others in on_ranks(world, run):
        for other in others:
            assert same(first, other)


@pytest.mark.parametrize("loop", _LOOPS)
@pytest.mark.parametrize("world", [2, 3])
def test_ddp_trains_as_it_does_with_torchs_optimizer(world, loop):
    def run(rank):
        how = _LOOPS[loop]
        ours = our_ddp(rank, **how), our_ddp(rank, view=False, **how), our_own(rank, **how)
        return plain_ddp(rank, **how), *ours

    results = on_ranks(world, run)
    for plain, *ours in results:
        for own in ours:
            close(own, plain, atol=2e-6)
    for _, *ours in results[1:]:
        for own, first in zip(ours, results[0][1:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own[2], first[2], strict=True))


@pytest.mark.parametrize("loop", _LOOPS)
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2_trains_as_it_does_with_torchs_optimizer(world, loop):
    def run(rank):
        how = _LOOPS[loop]
        return plain_fsdp(rank, **how), our_fsdp(rank, **how)

    for plain, own in on_ranks(world, run):
        close(own, plain, atol=2e-6)


def test_fsdp2_on_one_rank_trains_as_it_does_with_torchs_optimizer(tmp_path):
    def run(rank):
        ours = our_fsdp(rank, clip=0.1), our_fsdp(rank, f"nvme:{tmp_path}/state", clip=0.1)
        return plain_fsdp(rank, clip=0.1), *ours

    ((plain, host, nvme),) = on_ranks(1, run)
    close(host, plain, atol=2e-6)
    assert same(host, nvme)


SHAPES = [(40, 50), (1, 3000), (7,), (300, 3, 5)]
ROUNDED = {
    "bf16": {"state_format": "bf16"},
    "bf16-moments": {"state_format": "bf16-moments"},
    "parameters": {"param_rounding": "stochastic"},
    "to nearest": {"state_format": "bf16", "state_rounding": "nearest"},
}


def rounded(placements, **settings):
    """What all ranks together have after four steps of gradients that do not depend on them."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def divided(values, at):
        return values if placements is None else distribute_tensor(values, mesh, [placements[at]])

    torch.manual_seed(1)
    params = [
        torch.nn.Parameter(divided(torch.randn(shape).bfloat16(), at))
        for at, shape in enumerate(SHAPES)
    ]
    if placements is None:
        settings["group"] = dist.group.WORLD
    named = [(f"w{at}", param) for at, param in enumerate(params)]
    optimizer = ziggurat.torch.AdamW(named, lr=1e-3, **settings)
    for _ in range(4):
        for at, param in enumerate(params):
            param.grad = divided(torch.randn(SHAPES[at]).bfloat16(), at)
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state_of(param) for param in params]
    found = [*params, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
    found = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    found = [one.detach().clone() for one in found]
    optimizer.close()
    return found


ROWS = [Shard(0), Shard(1), Shard(0), Shard(0)]  # of one row, what a rank has follows one another


@pytest.mark.parametrize("placements", [None, ROWS], ids=["slices", "shards"])
def test_stochastic_rounding_has_the_same_bits_on_any_number_of_ranks(placements):
    def run(rank):
        return {how: rounded(placements, **settings) for how, settings in ROUNDED.items()}

    alone, *others = (on_ranks(world, run)[0] for world in (1, 2, 3))
    for other in others:
        for how in ROUNDED:
            assert all(map(torch.equal, alone[how], other[how])), how
    assert not all(map(torch.equal, alone["bf16"], alone["to nearest"]))


COLUMNS = [Shard(0), Shard(1), Shard(0), Shard(2)]


def test_what_is_sharded_in_columns_is_rounded_to_nearest_or_refused_by_name():
    def run(rank):
        words = []
        for how in ROUNDED.keys() - {"to nearest"}:
            with pytest.raises(ziggurat.Unimplemented) as refused:
                rounded(COLUMNS, **ROUNDED[how])
            words.append(str(refused.value))
        return words, rounded(COLUMNS, **ROUNDED["to nearest"])

    (expected,) = on_ranks(1, lambda rank: rounded(COLUMNS, **ROUNDED["to nearest"]))
    for words, found in on_ranks(2, run):
        assert all(map(torch.equal, expected, found))
        for said in words:
            assert "parameter 'w3' is placed as (Shard(dim=2),)" in said
            assert 'state_rounding="nearest" and param_rounding="nearest"' in said


def test_a_store_of_columns_goes_on_to_nearest_without_being_told(tmp_path):
    def run(rank):
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        columns = [Shard(1)]

        def made(**settings):
            torch.manual_seed(1)
            whole = torch.randn(4, 6).bfloat16()
            param = torch.nn.Parameter(distribute_tensor(whole, mesh, columns))
            settings |= {"state_format": "bf16", "placement": f"nvme:{tmp_path}/state"}
            return param, ziggurat.torch.AdamW([("w", param)], lr=1e-3, **settings)

        def step(param, optimizer):
            param.grad = distribute_tensor(torch.ones(4, 6).bfloat16(), mesh, columns)
            optimizer.step()
            optimizer.synchronize()
            return param.full_tensor().detach().clone()

        param, first = made(state_rounding="nearest")
        was = step(param, first)
        first.close()
        again, then = made()
        then.open(resume=True)
        moved = step(again, then)
        then.close()
        return was, moved

    for was, moved in on_ranks(2, run):
        assert not torch.equal(was, moved)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
