# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 on two ranks: parameters stay whole for now, and what streams() will let them do once it
is asked for has the bits of whole ones.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from deepspeed_stage3 import WIDTH, bits, config, made, same
    from rank_runs import on_ranks
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.deepspeed as deepspeed
from ziggurat._streaming import is_away
from ziggurat.deepspeed import _streamed
from ziggurat.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
)


def train(engine, rank, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + 10 * step + rank)
        loss = engine(torch.randn(8, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(rank, folder, param, state, stage, streams):
    """What training, the calls and a checkpoint find, and whether parameters were away."""
    if streams:
        _streamed.streams = lambda config, ranks: config.zero_stage == 3
    settings = config(folder, param, state, stage=stage, more={"gradient_accumulation_steps": 2})
    engine = made(settings)
    found = train(engine, rank, 0, 4)
    weight = engine.module.blocks[1].linear.weight
    away = is_away(weight)
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        if rank == 0:
            weight.fill_(0.25)
    found += train(engine, rank, 4, 6)
    found.append(safe_get_full_fp32_param(weight).sum().item())
    found.append(safe_get_full_optimizer_state(weight, "exp_avg").sum().item())
    found.append(safe_get_local_fp32_param(weight).numel())
    safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), 0.125))
    found += train(engine, rank, 6, 8)
    if rank == 0:
        engine.save_checkpoint(f"{folder}/out")
    dist.barrier()
    expected = train(engine, rank, 8, 10)
    again = made(settings)
    again.load_checkpoint(f"{folder}/out")
    assert train(again, rank, 8, 10) == expected
    assert same(bits(again), bits(engine))
    values = bits(engine)
    dist.barrier()  # another rank may still read what this one has
    again.destroy()
    engine.destroy()
    return found, values, away


@pytest.mark.parametrize(("param", "state"), [("cpu", "nvme"), ("nvme", "cpu")])
def test_two_ranks_have_the_bits_of_whole_parameters(tmp_path, param, state):
    whole = on_ranks(2, run, str(tmp_path / "whole"), param, state, 3, False)
    streamed = on_ranks(2, run, str(tmp_path / "streamed"), param, state, 3, True)
    for (found, values, away), (own_found, own_values, own_away) in zip(whole, streamed, strict=True):
        assert (away, own_away) == (False, True)
        assert own_found == found
        assert same(own_values, values)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
