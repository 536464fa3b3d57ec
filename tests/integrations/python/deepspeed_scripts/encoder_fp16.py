# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 with parameters and optimizer state in the memory of the CPU, fp16 with a dynamic loss
scale, and PyTorch's own transformer encoder, as tutorials train it.

python -m torch.distributed.run --standalone --nproc-per-node 1 -- encoder_fp16.py
    --deepspeed_config ds_encoder_fp16.json --data TEXT [--log FILE] [--checkpoints DIR [--resume]]
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import deepspeed
import torch

from transformer import VOCABULARY, Text, loss_of


class Encoder(torch.nn.Module):
    def __init__(self, layers: int = 3, width: int = 128, heads: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(positions, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return loss_of(self.head(self.encoder(x, mask=mask, is_causal=True)), targets)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log", type=Path, help="a line of JSON for each step is added to it")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = Encoder()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Text(args.data)
    )
    first = 0
    if args.resume:
        _, client_state = engine.load_checkpoint(args.checkpoints)
        first = client_state["step"]

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (tokens, targets) in enumerate(itertools.islice(epochs, first, args.steps), first + 1):
        (rate,) = engine.get_lr()
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        norm = float(engine.get_global_grad_norm())
        line = {"step": step, "loss": loss.item(), "lr": rate, "grad_norm": norm, "scale": engine.cur_scale}
        print("  ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    if args.checkpoints and engine.global_rank == 0:
        engine.save_checkpoint(args.checkpoints, client_state={"step": args.steps})


if __name__ == "__main__":
    main()
