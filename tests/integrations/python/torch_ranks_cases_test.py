# SPDX-License-Identifier: Apache-2.0
"""What scripts do with gradients and parameters among ranks, and what is refused.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

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

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ziggurat
import ziggurat.torch
from ziggurat import InvalidArgument


class Branches(torch.nn.Module):
    """Each rank may take another branch; the last is taken by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        self.head = torch.nn.Linear(5, 1)

    def forward(self, values, branch):
        return self.head(torch.relu(self.branches[branch](values)))


def batch(rank, step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def branched(rank, model, inner, optimizer, steps=4):
    norms = []
    for step in range(steps):
        model(batch(rank, step), (rank + step) % 3 if step else rank).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach().clone() for p in inner.parameters()]


def close(one, other):
    norms, params = one
    assert norms == pytest.approx(other[0], rel=1e-5)
    for a, b in zip(params, other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_use_other_parameters_than_each_other(world):
    def run(rank):
        plain, ours, own = Branches(), Branches(), Branches()
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        ziggurat_ddp = DistributedDataParallel(ours, find_unused_parameters=True)
        group = dist.group.WORLD
        return (
            branched(rank, ddp, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
            branched(
                rank,
                ziggurat_ddp,
                ours,
                ziggurat.torch.AdamW(ours.parameters(), lr=1e-2, model=ziggurat_ddp),
            ),
            branched(rank, own, own, ziggurat.torch.AdamW(own.parameters(), lr=1e-2, group=group)),
        )

    for plain, *ours in on_ranks(world, run):
        for own in ours:
            close(own, plain)
        untouched = Branches().branches[3].weight
        assert torch.equal(ours[0][1][6], untouched) and torch.equal(ours[1][1][6], untouched)


def test_a_model_that_is_evaluated_before_ddp_wraps_it_trains_on_all_ranks():
    def run(rank):
        plain, ours = Branches(), Branches()
        optimizer = ziggurat.torch.AdamW(ours.parameters(), lr=1e-2, model=ours)
        with torch.no_grad():
            ours(batch(rank, 0), 0)
        ddp, wrapped = (
            DistributedDataParallel(model, find_unused_parameters=True) for model in (plain, ours)
        )
        return (
            branched(rank, ddp, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
            branched(rank, wrapped, ours, optimizer),
        )

    for plain, ours in on_ranks(2, run):
        close(ours, plain)


class Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, values, _):
        values = values.clone().requires_grad_()
        for block in self.blocks:
            values = torch.relu(checkpoint(block, values, use_reentrant=True))
        return values


def test_reentrant_checkpointing():
    def run(rank):
        plain, ours, own, told = (Recomputed() for _ in range(4))
        ddp = DistributedDataParallel(plain, static_graph=True)
        wrapped = DistributedDataParallel(ours, static_graph=True)
        group = dist.group.WORLD
        results = [
            branched(rank, ddp, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
            branched(
                rank,
                wrapped,
                ours,
                ziggurat.torch.AdamW(ours.parameters(), lr=1e-2, model=wrapped),
            ),
            branched(rank, own, own, ziggurat.torch.AdamW(own.parameters(), lr=1e-2, group=group)),
        ]
        optimizer = ziggurat.torch.AdamW(told.parameters(), lr=1e-2, group=group)
        sent = []
        send = optimizer._sharing.feeder.exchange.send
        optimizer._sharing.feeder.exchange.send = lambda *given: (sent.append(1), send(*given))
        for step in range(4):
            optimizer.backward(told(batch(rank, step), 0).square().mean())
            torch.nn.utils.clip_grad_norm_(told.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return results, [p.detach().clone() for p in told.parameters()], len(sent)

    for (plain, *ours), told, sent in on_ranks(2, run):
        for own in ours:
            close(own, plain)
        assert all(torch.equal(a, b) for a, b in zip(told, ours[1][1], strict=True))
        assert sent == 4  # one bucket a step, however many backwards are in it


def frozen_and_thawed(rank, model, inner, optimizer):
    inner.head.requires_grad_(False)
    first = branched(rank, model, inner, optimizer, steps=2)
    inner.head.requires_grad_(True)
    return first, branched(rank, model, inner, optimizer, steps=2)


def test_parameters_that_are_frozen_for_a_while_stay_as_they_are():
    def run(rank):
        def alike(model):
            model.forward = lambda values, _: Branches.forward(model, values, 0)
            return model

        # Which DDP does not know: here the hooks of the optimizer exchange gradients.
        own = alike(Branches())
        optimizer = ziggurat.torch.AdamW(own.parameters(), lr=1e-2, group=dist.group.WORLD)
        return frozen_and_thawed(rank, own, own, optimizer)

    head = Branches().head.weight
    for first, then in on_ranks(2, run):
        assert torch.equal(first[1][8], head)
        assert not torch.equal(then[1][8], head)


def test_parameters_that_are_frozen_at_first_are_trained_with_the_mean_of_all_ranks():
    """From the first gradient on, which comes to a parameter that no hook was on."""

    def run(rank, way):
        model, told = Branches(), {}
        model.forward = lambda values, _: Branches.forward(model, values, 0)
        wrapped = model
        if way in ("ddp", "torch"):  # DDP takes what is trained when it wraps
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        told = {"ddp": {"model": wrapped}, "group": {"group": dist.group.WORLD}}.get(way, {})
        model.head.requires_grad_(False)
        adamw = torch.optim.AdamW if way == "torch" else ziggurat.torch.AdamW
        optimizer = adamw(model.parameters(), lr=1e-2, **told)
        first = branched(rank, wrapped, model, optimizer, steps=2)
        model.head.requires_grad_(True)
        return first, branched(rank, wrapped, model, optimizer, steps=2)

    expected = on_ranks(2, run, "torch")[0]
    for way in ("ddp", "group"):
        for found in on_ranks(2, run, way):
            for ours, theirs in zip(found, expected, strict=True):
                close(ours, theirs)


def test_so_they_are_where_nothing_was_trained_before():
    def run(rank):
        model = torch.nn.Linear(5, 2)
        model.weight.requires_grad_(False), model.bias.requires_grad_(False)
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=1.0, group=dist.group.WORLD)
        model.requires_grad_(True)
        before = model.bias.detach().clone()
        (model(batch(rank, 0)).sum() * (rank + 1)).backward()
        optimizer.step()
        return before - model.bias.detach()

    for moved in on_ranks(2, run):
        torch.testing.assert_close(moved, torch.full((2,), 9.0))  # the mean of 6 and 12


@pytest.mark.parametrize("steps_before", [2, 0])
def test_what_was_frozen_when_ddp_wrapped_the_model_is_not_trained_by_each_rank_alone(steps_before):
    def run(rank):
        model = Branches()
        model.forward = lambda values, _: Branches.forward(model, values, 0)
        model.head.requires_grad_(False)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        branched(rank, wrapped, model, optimizer, steps=steps_before)
        model.head.requires_grad_(True)
        with pytest.raises(
            ziggurat.InvalidArgument, match="'head.weight' was frozen when the model was wrapped"
        ):
            branched(rank, wrapped, model, optimizer, steps=1)
        return True

    assert on_ranks(2, run) == [True, True]


def test_gradients_are_read_and_written_by_all_ranks_alike():
    def run(rank):
        model = small_model()
        optimizer = ziggurat.torch.SGD(model.parameters(), lr=1.0, group=dist.group.WORLD)
        tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(rank))
        torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
        weight = model[2].weight
        read = weight.grad.clone()
        weight.grad.clamp_(-1e-3, 1e-3)
        model[5].weight.grad = torch.ones_like(model[5].weight)
        model[4].weight.grad.mul_(2.0)
        doubled = model[4].weight.grad.clone()
        before = [p.detach().clone() for p in (weight, model[5].weight, model[4].weight)]
        optimizer.step()
        moved = [
            was - p.detach()
            for was, p in zip(before, (weight, model[5].weight, model[4].weight), strict=True)
        ]
        local = small_model()
        torch.nn.functional.cross_entropy(local(tokens[:, :8]), tokens[:, 8]).backward()
        return read, local[2].weight.grad, moved, doubled

    results = on_ranks(2, run)
    mean = (results[0][1] + results[1][1]) / 2
    for read, _, moved, doubled in results:
        torch.testing.assert_close(read, mean, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(moved[0], mean.clamp(-1e-3, 1e-3), rtol=0, atol=1e-6)
        torch.testing.assert_close(moved[1], torch.ones(61, 130), rtol=0, atol=1e-6)
        torch.testing.assert_close(moved[2], doubled, rtol=0, atol=1e-6)


def scaled(rank, model, optimizer, overflow_on):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(5):
        tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(9 * step + rank))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8])
        if step == 2 and rank == overflow_on:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in model.parameters()]


