# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 2 or 3 among two ranks, the optimizer's state in their memory, four micro-batches a step.

python -m torch.distributed.run --standalone --nproc-per-node 2 -- ranks.py
    --deepspeed_config ds_ranks.json --data TEXT [--log FILE] [--checkpoints DIR [--resume]]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch

from transformer import Text, Transformer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--log", type=Path, help="a line of JSON for each step is added to it")
    parser.add_argument("--seed", type=int, default=1)
    return deepspeed.add_config_arguments(parser).parse_args()


def mean_of_ranks(value: torch.Tensor) -> float:
    mean = value.detach().float().clone()
    deepspeed.comm.all_reduce(mean)
    return mean.item() / deepspeed.comm.get_world_size()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = Transformer()
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=Text(args.data),
    )
    is_first = deepspeed.comm.get_rank() == 0

    step = 0
    if args.resume:
        _, client_state = engine.load_checkpoint(args.checkpoints)
        step = client_state["step"]
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    for _ in range(step * engine.gradient_accumulation_steps()):  # what was trained on before
        next(batches)

    losses = []
    while step < args.steps:
        tokens, targets = (part.to(engine.device) for part in next(batches))
        loss = engine(tokens, targets)
        losses.append(loss.detach())
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        rate = optimizer.param_groups[0]["lr"]
        engine.step()
        if not is_last:
            continue
        step += 1
        line = {
            "step": step,
            "loss": mean_of_ranks(torch.stack(losses).mean()),
            "lr": rate,
            "grad_norm": float(engine.get_global_grad_norm()),
        }
        losses.clear()
        if is_first:
            print("  ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        if args.checkpoints and step % args.save_every == 0:
            # every rank has a part of the state to write
            engine.save_checkpoint(args.checkpoints, client_state={"step": step})
    assert engine.global_steps == args.steps, f"the engine counted {engine.global_steps} steps"


if __name__ == "__main__":
    main()
