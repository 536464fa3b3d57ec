#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/large_model.py: trains a model whose optimizer state is larger than memory, by a PyTorch script.
"""Trains a GPT of LAYERSxWIDTHxHEADS over bytes, in bf16, with AdamW whose state is on NVMe; forward waits module by
module:

    python3 bench/peers/large_model.py --data TEXT --store DIR [--model 27x2560x20] [--tokens-per-step 256] [--steps 4]

Prints, for each step, its seconds and the peak of the resident memory, beside what is planned: PyTorch's memory after
its import, parameters, gradients, the engine's budget, and what forward and backward take in a step without an
optimizer.
"""
import argparse
import os
import statistics
import time

import torch
import ziggurat.torch
from pytorch_gpt2 import Gpt2, read_text, shape_of

MIB = 1 << 20


def resident(field="VmRSS"):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def forget_peak():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--model", default="27x2560x20")
    parser.add_argument("--tokens-per-step", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--host-memory-mib", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    text = read_text(options.data, 256)
    base = resident()
    model = Gpt2(*shape_of(options.model))
    count = sum(p.numel() for p in model.parameters())
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement=f"nvme:{options.store}", model=model,
                                     host_memory=f"{options.host_memory_mib}MiB")

    def backward():
        starts = torch.randint(len(text) - 256, (options.tokens_per_step // 256,))
        rows = torch.stack([text[s : s + 257] for s in starts])
        loss = model(rows[:, :-1], rows[:, 1:], True)
        loss.backward()
        return loss.item()

    forget_peak()
    begin = time.perf_counter()
    backward()
    alone = time.perf_counter() - begin
    optimizer.zero_grad()
    activations = resident("VmHWM") - base - 4 * count
    planned = base + 4 * count + options.host_memory_mib * MIB + max(activations, 0)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(f"{count:,} parameters: {12 * count / 1e9:.1f} GB of state; this machine has {machine / 1e9:.1f} GB of memory")
    print(f"planned: {planned / MIB:,.0f} MiB: PyTorch {base / MIB:,.0f}, parameters and gradients {4 * count / MIB:,.0f}, "
          f"engine {options.host_memory_mib}, forward and backward {activations / MIB:,.0f}, which take {alone:.1f} s "
          "alone", flush=True)
    begin = time.perf_counter()
    optimizer.open()
    print(f"opened in {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = []
    for step in range(1, options.steps + 1):
        forget_peak()
        begin = time.perf_counter()
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        print(f"step {step}: loss {loss:.3f}, {seconds[-1]:.1f} s, peak {resident('VmHWM') / MIB:,.0f} MiB resident", flush=True)
    begin = time.perf_counter()
    optimizer.engine.make_durable()
    print(f"the last step was durable {time.perf_counter() - begin:.1f} s later; median {statistics.median(seconds):.1f} s a step, "
          f"{options.tokens_per_step / statistics.median(seconds):.1f} tokens/s, {24 * count / statistics.median(seconds) / 1e9:.2f} GB/s "
          "of state read and written")
    optimizer.close()


if __name__ == "__main__":
    main()