def test_an_overflow_on_one_rank_skips_the_step_of_all():
    def run(rank):
        plain, own = small_model(), small_model()
        ddp = DistributedDataParallel(plain)
        group = dist.group.WORLD
        return (
            scaled(rank, ddp, torch.optim.AdamW(plain.parameters(), lr=1e-3), 1),
            scaled(rank, own, ziggurat.torch.AdamW(own.parameters(), lr=1e-3, group=group), 1),
        )

    for plain, own in on_ranks(2, run):
        assert plain[0] == own[0]
        assert plain[0][2] < plain[0][1]
        for a, b in zip(plain[1], own[1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_hybrid_sharding_trains_as_torch_does():
    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        results = []
        for kind in (torch.optim.AdamW, ziggurat.torch.AdamW):
            model = small_model()
            for layer in (model[0], model[2], model[5]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            where = {} if kind is torch.optim.AdamW else {"model": model}
            optimizer = kind(model.parameters(), lr=1e-3, **where)
            norms = []
            for step in range(3):
                tokens = torch.randint(
                    61, (4, 9), generator=torch.Generator().manual_seed(9 * step + rank)
                )
                torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                norms.append(float(norm.full_tensor()))
                optimizer.step()
                optimizer.zero_grad()
            results.append((norms, [p.full_tensor() for p in model.parameters()]))
        return results

    for plain, own in on_ranks(4, run):
        close(own, plain)


def test_fsdp2_gathers_and_reduces_as_it_likes():
    """Whatever its units do ahead, the bits are the same, and those of one sum in fp32."""

    def run(rank, world, kind):
        model = small_model().bfloat16()
        layers = [model[0], model[2], model[5]]
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        if kind == "ahead":
            layers[0].set_modules_to_forward_prefetch(layers[1:])
            layers[2].set_modules_to_backward_prefetch(layers[:2])
        if kind == "asynchronously":
            for unit in (*layers, model):
                unit._set_unshard_async_op(True)
        if kind == "by hand":
            for layer in layers:
                layer.set_reshard_after_forward(False)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=model)
        grads = []
        for step in range(3):
            tokens = torch.randint(
                61, (4, 9), generator=torch.Generator().manual_seed(9 * step + rank)
            )
            if kind == "by hand":
                handles = [layer.unshard(async_op=True) for layer in layers]
                [handle.wait() for handle in handles]
            torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return grads, [p.full_tensor() for p in model.parameters()]

    def mean_of_ranks(rank, world):
        """The first step's gradients of each rank's batch alone, in one process."""
        model, total = small_model().bfloat16(), None
        for other in range(world):
            tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(other))
            torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
            own = [p.grad.float() for p in model.parameters()]
            total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
            model.zero_grad()
        return [(sum_ / world).bfloat16() for sum_ in total]

    def all_kinds(rank):
        kinds = ("plain", "ahead", "asynchronously", "by hand")
        return [run(rank, 3, kind) for kind in kinds], mean_of_ranks(rank, 3)

    for (first, *others), mean in on_ranks(3, all_kinds):
        assert all(torch.equal(a, b) for a, b in zip(first[0][0], mean, strict=True))
        for other in others:
            for one, another in zip((*first[0], first[1]), (*other[0], other[1]), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, another, strict=True))


