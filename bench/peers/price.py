#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/price.py: measures what offload costs, and what the same job does elsewhere: every row in turn, on one
# machine.
"""Runs one job (GPT-2 small's shape over bytes, 2,048 or 512 bytes per step) in these rows, round after round:

  ours       optimizer state on NVMe, activations recomputed in backward, 160 + 384 MiB (fp32: 256 + 736)
  ours-kept  optimizer state on NVMe, activations kept, which takes more device memory
  device     everything on the (emulated) device, recomputed: ours against this row is the price of offload
  device-kept  the same, activations kept: the best that the same trainer does
  torch      PyTorch, everything in RAM, recomputed
  torch-kept    the same, activations kept: PyTorch as one would run it with that much memory
  torch-compiled   the same through torch.compile
  deepspeed-ram    DeepSpeed, ZeRO-2, optimizer in RAM, activations kept
  deepspeed-nvme   DeepSpeed, ZeRO-3, optimizer on NVMe, activations kept

    python3 bench/peers/price.py --binary build/release/bin/ziggurat --data TEXT --store DIR [--python PYTHON]
        [--rounds 3] [--steps 9] [--tokens-per-step 2048] [--dtype bf16|fp32] [--row NAME]... [--json FILE]

Prints tokens/s of each round (from the median of a run's steps after the first two) and the median over rounds of the
ratio to `ours` in the same round. Hosts drift by tens of per cent within minutes, so only neighbouring runs are
compared. Our speeds come with their share of the speed of the shortest possible step, and what limits it, as `ziggurat
train` reports them. A row that cannot run is named with its reason and left out.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ON_NVME = ["--placement", "params=host,grads=host,optimizer=nvme"]
ON_DEVICE = ["--placement", "all=device"]
KEPT = ["--activation-checkpointing", "off"]
OURS = {"ours": ON_NVME, "ours-kept": ON_NVME + KEPT, "device": ON_DEVICE, "device-kept": ON_DEVICE + KEPT}
# MiB of device memory and of host memory.
BUDGETS = {
    "bf16": {"ours": (160, 384), "ours-kept": (1200, 384), "device": (1800, 64), "device-kept": (2800, 64)},
    "fp32": {"ours": (256, 736), "ours-kept": (2400, 736), "device": (2800, 64), "device-kept": (4800, 64)},
}
PEERS = {
    "torch": ["pytorch_gpt2.py"],
    "torch-kept": ["pytorch_gpt2.py", "--no-checkpointing"],
    "torch-compiled": ["pytorch_gpt2.py", "--no-checkpointing", "--compile"],
    "deepspeed-ram": ["deepspeed_gpt2.py", "--no-checkpointing", "--optimizer", "cpu"],
    "deepspeed-nvme": ["deepspeed_gpt2.py", "--no-checkpointing", "--optimizer", "nvme"],
}


def ziggurat(options, name, folder):
    report = folder / "report.json"
    command = [options.binary, "train", "--model", options.model, "--data", options.data, "--store", folder / "store", "--steps",
               options.steps, "--batch", 2, "--accumulate", options.tokens_per_step // 512, "--context", 256, "--eval-every", 0,
               "--threads", options.threads, "--clip", 1.0, "--dtype", options.dtype, "--json", report, *OURS[name]]
    device, host = BUDGETS[options.dtype][name]
    command += ["--device-memory", f"{device}MiB", "--host-memory", f"{host}MiB"]
    run([str(part) for part in command])
    said = json.loads(report.read_text())
    bound = said["total"]["bound"]
    limit = f"; {bound['share']:.2f} of the limit, {bound['limit']}"
    return options.tokens_per_step / statistics.median(one["wall_s"] for one in said["steps"][2:]), limit


def peer(options, name, folder):
    report = folder / "report.json"
    script, *flags = PEERS[name]
    command = [options.python, HERE / script, "--data", options.data, "--model", options.model, "--tokens-per-step",
               options.tokens_per_step, "--steps", options.steps, "--threads", options.threads, "--clip", 1.0,
               "--dtype", options.dtype, "--json", report, *flags]
    if name == "deepspeed-nvme":
        command += ["--nvme-path", folder]
    run([str(part) for part in command])
    return json.loads(report.read_text())["tokens_per_second_median"], ""


class CannotRun(Exception):
    pass


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise CannotRun(said[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--python", default=sys.executable, help="a Python interpreter that has PyTorch and DeepSpeed")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-step", type=int, default=2048, choices=[512, 1024, 2048])
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32"], default="bf16", help="choose fp32 if the CPU has no bf16 arithmetic"
    )
    parser.add_argument(
        "--row", action="append", choices=[*OURS, *PEERS], help="rows to run (default: all); `ours` always runs"
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    os.makedirs(options.store, exist_ok=True)
    rows = [name for name in [*OURS, *PEERS] if options.row is None or name in options.row or name == "ours"]
    speeds = {name: [] for name in rows}
    for number in range(options.rounds):
        for name in list(speeds):
            folder = pathlib.Path(tempfile.mkdtemp(prefix="price-", dir=options.store))
            try:
                speed, limit = ziggurat(options, name, folder) if name in OURS else peer(options, name, folder)
                speeds[name].append(speed)
                print(f"round {number + 1}: {name:15} {speed:7.0f} tokens/s{limit}", flush=True)
            except CannotRun as reason:
                print(f"round {number + 1}: {name:15} cannot run: {reason}", flush=True)
                if name == "ours":
                    sys.exit(1)
                del speeds[name]
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    for name, figures in speeds.items():
        ratio = statistics.median(one / ours for one, ours in zip(figures, speeds["ours"]))
        print(f"{name:15} {statistics.median(figures):7.0f} tokens/s, {ratio:.2f} of ours (medians of {len(figures)})")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(speeds, indent=1))


if __name__ == "__main__":
    main()
