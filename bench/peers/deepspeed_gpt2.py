#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/deepspeed_gpt2.py: runs pytorch_gpt2.py's job under DeepSpeed on its CPU accelerator, with optimizer state
# in RAM or on NVMe.
"""    python3 bench/peers/deepspeed_gpt2.py --data TEXT --optimizer cpu|nvme [--nvme-path DIR] and
        pytorch_gpt2.py's options

Runs one rank. In RAM it takes ZeRO stage 2 with offload_optimizer "cpu" and DeepSpeedCPUAdam. On NVMe it takes stage 3
(stage 2 writes nothing there), parameters in RAM, and pipelined reads and writes, which is the fastest setting of
those that run. bf16 or fp32, with gradients clipped. Exits with 77, and says why, if DeepSpeed is not installed.
"""
import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}.items():
    os.environ.setdefault(name, value)
try:
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from deepspeed_settings import configuration
from pytorch_gpt2 import Gpt2, add_job_options, read_text, shape_of


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_job_options(parser)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--optimizer", choices=["cpu", "nvme"], default="cpu")
    parser.add_argument("--nvme-path", default="build/deepspeed-nvme")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    training = read_text(arguments.data, arguments.context)
    model = Gpt2(*shape_of(arguments.model))
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": arguments.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = DeepSpeedCPUAdam(groups, lr=arguments.lr, betas=(0.9, 0.95), adamw_mode=True)
    batch = arguments.tokens_per_step // arguments.context
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(arguments, batch))
    print(f"DeepSpeed {deepspeed.__version__}, optimizer in {arguments.optimizer}, batch {batch} x {arguments.context}", flush=True)
    steps = []
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(training) - arguments.context, (batch,))
        rows = torch.stack([training[s : s + arguments.context + 1] for s in starts])
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1.0, step / max(1, arguments.warmup))
        begin = time.perf_counter()
        loss = engine(rows[:, :-1], rows[:, 1:], not arguments.no_checkpointing)
        engine.backward(loss)
        engine.step()
        seconds = time.perf_counter() - begin
        steps.append({"step": step, "loss": loss.item(), "seconds": seconds,
                      "tokens_per_second": arguments.tokens_per_step / seconds})
        print(f"step {step:4d}  loss {steps[-1]['loss']:.4f}  {steps[-1]['tokens_per_second']:7.1f} tokens/s", flush=True)
    median = statistics.median(s["tokens_per_second"] for s in steps[2:])
    print(f"median {median:.1f} tokens/s over steps 3 to {arguments.steps}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"peer": f"deepspeed-{arguments.optimizer}", "version": deepspeed.__version__,
                       "tokens_per_second_median": median, "steps": steps}, file, indent=1)


if __name__ == "__main__":
    main()
