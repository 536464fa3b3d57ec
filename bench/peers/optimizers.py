#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/optimizers.py: ziggurat.torch's optimizer beside PyTorch's own and DeepSpeed's, in one PyTorch model, in turn.
"""GPT-2 small's shape over bytes in PyTorch on the CPU, bf16 parameters, clip 1.0, no recomputation, in these rows:

  compute  forward and backward alone: what no optimizer can beat
  plain    fp32 masters and fused AdamW in RAM
  host     ziggurat.torch.AdamW, placement="host"
  nvme     the same, placement="nvme:DIR", model=
  nvme-min with --host-memory beside it, 512 MiB, half of the state; `nvme` has as much as it takes by itself
  ds-cpu   DeepSpeed, ZeRO-2, optimizer in RAM
  ds-nvme  DeepSpeed, ZeRO-3, optimizer on NVMe

    python3 bench/peers/optimizers.py --data TEXT --store DIR [--tokens-per-step 512] [--rounds 10] [--steps 8] [--row NAME]...

Each row is a process that makes `--steps` steps in its turn, and waits in between. Prints, for each row, the median over the
rounds of its seconds a step, and of its ratio to `plain` and to `compute` in the same round, with the interval that holds the
median at 95 % (by rank); peak resident memory; and beside them what memory and drive alone take for an update's bytes. No step
is shorter than `compute` and memory one after the other, which share the cores, nor than the drive for what is read and written.
"""
import argparse
import concurrent.futures
import json
import math
import mmap
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROWS = ["compute", "plain", "host", "nvme", "nvme-min", "ds-cpu", "ds-nvme"]
OURS = ("host", "nvme", "nvme-min")
RECORD_BYTES = 12  # a parameter, read and written each step
UPDATE_BYTES = 2 * RECORD_BYTES + 2 + 2 + 2  # of memory traffic, with gradient and parameter, and the line of the latter


def work(options):
    """One row: a JSON line for each line that is read."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
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

        options.optimizer, options.nvme_path, options.dtype, options.clip = name[3:], options.store, "bf16", 1.0
        adam = deepspeed_gpt2.DeepSpeedCPUAdam(model.parameters(), lr=1e-4, betas=(0.9, 0.95), adamw_mode=True)
        settings = deepspeed_gpt2.configuration(options, options.tokens_per_step // 256)
        engine, *_ = deepspeed_gpt2.deepspeed.initialize(model=model, optimizer=adam, config=settings)
    elif name == "plain":
        mixed = MixedAdamW(model, 1e-4, 0.1)

        def finish():
            mixed.step(1e-4, 1.0)
    else:
        model.bfloat16()

        def finish():  # gradients are kept through the next forward, as an optimizer beside it needs them
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

    for _ in sys.stdin:
        begin = time.perf_counter()
        losses = [step() for _ in range(options.steps)]
        seconds = (time.perf_counter() - begin) / options.steps
        if name.startswith("nvme"):
            optimizer.synchronize()
            optimizer.engine.make_durable()  # not beside the next row
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        budget = optimizer.engine.figures()["host_budget_bytes"] if name in OURS else 0
        said = {"seconds": seconds, "loss": losses[-1], "peak_bytes": peak, "budget_bytes": budget}
        if name == "compute":
            said["memory_seconds"] = memory_seconds(torch, sum(p.numel() for p in model.parameters()))
        print(json.dumps(said), file=answer, flush=True)


def memory_seconds(torch, count):
    """What copying as many bytes takes as an update of `count` parameters reads and writes."""
    source = torch.ones(8 << 20)  # more than caches hold, less than the activations that were here
    target = torch.zeros_like(source)
    begin = time.perf_counter()
    for _ in range(32):
        target.copy_(source)
    return UPDATE_BYTES * count / (32 * 2 * source.nbytes / (time.perf_counter() - begin))


def drive_seconds(directory, total_bytes):
    """What reading and then writing as many bytes takes, 8 MiB at a time from 4 threads, past the page cache."""
    piece = 8 << 20
    total_bytes = math.ceil(total_bytes / piece) * piece
    path = os.path.join(directory, "drive")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, total_bytes)
    buffers = [mmap.mmap(-1, piece) for _ in range(4)]
    for buffer in buffers:
        buffer.write(os.urandom(piece))

    def run(call):
        def part(index):
            for offset in range(index * piece, total_bytes, 4 * piece):
                call(fd, [buffers[index]], offset)
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(part, range(4)))
        return time.perf_counter() - begin
    run(os.pwritev)
    seconds = run(os.preadv) + run(os.pwritev)
    os.close(fd)
    os.unlink(path)
    return seconds


def interval(values):
    """The ranks that hold the median at 95 %, by the binomial distribution."""
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    low = max(rank - 1, 0)
    return f"{statistics.median(ordered):.3f} [{ordered[low]:.3f}, {ordered[count - 1 - low]:.3f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive to train over")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="of a row in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--host-memory", default="512MiB", help="of nvme-min")
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    os.makedirs(options.store, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="optimizers-", dir=options.store)
    rows = [name for name in ROWS if not options.row or name in options.row]
    shared = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in
              ("data", "model", "steps", "threads", "tokens_per_step", "host_memory")]
    begin_at = {}
    for name in rows:
        place = os.path.join(folder, name)
        os.makedirs(place)
        command = [sys.executable, os.path.join(HERE, "optimizers.py"), *shared, f"--store={place}", f"--row={name}", "--worker"]
        log = open(os.path.join(folder, name + ".log"), "w", encoding="utf-8")
        begin_at[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    figures = {name: [] for name in rows}
    drive = []
    try:
        for number in range(-1, options.rounds):  # the first is warm-up
            for name in list(figures):
                process = begin_at[name]
                try:
                    print(file=process.stdin, flush=True)
                    said = json.loads(process.stdout.readline())
                except (OSError, ValueError):
                    last = pathlib.Path(folder, name + ".log").read_text(encoding="utf-8").strip().splitlines()
                    print(f"{name} cannot run: {last[-1] if last else 'no word'}", flush=True)
                    process.kill()  # it may be at work beside the others
                    del figures[name]
                    continue
                if number >= 0:
                    figures[name].append(said)
                    print(f"round {number + 1}: {name:8} {said['seconds']:.3f} s a step, loss {said['loss']:.3f}", flush=True)
            if number >= 0 and "nvme" in figures:
                drive.append(drive_seconds(folder, RECORD_BYTES * 86_039_040))
        for name, said in figures.items():
            text = f"{name:8} {interval([one['seconds'] for one in said])} s a step"
            for base in ("plain", "compute"):
                if base in figures and base != name:
                    speed = [b["seconds"] / one["seconds"] for b, one in zip(figures[base], said)]
                    text += f"; speed over {base} {interval(speed)}"
            text += f"; peak {max(one['peak_bytes'] for one in said) >> 20} MiB"
            if name in OURS and "compute" in figures:
                alone = max(one["peak_bytes"] for one in figures["compute"])
                text += f" of {(alone + said[0]['budget_bytes'] >> 20) + 100} (compute + budget + 100)"
            print(text)
        if "compute" in figures:
            memory = interval([one["memory_seconds"] for one in figures["compute"]])
            print(f"memory   {memory} s for {UPDATE_BYTES} bytes a parameter, by copying on all threads")
        if drive:
            print(f"drive    {interval(drive)} s for 12 bytes a parameter read and written")
    finally:
        for process in begin_at.values():
            process.stdin.close()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return None


if __name__ == "__main__":
    main()
