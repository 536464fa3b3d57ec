# SPDX-License-Identifier: Apache-2.0
"""Engines of ziggurat.deepspeed on ranks, for the tests of those."""

import torch
import torch.distributed as dist
from deepspeed_runs import loss_of
from rank_runs import on_ranks
from small_models import small_model

import ziggurat.deepspeed as deepspeed

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


def states_loaded_by(ranks, folder, **more):
    def load(rank):
        engine = made(**more)
        engine.load_checkpoint(folder)
        state = engine.optimizer.state_dict()["state"]
        dist.barrier()  # another rank may still read what this one has
        return state

    return on_ranks(ranks, load)[0]


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        for name, value in state.items():
            assert torch.equal(found[index][name], value), (index, name)
