# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 2, the optimizer's state in the memory of the CPU, bf16, on one rank.

python -m torch.distributed.run --standalone --nproc-per-node 1 -- offload_cpu.py --deepspeed
    --deepspeed_config ds_offload_cpu.json --data TEXT [--log FILE] [--checkpoints DIR [--resume]]
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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--log", type=Path, help="a line of JSON for each step is added to it")
    parser.add_argument("--seed", type=int, default=1)
    return deepspeed.add_config_arguments(parser).parse_args()


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(engine: torch.nn.Module, text: Text, size: int) -> float:
    engine.eval()
    losses = [engine(*text.batch(number, size)).item() for number in range(4)]
    engine.train()
    return sum(losses) / len(losses)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    text, held_out = Text(args.data), Text(args.data, held_out=True)
    model = Transformer()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        parameter_groups(model), lr=4e-3, betas=(0.9, 0.95), eps=1e-8, adamw_mode=True
    )
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    size = engine.train_micro_batch_size_per_gpu()

    first = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(args.checkpoints)
        if path is None:
            raise SystemExit(f"no checkpoint in {args.checkpoints}")
        first = client_state["step"]

    def write(**line: float) -> None:
        print("  ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for step in range(first, args.steps):
        rate = optimizer.param_groups[0]["lr"]
        tokens, targets = (part.to(engine.device) for part in text.batch(step, size))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        write(
            step=step + 1, loss=loss.item(), lr=rate, grad_norm=float(engine.get_global_grad_norm())
        )
        if (step + 1) % args.eval_every == 0:
            write(step=step + 1, eval_loss=evaluate(engine, held_out, size))
        if args.checkpoints and (step + 1) % args.save_every == 0:
            engine.save_checkpoint(
                args.checkpoints, tag=f"step{step + 1}", client_state={"step": step + 1}
            )


if __name__ == "__main__":
    main()
