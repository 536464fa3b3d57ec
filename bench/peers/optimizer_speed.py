#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/optimizer_speed.py: compares the parameters/s of our AdamW with PyTorch's fused AdamW and DeepSpeed's CPU
# Adam, in turn.
"""For each row and number of threads, our process and one of each peer step in turn over as many parameters. A round's
ratio is the peer's time over our time beside it, and figures are medians. Hosts drift by tens of per cent within
minutes, so only ratios count.

    optimizer_speed.py BUILD/bin/optimizer_turns [--params 100M] [--threads 1,2] [--rounds 7] [--rows fp32,mixed,bf16]
        [--python PYTHON] [--json FILE]

The rows are fp32 (parameters and gradients in fp32), mixed (an fp32 step with gradients and parameters in bf16: we do
it in one pass, the peers copy before and after), and bf16 (parameters, gradients and moments). A peer that cannot be
imported or built is named.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PEERS = ("torch", "deepspeed")
SCALES = {"K": 10**3, "M": 10**6, "B": 10**9}


def peer_step(peer, row, params, threads):
    """Returns a function that makes one step of `peer` on tensors of its own."""
    import torch
    torch.set_num_threads(threads)
    state = torch.bfloat16 if row == "bf16" else torch.float32
    given = torch.float32 if row == "fp32" else torch.bfloat16
    param = torch.nn.Parameter((0.02 * torch.randn(params)).to(state))
    grad = (2e-4 * torch.randn(params)).to(given)
    settings = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    if peer == "torch":
        optimizer = torch.optim.AdamW([param], fused=True, **settings)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        optimizer = DeepSpeedCPUAdam([param], adamw_mode=True, fp32_optimizer_states=row != "bf16", **settings)
    if row != "mixed":
        param.grad = grad
        return optimizer.step
    param.grad = torch.zeros(params)
    out = torch.zeros(params, dtype=given)

    def step():
        param.grad.copy_(grad)
        optimizer.step()
        with torch.no_grad():
            out.copy_(param)
    return step


def serve(peer, row, params, threads):
    """Does for a peer what optimizer_turns does for us. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    step = peer_step(peer, row, params, threads)
    step()
    print("ready", params, file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, file=answers, flush=True)


class Side:
    """A process that makes a step when asked."""

    def __init__(self, command, threads):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE if "--serve" in command else None, text=True, env=environment)
        first = self.process.stdout.readline().split()
        self.params = int(first[1]) if first[:1] == ["ready"] else 0
        self.why_not = ""
        if not self.params:
            said = (self.process.communicate()[1] or "").strip().splitlines()
            self.why_not = said[-1] if said else f"exit code {self.process.returncode}"

    def seconds_a_param(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()) / self.params

    def close(self):
        self.process.kill()
        self.process.communicate()


def measure(options, row, threads):
    """Returns the median parameters/s of each side, and the median ratio of the peers' times over ours."""
    counts = [str(options.params), str(threads)]
    sides = {"ours": Side([options.program, row, *counts], threads)}
    for peer in PEERS:
        sides[peer] = Side([options.python, os.path.abspath(__file__), "--serve", peer, row, *counts], threads)
    running = {name: side for name, side in sides.items() if side.params}
    if "ours" not in running:
        sys.exit(f"{options.program}: {sides['ours'].why_not}")
    times = {name: [] for name in running}
    for _ in range(options.rounds):
        for name, side in running.items():
            times[name].append(side.seconds_a_param())
    for side in running.values():
        side.close()
    result = {"row": row, "threads": threads, "absent": {n: s.why_not for n, s in sides.items() if not s.params}}
    for name in running:
        ratios = [theirs / ours for theirs, ours in zip(times[name], times["ours"])]
        result[name] = {"params_per_s": 1 / statistics.median(times[name]), "time_over_ours": statistics.median(ratios)}
    return result


def show(result):
    cells = [f"{result['row']:6} {result['threads']:>7} {result['ours']['params_per_s'] / 1e6:>10.0f}"]
    for peer in PEERS:
        if peer in result:
            cells.append(f"{result[peer]['params_per_s'] / 1e6:>10.0f} {result[peer]['time_over_ours']:>6.2f}")
        else:
            cells.append(f"{'absent':>10} {'':>6}")
    print(" ".join(cells), flush=True)


def count_of(text):
    return int(float(text[:-1]) * SCALES[text[-1]]) if text[-1] in SCALES else int(text)


def main():
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--params", type=count_of, default=100_000_000)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=["fp32", "mixed", "bf16"])
    parser.add_argument("--python", default=sys.executable, help="has the peers")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(f"AdamW of {options.params / 1e6:.0f} M parameters, in Mparam/s, with the ratio of each peer's time to ours; "
          f"medians of {options.rounds} rounds")
    print(f"{'row':6} {'threads':>7} {'ours':>10} " + " ".join(f"{peer:>10} {'ratio':>6}" for peer in PEERS))
    results = []
    for row in options.rows:
        for threads in options.threads:
            results.append(measure(options, row, threads))
            show(results[-1])
    for peer in PEERS:
        reasons = {r["absent"][peer] for r in results if peer in r["absent"]}
        for why in sorted(reasons):
            print(f"{peer} was absent: {why}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
