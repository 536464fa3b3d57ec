#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/pytorch_ranks.py: pytorch_gpt2.py's job among ranks, with PyTorch's DDP or FSDP2 over gloo and everything
# in RAM.
"""Runs one rank of the job; start the ranks with PyTorch's own launcher:

    python3 -m torch.distributed.run --standalone --nproc-per-node 2 bench/peers/pytorch_ranks.py --data TEXT
        --strategy ddp|fsdp2 [--init FILE.safetensors] [--json FILE] and pytorch_gpt2.py's other options

Every step has the sequences that `ziggurat train --batch 2 --accumulate K` draws with the same --seed, dealt out to
ranks in the same way. With --init, the export of a store whose first step had `--lr 0 --weight-decay 0`, the loss
curves can be compared. DDP has bf16 parameters, fp32 masters and moments on every rank. FSDP2 has fp32 masters in
shards, gathered and reduced in bf16.
"""
import argparse
import json
import os
import statistics
import struct
import sys
import time

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"pytorch_ranks: PyTorch with torch.distributed is not installed for {sys.executable} ({error})")

from pytorch_gpt2 import Gpt2, MixedAdamW, add_job_options, read_text, shape_of

ROWS = 2  # sequences of a micro-batch
WORD = (1 << 64) - 1


def mix64(value):
    """Returns splitmix64's finalizer, as in integrations/gpt/random.h."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def start_of(seed, step, micro, row, starts):
    key = mix64(seed)
    for part in (step, micro, row):
        key = mix64(key ^ part)
    return key % starts


def read_safetensors(path):
    """Returns the tensors of a safetensors file, which must be fp32."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            sys.exit(
                f"pytorch_ranks: {path}: tensor {name} has the type {entry['dtype']}: export the store with --dtype "
                "fp32"
            )
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(data, dtype=torch.float32, offset=begin, count=(end - begin) // 4).view(entry["shape"])
    return tensors


def load(model, path):
    """Loads weights under GPT-2's names, with matrices as [in, out], into this model."""
    names = {"qkv": "attn.c_attn", "projection": "attn.c_proj", "fc": "mlp.c_fc", "fc_projection": "mlp.c_proj"}
    tensors = read_safetensors(path)
    with torch.no_grad():
        for name, param in model.named_parameters():
            parts = name.split(".")
            if parts[0] == "blocks":
                parts = ["h", parts[1], names.get(parts[2], parts[2]), parts[3]]
            value = tensors[".".join(parts)]
            is_matrix = param.dim() == 2 and parts[0] == "h"
            param.copy_(value.t() if is_matrix else value)


class Ddp:
    def __init__(self, model, options):
        self.optimizer = MixedAdamW(model, options.lr, options.weight_decay)
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(self, lr, clip):
        return self.optimizer.step(lr, clip)


class Fsdp2:
    def __init__(self, model, options):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.wrapped = model
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)

    def step(self, lr, clip):
        norm = torch.nn.utils.clip_grad_norm_(self.wrapped.parameters(), clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        return norm.full_tensor().item()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", required=True, choices=("ddp", "fsdp2"))
    add_job_options(parser)
    parser.add_argument("--init", help="file of initial weights, as `ziggurat export` writes it")
    parser.add_argument("--accumulate", type=int, default=4, help="number of micro-batches in a step, over all ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    return parser.parse_args()


def main():
    options = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(
            "pytorch_ranks: no launcher started this rank: start it with python3 -m torch.distributed.run "
            "--nproc-per-node N"
        )
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.accumulate % ranks != 0:
        sys.exit(f"pytorch_ranks: --accumulate {options.accumulate} cannot be divided evenly among {ranks} ranks")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    training = read_text(options.data, options.context)
    model = Gpt2(*shape_of(options.model))
    if options.init:
        load(model, options.init)
    job = (Ddp if options.strategy == "ddp" else Fsdp2)(model, options)

    steps = []
    for step in range(1, options.steps + 1):
        starts = [start_of(options.seed, step - 1, micro, row, len(training) - options.context)
                  for micro in range(rank, options.accumulate, ranks) for row in range(ROWS)]
        rows = torch.stack([training[s : s + options.context + 1] for s in starts])
        dist.barrier()
        begin = time.perf_counter()
        loss = job.wrapped(rows[:, :-1], rows[:, 1:], not options.no_checkpointing)
        loss.backward()
        norm = job.step(options.lr * min(1.0, step / max(1, options.warmup)), options.clip)
        dist.barrier()
        seconds = time.perf_counter() - begin
        mean = loss.detach().float()
        dist.all_reduce(mean)
        steps.append({"step": step, "loss": mean.item() / ranks, "grad_norm": norm, "seconds": seconds})
        if rank == 0:
            print(f"step {step:4d}  loss {steps[-1]['loss']:.4f}  norm {norm:7.2f}  {seconds:.2f} s", flush=True)
    if rank == 0:
        tokens = options.accumulate * ROWS * options.context
        median = statistics.median(tokens / one["seconds"] for one in steps[2:])
        print(f"PyTorch {torch.__version__}, {options.strategy}, {ranks} ranks: median {median:.1f} tokens/s")
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"version": torch.__version__, "tokens_per_second_median": median, "steps": steps}, file, indent=1)
    # Does not call destroy_process_group(): on a busy machine one rank was seen to wait for ever, in it or in what came
    # before, for a rank that had already left.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
