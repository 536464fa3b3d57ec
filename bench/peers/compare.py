#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/compare.py: compares tokens/s of `ziggurat train` with PyTorch's with everything in RAM, in turn on one
# machine.
"""For each setting, runs Ziggurat and PyTorch in turn and prints both medians and the ratio. Hosts drift by tens of per
cent within minutes, so only the ratio of neighbouring runs counts.

    python3 bench/peers/compare.py --binary build/release/bin/ziggurat --data TEXT --store DIR [--python PYTHON]
        [--rounds 3] [--steps 8] [--setting 2048] [--setting 512] [--setting 512-split] [--setting 512-rare]
        [--setting 2048-host] [--json FILE]

Tokens/s of a run are the bytes of a step over the median seconds of its steps after the first two. Its share of the
bound is the least time that is possible under the step's dependencies, as `ziggurat train` prints it, over that
median.
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
ON_DISK = ["--placement", "params=host,grads=host,optimizer=nvme"]
SMALL = ON_DISK + ["--device-memory", "128MiB", "--host-memory", "384MiB"]
# name: (accumulate, our flags, clip, the bar). The norm stays near 2, so a clip of 1.0 acts on every step, and a clip
# of 20 on hardly any.
SETTINGS = {
    "2048": (4, ON_DISK + ["--device-memory", "160MiB", "--host-memory", "384MiB"], "1.0", 0.97),
    "512": (1, SMALL, "1.0", 0.77),
    "512-split": (1, SMALL + ["--state-format", "split"], "1.0", 0.80),
    "512-rare": (1, SMALL, "20", 0.92),
    "2048-host": (4, ["--placement", "all=host", "--device-memory", "160MiB", "--host-memory", "1700MiB"], "1.0", 0.95),
}


def tokens_per_step(setting):
    return SETTINGS[setting][0] * 512


def ziggurat(options, setting):
    accumulate, flags, clip, _ = SETTINGS[setting]
    store = tempfile.mkdtemp(prefix="compare-", dir=options.store)
    report = os.path.join(store, "report.json")
    command = [options.binary, "train", "--model", "gpt2-small", "--data", options.data, "--store", store,
               "--steps", str(options.steps), "--batch", "2", "--accumulate", str(accumulate), "--context", "256",
               "--eval-every", "0", "--threads", str(options.threads), "--clip", clip, "--json", report] + flags
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = json.load(open(report))
    finally:
        shutil.rmtree(store)
    step = statistics.median(one["wall_s"] for one in run["steps"][2:])
    return tokens_per_step(setting) / step, run["total"]["bound"]["seconds"] / step


def pytorch(options, setting):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([options.python, str(HERE / "pytorch_gpt2.py"), "--data", options.data, "--tokens-per-step",
                        str(tokens_per_step(setting)), "--steps", str(options.steps), "--threads", str(options.threads), "--clip",
                        SETTINGS[setting][2],
                        "--json", report.name], check=True, stdout=subprocess.DEVNULL)
        return json.load(open(report.name))["tokens_per_second_median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--python", default=sys.executable, help="a Python interpreter that has PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    parser.add_argument("--json")
    options = parser.parse_args()
    os.makedirs(options.store, exist_ok=True)
    results = {}
    for setting in options.setting or SETTINGS:
        ours, peers, shares = [], [], []
        for round_number in range(options.rounds):
            tokens_per_second, share = ziggurat(options, setting)
            ours.append(tokens_per_second)
            shares.append(share)
            peers.append(pytorch(options, setting))
            print(f"{setting}: round {round_number + 1}: ziggurat {ours[-1]:.0f} tokens/s, {share:.2f} of its bound, "
                  f"PyTorch {peers[-1]:.0f}", flush=True)
        ratio = statistics.median(a / b for a, b in zip(ours, peers))
        results[setting] = {"ziggurat": ours, "pytorch": peers, "share_of_bound": shares, "ratio": ratio, "bar": SETTINGS[setting][3]}
        print(f"{setting}: median ratio {ratio:.2f} (bar {SETTINGS[setting][3]:.2f}; {options.rounds} rounds)", flush=True)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
