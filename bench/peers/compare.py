#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/compare.py: `ziggurat train` against PyTorch with everything in RAM, alternated on one machine: ratios of tokens/s.
"""For each setting, runs Ziggurat and PyTorch in turn and prints both medians and the ratio. Hosts drift by tens of per cent
within minutes, so only the ratio of neighbours counts.

    python3 bench/peers/compare.py --binary build/release/bin/ziggurat --data TEXT --store DIR [--python PYTHON]
        [--rounds 3] [--steps 8] [--setting 2048] [--setting 512] [--setting 512-rare] [--setting 2048-host] [--json FILE]

Tokens/s of a run: bytes a step over the median seconds of its steps after the first two.
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
# name: (accumulate, host memory, placement, tokens a step, clip, the bar). The norm stays near 2: 1.0 clips every step, 20 hardly
# any.
SETTINGS = {
    "2048": (4, "384MiB", "params=host,grads=host,optimizer=nvme", 2048, "1.0", 0.90),
    "512": (1, "384MiB", "params=host,grads=host,optimizer=nvme", 512, "1.0", 0.75),
    "512-rare": (1, "384MiB", "params=host,grads=host,optimizer=nvme", 512, "20", 0.92),
    "2048-host": (4, "1700MiB", "all=host", 2048, "1.0", 0.95),
}


def ziggurat(options, setting):
    accumulate, host, placement, tokens, clip, _ = SETTINGS[setting]
    store = tempfile.mkdtemp(prefix="compare-", dir=options.store)
    report = os.path.join(store, "report.json")
    command = [options.binary, "train", "--model", "gpt2-small", "--data", options.data, "--store", store,
               "--steps", str(options.steps), "--batch", "2", "--accumulate", str(accumulate), "--context", "256",
               "--device-memory", "160MiB", "--host-memory", host, "--placement", placement, "--eval-every", "0",
               "--threads", str(options.threads), "--clip", clip, "--json", report]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = [step["wall_s"] for step in json.load(open(report))["steps"]]
    finally:
        shutil.rmtree(store)
    return tokens / statistics.median(seconds[2:])


def pytorch(options, setting):
    tokens = SETTINGS[setting][3]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([options.python, str(HERE / "pytorch_gpt2.py"), "--data", options.data, "--tokens-per-step",
                        str(tokens), "--steps", str(options.steps), "--threads", str(options.threads), "--clip",
                        SETTINGS[setting][4],
                        "--json", report.name], check=True, stdout=subprocess.DEVNULL)
        return json.load(open(report.name))["tokens_per_second_median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive to train over")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    parser.add_argument("--json")
    options = parser.parse_args()
    os.makedirs(options.store, exist_ok=True)
    results = {}
    for setting in options.setting or SETTINGS:
        ours, peers = [], []
        for round_number in range(options.rounds):
            ours.append(ziggurat(options, setting))
            peers.append(pytorch(options, setting))
            print(f"{setting}: round {round_number + 1}: ziggurat {ours[-1]:.0f} tokens/s, PyTorch {peers[-1]:.0f}", flush=True)
        ratio = statistics.median(a / b for a, b in zip(ours, peers))
        results[setting] = {"ziggurat": ours, "pytorch": peers, "ratio": ratio, "bar": SETTINGS[setting][5]}
        print(f"{setting}: median ratio {ratio:.2f} (bar {SETTINGS[setting][5]:.2f}; {options.rounds} rounds)", flush=True)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
