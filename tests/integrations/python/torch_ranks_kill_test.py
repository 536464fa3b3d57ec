# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed ends the others, who say so; started again, all go on with the same bits.

ZIGGURAT_KILLS sets how many runs are killed in each test. Run by pytest; as a script it exits with
77 where PyTorch or pytest is missing.
"""

import os
import random
import re
import shutil
import sys
import time

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import RankProcesses
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ziggurat.torch

_KILLS = int(os.environ.get("ZIGGURAT_KILLS", "4"))
_STEPS = 60
_ENDS_WITHIN = 5.0  # seconds from the kill; a promise, so the only time that is looked at


def ddp(placement, exchange):
    model = small_model()
    wrapped = DistributedDataParallel(model)
    return (
        wrapped,
        model,
        ziggurat.torch.AdamW(
            model.parameters(), lr=1e-3, placement=placement, model=wrapped, exchange=exchange
        ),
    )


def own(placement, exchange):
    model = small_model()
    return (
        model,
        model,
        ziggurat.torch.AdamW(
            model.parameters(),
            lr=1e-3,
            placement=placement,
            model=model,
            group=dist.group.WORLD,
            exchange=exchange,
        ),
    )


def fsdp(placement, exchange):
    model = small_model()
    for layer in (model[0], model[2], model[5]):
        fully_shard(layer)
    fully_shard(model)
    return (
        model,
        model,
        ziggurat.torch.AdamW(
            model.parameters(), lr=1e-3, placement=placement, model=model, exchange=exchange
        ),
    )


def script(rank, make, exchange, store, out, told):
    """As people write it: started again, it goes on."""
    model, inner, optimizer = make(f"nvme:{store}", exchange)
    data = torch.randint(61, (_STEPS, 4, 9), generator=torch.Generator().manual_seed(rank))
    loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
    torch.manual_seed(rank)
    resume = ziggurat.torch.Resume(optimizer, None, loader)
    for _ in resume.epochs(1):
        for tokens in resume:
            tokens = tokens[0]
            noise = torch.rand(())  # each rank has random states of its own
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8]) * noise
            loss.backward()
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            told(resume.steps)
    optimizer.synchronize()
    values = inner.state_dict().values()  # of a model that is away they are copies
    torch.save([getattr(p, "to_local", lambda p=p: p)().detach() for p in values], out)
    optimizer.close()


def ends(ranks, dead, since):
    """The others end in time, and their words name who has ended, and in which call."""
    for rank, code, words in ranks.end(within=since + _ENDS_WITHIN):
        if rank == dead or code == 0:  # which had come to its end, and needed nobody any more
            continue
        assert code is not None, f"rank {rank} still ran {_ENDS_WITHIN} s after rank {dead}'s end"
        named = re.search(rf"rank {dead}\b", words)
        call = re.search(r"all.to.all|all.gather|all_reduce|barrier|step", words)
        assert named and call, f"rank {rank} ended with {code}:\n{words[-3000:]}"


@pytest.mark.parametrize(
    ("world", "make", "exchange"),
    [(2, ddp, "torch"), (3, own, "ziggurat"), (2, fsdp, "torch")],
)
def test_a_killed_rank_ends_the_others_and_nothing_is_lost(world, make, exchange, tmp_path):
    generator = random.Random(int(os.environ.get("ZIGGURAT_SEED", "1")))
    whole = str(tmp_path / "whole")
    with RankProcesses(world, script, make, exchange, f"{whole}-store", whole) as ranks:
        ranks.finish()
    store, parts, kills = f"{tmp_path}/store", str(tmp_path / "parts"), 0
    while kills < _KILLS:
        finished = False
        while not finished and kills < _KILLS:
            with RankProcesses(world, script, make, exchange, store, parts) as ranks:
                begun = ranks.wait_for_a_step()
                time.sleep(generator.random() * 0.1)
                dead = generator.randrange(world)
                finished = not begun or not ranks.kill(dead)
                if not finished:
                    ends(ranks, dead, time.monotonic())
                    kills += 1
                else:
                    ranks.finish()
        if not finished:
            with RankProcesses(world, script, make, exchange, store, parts) as ranks:
                ranks.finish()
        for rank in range(world):
            for a, b in zip(
                torch.load(f"{whole}-{rank}"), torch.load(f"{parts}-{rank}"), strict=True
            ):
                assert torch.equal(a, b)
        shutil.rmtree(store)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
