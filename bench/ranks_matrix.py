#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/ranks_matrix.py: runs the same training in every layout of ranks, ZeRO stage, placement and bucket size. Tells
# which losses have the same bits, and how far apart the layouts are.
"""Within a layout (how batches and layers are dealt out to ranks), every stage, placement and bucket size must give the
same bits. Between layouts sums are rounded at other places, so the loss must agree with one rank's within a
tolerance. The global batch is the same everywhere. Prints Markdown; exits with 1 if something differs that must
not."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field


@dataclass
class Layout:
    name: str
    ranks: int
    accumulate: int
    arguments: list = field(default_factory=list)
    variants: list = field(default_factory=list)


PLACEMENTS = ["all=device", "all=host", "all=nvme"]


def variants(stages, placements=PLACEMENTS, buckets=()):
    """Returns every stage with the first placement, every placement with the last stage, and every bucket size with the
    first and the last stage."""
    chosen = [["--zero-stage", str(stage), "--placement", placements[0]] for stage in stages]
    chosen += [["--zero-stage", str(stages[-1]), "--placement", placement] for placement in placements[1:]]
    chosen += [["--zero-stage", str(stages[0]), "--placement", placements[-1]]]
    for bucket in buckets:
        for stage in (stages[0], stages[-1]):
            chosen.append(["--zero-stage", str(stage), "--placement", "all=host", "--reduce-bucket-size", str(bucket)])
    return chosen


def layouts():
    four = variants([0, 1, 2, 3], ["all=host", "all=nvme"])
    return [
        Layout("1 rank", 1, 4, [], [["--placement", placement] for placement in PLACEMENTS]),
        Layout("dp 2", 2, 2, [], variants([0, 1, 2, 3], buckets=(1, 1000000))),
        Layout("dp 4", 4, 1, [], four + [["--strategy", "grad-op", "--placement", "all=host"],
                                         ["--zero-stage", "3", "--hpz", "2", "--placement", "all=host"],
                                         ["--zero-stage", "3", "--hpz", "2", "--placement", "all=nvme"]]),
        Layout("dp 2 x 2 (HYBRID_SHARD)", 4, 1, ["--strategy", "hybrid", "--shard-group", "2"],
               [["--placement", placement] for placement in ("all=host", "all=nvme")] +
               [["--zero-stage", "2", "--placement", "all=host"]]),
        Layout("tp 2", 2, 4, ["--tp", "2"], [["--placement", placement] for placement in PLACEMENTS]),
        Layout("tp 2, sp", 2, 4, ["--tp", "2", "--sp"], [["--placement", placement] for placement in PLACEMENTS]),
        Layout("dp 2 x tp 2", 4, 2, ["--tp", "2"], four),
        Layout("dp 2 x tp 2, sp", 4, 2, ["--tp", "2", "--sp"], four),
    ]


def run(arguments, layout, variant, folder):
    store = os.path.join(folder, "store")
    shutil.rmtree(store, ignore_errors=True)
    command = [arguments.ziggurat, "train", "--model", arguments.model, "--dtype", arguments.dtype,
               "--data", arguments.data, "--store", store, "--steps", str(arguments.steps),
               "--context", str(arguments.context), "--accumulate", str(layout.accumulate), "--print-loss-bits",
               "--host-memory", arguments.host_memory,
               "--device-memory", arguments.device_memory if layout.ranks <= 2 else arguments.device_memory_of_four]
    if layout.ranks > 1:
        command += ["--nproc", str(layout.ranks)]
    command += layout.arguments + variant
    begin = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr}")
    bits = re.findall(r"step \d+ loss-bits 0x([0-9a-f]{8})", result.stdout)
    losses = [float(loss) for loss in re.findall(r"^step \d+/\d+  loss ([0-9.]+)", result.stdout, re.M)]
    if len(bits) != arguments.steps:
        raise SystemExit(f"{' '.join(command)}\n{len(bits)} losses of {arguments.steps}\n{result.stdout}")
    return hashlib.sha256(" ".join(bits).encode()).hexdigest()[:12], losses, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ziggurat", default="build/dev/bin/ziggurat")
    parser.add_argument("--data", required=True, help="text to learn")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--host-memory", default="2GiB", help="budget of host memory of each rank")
    parser.add_argument("--device-memory", default="3GiB", help="budget of each rank if there are one or two")
    parser.add_argument(
        "--device-memory-of-four", default="1GiB", help="budget of each rank if there are four, whose state is not on "
                                                        "the device"
    )
    parser.add_argument("--tolerance", type=float, default=0.005, help="the largest relative difference of a step's "
                                                                       "losses")
    parser.add_argument("--only", default="", help="only layouts whose name contains this")
    arguments = parser.parse_args()
    wrong = 0
    reference = None
    print(f"{arguments.model} in {arguments.dtype}, {arguments.steps} steps of 4 x 2 x {arguments.context} bytes\n")
    print("| layout | stage, placement, bucket | bits of all losses | last loss | seconds |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="ranks-matrix-") as folder:
        for layout in layouts():
            if arguments.only not in layout.name:
                continue
            first = None
            for variant in layout.variants:
                bits, losses, seconds = run(arguments, layout, variant, folder)
                reference = reference or losses
                first = first or bits
                apart = max(abs(a / b - 1) for a, b in zip(losses, reference))
                good = bits == first and apart <= arguments.tolerance
                wrong += not good
                print(f"| {layout.name} | {' '.join(variant)} | {bits}{'' if bits == first else ' DIFFERS'} | "
                      f"{losses[-1]:.4f} ({apart:.1e} from one rank at most) | {seconds:.1f} |", flush=True)
    print(f"\n{'all as it must be' if wrong == 0 else f'{wrong} WRONG'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
