#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/optimizers.py: compares ziggurat.torch's optimizer with PyTorch's own and DeepSpeed's, in one PyTorch
# model, in turn.
"""Trains GPT-2 small's shape over bytes in PyTorch on the CPU, with bf16 parameters, clip 1.0 and no recomputation, in
these rows:

  compute  forward and backward alone, which no optimizer can beat
  plain    fp32 masters and fused AdamW in RAM
  host     ziggurat.torch.AdamW, placement="host"
  nvme     the same, placement="nvme:DIR", model=
  nvme-min nvme with --host-memory (512 MiB, half of the state); `nvme` has as much as it takes by itself
  ds-cpu   DeepSpeed, ZeRO-2, optimizer in RAM
  ds-nvme  DeepSpeed, ZeRO-3, optimizer on NVMe

    python3 bench/peers/optimizers.py --data TEXT --store DIR [--tokens-per-step 512] [--rounds 10] [--steps 8]
        [--row NAME]...

Each row is a process that makes `--steps` steps in its turn, and waits in between. Prints for each row the median over
the rounds of its seconds per step, and of its ratio to `plain` and to `compute` in the same round, with the interval
that holds the median at 95 % (by rank). It also prints the peak resident memory, and what memory and drive alone take
for an update's bytes. No step is shorter than `compute` and memory one after the other, because they share the cores,
nor than the drive takes for the bytes that are read and written.
"""
import argparse
import os
import pathlib
import resource
import shutil
import sys
import tempfile
import time

from turns import (RECORD_BYTES, UPDATE_BYTES, Row, alternate, answer_turns, drive_seconds, interval, memory_seconds, slowest,
                   speeds)

HERE = pathlib.Path(__file__).resolve().parent
ROWS = ["compute", "plain", "host", "nvme", "nvme-min", "ds-cpu", "ds-nvme"]
OURS = ("host", "nvme", "nvme-min")


def prepare(options):
    """Prepares one row; returns a function that makes the row's turn."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from pytorch_gpt2 import Gpt2, MixedAdamW, read_text, shape_of

    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    text = read_text(options.data, 256)
    model = Gpt2(*shape_of(options.model))
    clip = torch.nn.utils.clip_grad_norm_
    name = options.row[0]
    if name in OURS:
        import ziggurat.torch

        model.bfloat16()
        groups = [{"params": [p for p in model.parameters() if (p.dim() == 2) == matrix], "weight_decay": decay}
                  for matrix, decay in ((True, 0.1), (False, 0.0))]
        where = "host" if name == "host" else f"nvme:{options.store}/state"
        memory = {"host_memory": options.host_memory} if name == "nvme-min" else {}
        optimizer = ziggurat.torch.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), placement=where, model=model, **memory)

        def finish():
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    elif name.startswith("ds"):
        sys.argv[1:] = []
        os.environ["MASTER_PORT"] = str(29531 + ROWS.index(name))
        import deepspeed_gpt2
        from deepspeed_settings import configuration

        options.optimizer, options.nvme_path, options.dtype, options.clip = name[3:], options.store, "bf16", 1.0
        adam = deepspeed_gpt2.DeepSpeedCPUAdam(model.parameters(), lr=1e-4, betas=(0.9, 0.95), adamw_mode=True)
        settings = configuration(options, options.tokens_per_step // 256)
        engine, *_ = deepspeed_gpt2.deepspeed.initialize(model=model, optimizer=adam, config=settings)
    elif name == "plain":
        mixed = MixedAdamW(model, 1e-4, 0.1)

        def finish():
            mixed.step(1e-4, 1.0)
    else:
        model.bfloat16()

        def finish():  # keeps gradients through the next forward, as an optimizer beside it needs them
            pass

    def step():
        starts = torch.randint(len(text) - 256, (options.tokens_per_step // 256,))
        rows = torch.stack([text[s : s + 257] for s in starts])
        if name.startswith("ds"):
            loss = engine(rows[:, :-1], rows[:, 1:], False)
            engine.backward(loss)
            engine.step()
        else:
            loss = model(rows[:, :-1], rows[:, 1:], False)
            if name == "compute":
                model.zero_grad()
            loss.backward()
            finish()
        return loss.item()

    def turn():
        begin = time.perf_counter()
        losses = [step() for _ in range(options.steps)]
        seconds = (time.perf_counter() - begin) / options.steps
        if name.startswith("nvme"):
            optimizer.synchronize()
            optimizer.engine.make_durable()  # frees the drive for the next row's turn
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        budget = optimizer.engine.figures()["host_budget_bytes"] if name in OURS else 0
        said = {"seconds": seconds, "loss": losses[-1], "peak_bytes": peak, "budget_bytes": budget}
        if name == "compute":
            said["memory_seconds"] = memory_seconds(torch, sum(p.numel() for p in model.parameters()))
        return said
    return turn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="number of steps of a row in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--host-memory", default="512MiB", help="budget of the row nvme-min")
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return answer_turns(lambda: prepare(options))
    os.makedirs(options.store, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="optimizers-", dir=options.store))
    shared = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in
              ("data", "model", "steps", "threads", "tokens_per_step", "host_memory")]
    rows = []
    drive = []

    def measure_drive():
        if "nvme" in [row.name for row in rows]:
            drive.append(drive_seconds(folder, RECORD_BYTES * 86_039_040))
    try:
        for name in ROWS:
            if options.row and name not in options.row:
                continue
            (folder / name).mkdir()
            command = [sys.executable, HERE / "optimizers.py", *shared, f"--store={folder / name}", f"--row={name}", "--worker"]
            rows.append(Row(name, [[str(part) for part in command]], folder))
        report(alternate(rows, options.rounds, measure_drive))
        if drive:
            print(f"drive    {interval(drive)} s for 12 bytes a parameter read and written")
    finally:
        for row in rows:
            row.close()
        shutil.rmtree(folder, ignore_errors=True)
    return None


def report(figures):
    for name, said in figures.items():
        text = f"{name:8} {interval([slowest(one) for one in said])} s a step"
        for base in ("plain", "compute"):
            if base in figures and base != name:
                text += f"; speed over {base} {interval(speeds(said, figures[base]))}"
        text += f"; peak {peak_bytes(said) >> 20} MiB"
        if name in OURS and "compute" in figures:
            budget = said[0][0]["budget_bytes"]
            text += f" of {(peak_bytes(figures['compute']) + budget >> 20) + 100} (compute + budget + 100)"
        print(text)
    if "compute" in figures:
        memory = interval([one["memory_seconds"] for one, in figures["compute"]])
        print(f"memory   {memory} s for {UPDATE_BYTES} bytes a parameter, by copying on all threads")


def peak_bytes(said):
    return max(one["peak_bytes"] for one, in said)


if __name__ == "__main__":
    main()
