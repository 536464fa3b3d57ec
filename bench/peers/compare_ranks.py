#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/compare_ranks.py: compares tokens/s and loss curves of `ziggurat train --nproc N` with PyTorch's DDP and
# FSDP2, in turn.
"""Compares stage 0 with DDP and stage 3 with FSDP2 (gloo), everything in RAM, with the same model, initial weights and
sequences, and one thread per rank. Hosts drift by tens of per cent within minutes, so only the ratio of neighbouring
runs counts.

    python3 bench/peers/compare_ranks.py --binary build/release/bin/ziggurat --data TEXT --store DIR [--python PYTHON]
        [--model gpt2-small] [--ranks 2] [--rounds 3] [--steps 8] [--stage 0] [--stage 3] [--json FILE]

Tokens/s of a run are the bytes of a step over the median seconds of its steps after the first two. The loss figure is
the largest relative difference of a step's loss. Both sides round to bf16 at other places, so it is not zero: 2e-5 to
2e-3 were measured. With --loss-limit, exits with 1 if the difference is larger; exits with 77 if PyTorch is not
installed.
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
STRATEGIES = {0: "ddp", 3: "fsdp2"}
BATCH, ACCUMULATE, CONTEXT = 2, 4, 256  # micro-batches of all ranks together
RECIPE = ["--lr", "6e-4", "--warmup", "10", "--weight-decay", "0.1", "--clip", "1.0"]


def train(options, store, *flags):
    command = [options.binary, "train", "--model", options.model, "--data", options.data, "--store", store, "--batch", str(BATCH),
               "--context", str(CONTEXT), "--eval-every", "0", "--betas", "0.9,0.95", "--placement", "all=host",
               "--device-memory", options.device_memory, "--host-memory", options.host_memory, *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def initial_weights(options, folder):
    """Exports the initial weights, after one step that changes nothing."""
    store, weights = os.path.join(folder, "init"), os.path.join(folder, "init.safetensors")
    train(options, store, "--accumulate", "1", "--steps", "1", "--lr", "0", "--weight-decay", "0", "--warmup", "0")
    subprocess.run([options.binary, "export", "--store", store, "--to", weights], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(store)
    return weights


def ziggurat(options, folder, stage):
    store, report = os.path.join(folder, "store"), os.path.join(folder, "report.json")
    train(options, store, "--accumulate", str(ACCUMULATE // options.ranks), "--steps", str(options.steps), "--nproc", str(options.ranks),
          "--zero-stage", str(stage), "--threads", "1", "--json", report, *RECIPE)
    shutil.rmtree(store)
    with open(report, encoding="utf-8") as file:
        steps = json.load(file)["steps"]
    tokens = BATCH * ACCUMULATE * CONTEXT
    return statistics.median(tokens / one["wall_s"] for one in steps[2:]), [one["loss"] for one in steps]


def pytorch(options, folder, stage, weights):
    report = os.path.join(folder, "peer.json")
    subprocess.run([options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks),
                    str(HERE / "pytorch_ranks.py"), "--data", options.data, "--strategy", STRATEGIES[stage], "--model",
                    options.model, "--init", weights, "--accumulate", str(ACCUMULATE), "--context", str(CONTEXT), "--steps",
                    str(options.steps), "--json", report, *RECIPE],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=3600)
    with open(report, encoding="utf-8") as file:
        run = json.load(file)
    return run["tokens_per_second_median"], [one["loss"] for one in run["steps"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True, help="a directory with room for two stores")
    parser.add_argument("--python", default=sys.executable, help="a Python interpreter that has PyTorch")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stage", type=int, action="append", choices=STRATEGIES, help="default: all")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--host-memory", default="3GiB", help="budget of host memory of each rank")
    parser.add_argument("--loss-limit", type=float, help="the largest relative difference of a step's loss")
    parser.add_argument("--json")
    options = parser.parse_args()
    if subprocess.run([options.python, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        print(f"skipped: {options.python} has no PyTorch")
        sys.exit(77)
    os.makedirs(options.store, exist_ok=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="compare-", dir=options.store) as folder:
        weights = initial_weights(options, folder)
        for stage in options.stage or STRATEGIES:
            ratios, differences = [], []
            for number in range(options.rounds):
                ours, our_loss = ziggurat(options, folder, stage)
                peers, peer_loss = pytorch(options, folder, stage, weights)
                ratios.append(ours / peers)
                differences.append(max(abs(a - b) / b for a, b in zip(our_loss, peer_loss)))
                print(f"stage {stage}: round {number + 1}: ziggurat {ours:.0f} tokens/s, {STRATEGIES[stage]} {peers:.0f}, "
                      f"losses differ by at most {differences[-1]:.1e}", flush=True)
            results[stage] = {"peer": STRATEGIES[stage], "ratios": ratios, "loss_difference": differences}
            print(f"stage {stage} against {STRATEGIES[stage]}: median ratio {statistics.median(ratios):.2f} "
                  f"({options.rounds} rounds)", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    worst = max(max(result["loss_difference"]) for result in results.values())
    if options.loss_limit is not None and worst > options.loss_limit:
        sys.exit(f"the losses differ by {worst:.1e}, more than {options.loss_limit:g}")


if __name__ == "__main__":
    main()