def test_fsdp2_keeps_what_somebody_has_it_exchange_with():
    class Counting:
        def __init__(self, carries):
            self.carries, self.calls = carries, 0

        def allocate(self, *size, **of):
            return self.carries.allocate(*size, **of)

        def __call__(self, *args, **how):
            self.calls += 1
            return self.carries(*args, **how)

    def run(rank):
        model = small_model()
        for layer in (model[0], model[2], model[5]):
            fully_shard(layer)
        fully_shard(model)
        own, ours = [
            layer._get_fsdp_state()._fsdp_param_groups[0] for layer in (model[0], model[2])
        ]
        before = ours._all_gather_comm
        counting = Counting(own._all_gather_comm)
        model[0].set_custom_all_gather(counting)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=model)
        model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
        optimizer.step()
        replaced = ours._all_gather_comm is not before
        optimizer.close()
        return counting.calls, replaced, ours._all_gather_comm is before

    for calls, replaced, put_back in on_ranks(2, run):
        assert calls >= 1 and replaced and put_back


@pytest.mark.parametrize("wrapped", ["ddp", "own", "own in bf16", "fsdp2"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_ranks_exchange_takes_no_more_than_planned(world, wrapped, monkeypatch, tmp_path):
    """In many buckets, and added to without no_sync()."""
    monkeypatch.setattr("ziggurat._exchange.exchange.BUCKET_BYTES", 4096)
    monkeypatch.setattr("ziggurat._exchange.param_gather.BUCKET_BYTES", 4096)

    def run(rank):
        model, where = small_model(), {}
        if wrapped == "ddp":
            called = DistributedDataParallel(model, bucket_cap_mb=4096 / 2**20)
            where["model"] = called
        elif wrapped.startswith("own"):
            called, where["group"] = model, dist.group.WORLD
            if wrapped == "own in bf16":
                where["reduce_dtype"] = torch.bfloat16
        else:
            called = model
            for layer in (model[0], model[2], model[5]):
                fully_shard(layer)
            fully_shard(model)
            where["model"] = model
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-3, placement=f"nvme:{tmp_path}/state", **where
        )
        said = []
        for _ in range(4):
            for _ in range(3):
                called(torch.full((2, 8), rank)).sum().backward()
                said.append(optimizer.figures())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [(one["exchange_bytes"], one["exchange_planned_bytes"]) for one in said if one]

    for said in on_ranks(world, run):
        assert all(0 < held <= planned for held, planned in said), said
        assert len({planned for _, planned in said}) == 1
        # In one bucket, all of the gradients would be under way at once.
        assert said[0][1] < 6 * sum(p.nbytes for p in small_model().parameters())


def refused(rank, call):
    with pytest.raises(InvalidArgument) as refusal:
        call()
    return str(refusal.value)


def test_ddp_without_our_hook_is_refused():
    def run(rank):
        model = DistributedDataParallel(small_model())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(61, (4, 9))
        torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]).backward()
        return refused(rank, optimizer.step)

    for words in on_ranks(2, run):
        assert "DistributedDataParallel" in words and "model=model" in words


