# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3, the optimizer's state on NVMe, bf16, a model made inside zero.Init.

python -m torch.distributed.run --standalone --nproc-per-node 1 -- offload_nvme.py
    --deepspeed_config ds_offload_nvme.json --data TEXT [--log FILE] [--weights FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch

from transformer import Text, Transformer, loss_of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log", type=Path, help="a line of JSON for each step is added to it")
    parser.add_argument("--weights", type=Path, help="the trained weights are written there")
    parser.add_argument("--seed", type=int, default=1)
    return deepspeed.add_config_arguments(parser).parse_args()


def initialize(model: torch.nn.Module, seed: int) -> int:
    """Draws the weights with one parameter gathered at a time; returns their count."""
    draw = torch.Generator().manual_seed(seed)
    count = 0
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            count += param.numel()
            if torch.distributed.get_rank() != 0:
                continue
            if param.dim() >= 2:
                deviation = 0.02 if "down" in name or "projection" in name else 0.05
                param.data.copy_(torch.randn(param.shape, generator=draw) * deviation)
            elif name.endswith("bias"):
                param.data.zero_()
    return count


def write_weights(engine: torch.nn.Module, path: Path) -> None:
    gathered = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(gathered):
        if torch.distributed.get_rank() == 0:
            torch.save({k: v.clone() for k, v in engine.module.state_dict().items()}, path)


@torch.no_grad()
def evaluate(engine: torch.nn.Module, text: Text, size: int) -> float:
    engine.eval()
    losses = []
    for number in range(4):
        tokens, targets = text.batch(number, size)
        losses.append(loss_of(engine(tokens), targets).item())
    engine.train()
    return sum(losses) / len(losses)


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    text, held_out = Text(args.data), Text(args.data, held_out=True)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = Transformer(width=128)
    count = initialize(model, args.seed)
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    size = engine.train_micro_batch_size_per_gpu()
    if torch.distributed.get_rank() == 0:
        print(f"{count:,} parameters, stage {engine.zero_optimization_stage()}", flush=True)

    def write(**line: float) -> None:
        print("  ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for step in range(args.steps):
        (rate,) = engine.get_lr()
        tokens, targets = (part.to(engine.device) for part in text.batch(step, size))
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        write(
            step=step + 1, loss=loss.item(), lr=rate, grad_norm=float(engine.get_global_grad_norm())
        )
    write(step=args.steps, eval_loss=evaluate(engine, held_out, size))
    if args.weights:
        write_weights(engine, args.weights)


if __name__ == "__main__":
    main()
