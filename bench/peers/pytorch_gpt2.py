#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/pytorch_gpt2.py: the demonstration's job in PyTorch with everything in RAM, with which `ziggurat train` is
# compared.
"""Trains GPT-2 over bytes in PyTorch on the CPU: bf16 parameters and activations with fp32 masters (or all in fp32,
which is faster on a CPU without bf16 arithmetic), fp32 moments, fused AdamW, clipping, and one checkpoint per block
unless --no-checkpointing is given; --compile uses torch.compile. Shape, text and bytes per step are the reference
trainer's; batches are as PyTorch likes them: 2048 bytes are one batch of 8 x 256.

    python3 bench/peers/pytorch_gpt2.py --data TEXT [--model gpt2-small] [--tokens-per-step 2048] [--context 256]
        [--steps 12] [--threads 2] [--lr 6e-4] [--warmup 10] [--clip 1.0] [--seed 1] [--dtype bf16|fp32]
        [--json FILE]

Prints a line per step and the median tokens/s after the first two steps. Exits with 1, and one line, if PyTorch is
missing.
"""
import argparse
import json
import math
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as functional
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    sys.exit(f"pytorch_gpt2: PyTorch is not installed for {sys.executable} ({error}): run python3 -m pip install torch")

VOCABULARY = 256
POSITIONS = 1024


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.ln_2 = torch.nn.LayerNorm(width)
        self.fc = torch.nn.Linear(width, 4 * width)
        self.fc_projection = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, context, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(batch, context, width))
        return x + self.fc_projection(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.wte = torch.nn.Embedding(VOCABULARY, width)
        self.wpe = torch.nn.Embedding(POSITIONS, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(width)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith("projection.weight")
                torch.nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(param)

    def forward(self, tokens, targets, checkpointing):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def fused_adamw(masters, lr, decay):
    """Returns PyTorch's fused AdamW, with weight decay on matrices."""
    groups = [
        {"params": [m for m in masters if m.dim() == 2], "weight_decay": decay},
        {"params": [m for m in masters if m.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def clip_and_update(adamw, masters, lr, clip):
    norm = torch.nn.utils.clip_grad_norm_(masters, clip) if clip > 0 else torch.zeros(())
    for group in adamw.param_groups:
        group["lr"] = lr
    adamw.step()
    return norm.item()


class Fp32AdamW:
    """An optimizer whose masters are the model's own parameters."""

    def __init__(self, model, lr, decay):
        self.params = list(model.parameters())
        self.adamw = fused_adamw(self.params, lr, decay)

    def step(self, lr, clip):
        norm = clip_and_update(self.adamw, self.params, lr, clip)
        self.adamw.zero_grad(set_to_none=True)
        return norm


class MixedAdamW:
    """An optimizer with fp32 masters, which makes the model's parameters bf16."""

    def __init__(self, model, lr, decay):
        self.masters = [p.detach().float().clone() for p in model.parameters()]
        model.bfloat16()
        self.params = list(model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.adamw = fused_adamw(self.masters, lr, decay)

    @torch.no_grad()
    def step(self, lr, clip):
        for param, master in zip(self.params, self.masters):
            master.grad.copy_(param.grad)
            param.grad = None
        norm = clip_and_update(self.adamw, self.masters, lr, clip)
        for param, master in zip(self.params, self.masters):
            param.copy_(master)
        return norm


def shape_of(text):
    named = {"gpt2-small": "12x768x12", "gpt2-medium": "24x1024x16"}
    try:
        layers, width, heads = (int(part) for part in named.get(text, text).split("x"))
    except ValueError:
        sys.exit(f"pytorch_gpt2: model {text!r}: gpt2-small, gpt2-medium or LAYERSxWIDTHxHEADS")
    return layers, width, heads


def add_job_options(parser):
    """Adds the options of the job itself, whichever library does it."""
    parser.add_argument("--data", required=True, help="a text file; its bytes are the tokens")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--json", help="a file to which the figures are also written")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_job_options(parser)
    parser.add_argument(
        "--tokens-per-step", type=int, default=2048,
        help="number of tokens in a batch, whose sequences have --context tokens each"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--compile", action="store_true", help="run under torch.compile, which makes the first steps slower"
    )
    arguments = parser.parse_args()
    if arguments.tokens_per_step % arguments.context != 0:
        parser.error("--tokens-per-step must be a multiple of --context")
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: the first two are warm-up")
    return arguments


def read_text(path, context):
    """Returns the part of a text that is used for training, as tokens."""
    try:
        with open(path, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    except (OSError, ValueError) as error:
        sys.exit(f"data {path}: {error}")
    training = text[: len(text) - max(context + 1, len(text) // 20)]
    if len(training) <= context:
        sys.exit(f"data {path}: the text is too short for context {context}")
    return training


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    training = read_text(arguments.data, arguments.context)
    model = Gpt2(*shape_of(arguments.model))
    count = sum(p.numel() for p in model.parameters())
    optimizer = (MixedAdamW if arguments.dtype == "bf16" else Fp32AdamW)(model, arguments.lr, arguments.weight_decay)
    forward = torch.compile(model) if arguments.compile else model
    batch = arguments.tokens_per_step // arguments.context
    print(f"PyTorch {torch.__version__}, {count:,} parameters in {arguments.dtype}, batch {batch} x {arguments.context}, {arguments.threads} threads")

    steps = []
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(training) - arguments.context, (batch,))
        rows = torch.stack([training[s : s + arguments.context + 1] for s in starts])
        begin = time.perf_counter()
        loss = forward(rows[:, :-1], rows[:, 1:], not arguments.no_checkpointing)
        forward_end = time.perf_counter()
        loss.backward()
        backward_end = time.perf_counter()
        norm = optimizer.step(arguments.lr * min(1.0, step / max(1, arguments.warmup)), arguments.clip)
        end = time.perf_counter()
        steps.append({
            "step": step,
            "loss": loss.item(),
            "grad_norm": norm,
            "seconds": end - begin,
            "forward_seconds": forward_end - begin,
            "backward_seconds": backward_end - forward_end,
            "optimizer_seconds": end - backward_end,
            "tokens_per_second": arguments.tokens_per_step / (end - begin),
        })
        last = steps[-1]
        print(f"step {step:4d}  loss {last['loss']:.4f}  norm {norm:7.2f}  {last['tokens_per_second']:7.1f} tokens/s  "
              f"({last['forward_seconds']:.2f} forward, {last['backward_seconds']:.2f} backward, "
              f"{last['optimizer_seconds']:.2f} optimizer)", flush=True)

    median = statistics.median(s["tokens_per_second"] for s in steps[2:])
    print(f"median {median:.1f} tokens/s over steps 3 to {arguments.steps}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({
                "peer": "pytorch",
                "version": torch.__version__,
                "model": arguments.model,
                "dtype": arguments.dtype,
                "parameters": count,
                "tokens_per_step": arguments.tokens_per_step,
                "threads": arguments.threads,
                "tokens_per_second_median": median,
                "steps": steps,
            }, file, indent=1)


if __name__ == "__main__":
    main()