def test_ranks_that_begin_with_other_parameters_are_refused():
    def run(rank):
        model = small_model()
        with torch.no_grad():
            model[5].bias += rank
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, group=dist.group.WORLD)
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        return refused(rank, optimizer.step)

    for words in on_ranks(3, run):
        assert "the parameters of rank 1 differ from those of rank 0" in words


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_of_gradients_that_were_not_exchanged_is_refused(wrapped):
    def run(rank):
        model = small_model()
        if wrapped:
            ddp = DistributedDataParallel(model)
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=ddp)
            quiet = ddp.no_sync
        else:
            ddp = model
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, group=dist.group.WORLD)
            quiet = optimizer.no_sync
        tokens = torch.zeros(1, 8, dtype=torch.long)
        ddp(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with quiet():
            ddp(tokens).sum().backward()
        return refused(rank, optimizer.step)

    for words in on_ranks(2, run):
        assert "was not exchanged" in words and "no_sync()" in words


def test_a_group_whose_parameters_are_all_on_other_ranks_is_trained():
    """Small parameters are not cut: rank 0 has those of the last group, and rank 1 none."""

    def run(rank):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        large, *small = model.parameters()
        groups = [{"params": [large]}, {"params": small, "lr": 1e-2}]
        optimizer = ziggurat.torch.AdamW(groups, lr=1e-3, group=dist.group.WORLD)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return [(p - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True)]

    one, other = on_ranks(2, run)
    assert one == other
    assert one == pytest.approx([1e-3, 1e-2, 1e-2, 1e-2], rel=2e-2)


def test_each_rank_holds_the_state_of_its_slices_alone():
    def run(rank):
        model = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, group=dist.group.WORLD)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        return optimizer.figures()["host_used_bytes"]

    (alone,) = on_ranks(1, run)
    for bytes_ in on_ranks(2, run):
        assert bytes_ == pytest.approx(alone / 2, rel=0.05)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
