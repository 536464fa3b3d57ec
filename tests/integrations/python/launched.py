# SPDX-License-Identifier: Apache-2.0
"""A script for torch_launchers_test.py, the same under each launcher: launched.py FOLDER WAY.

Writes what this rank is, and the bits of its losses, to a file in FOLDER. WAY: "deepspeed", whose
interface finds the ranks that any launcher started, or "accelerate".
"""

import os
import sys
from pathlib import Path

import torch
from deepspeed_runs import batch, loss_of
from rank_end import end_rank
from small_models import small_model

import ziggurat.deepspeed as deepspeed
import ziggurat.torch

STEPS = 4


def with_deepspeed() -> list[str]:
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    engine = deepspeed.initialize(model=small_model(), config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, batch(2 * step + torch.distributed.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    engine.destroy()
    return losses


def with_accelerate() -> list[str]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = small_model()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, weight_decay=0, model=model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(2 * step + accelerator.process_index))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    optimizer.optimizer.close()
    return losses


def main() -> None:
    folder, way = sys.argv[1:]
    torch.set_num_threads(1)
    losses = with_accelerate() if way == "accelerate" else with_deepspeed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = [f"{rank} of {ranks}, here {os.environ['LOCAL_RANK']}", *losses]
    Path(folder, f"rank{rank}").write_text("\n".join(said))
    torch.distributed.barrier()
    end_rank()


if __name__ == "__main__":
    main()
