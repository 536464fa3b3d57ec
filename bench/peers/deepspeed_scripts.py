#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs training scripts written for DeepSpeed under DeepSpeed and under ziggurat.deepspeed, and prints both curves.

    python3 bench/peers/deepspeed_scripts.py --data TEXT... [--script NAME]... [--steps N] [--folder DIR]

The scripts are those of tests/integrations/python/deepspeed_scripts, with one line changed. Both libraries run on the
CPU, in bf16. Prints losses side by side, how far apart losses, rates and norms are, and the final losses. What the
runs wrote stays in --folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests/integrations/python"
sys.path.insert(0, str(TESTS))

from script_runs import (  # noqa: E402
    DEEPSPEED,
    OURS,
    RANKS,
    Line,
    difference,
    launch,
    prepare,
    steps_of,
)


def print_beside(theirs: list[Line], ours: list[Line]) -> None:
    print(f"{'step':>6} {'DeepSpeed':>10} {'ours':>10} {'difference':>11}")
    for a, b in zip(theirs, ours, strict=True):
        key = "loss" if "loss" in a else "eval_loss"
        mark = "" if key == "loss" else "  evaluation"
        print(f"{a['step']:6.0f} {a[key]:10.4f} {b[key]:10.4f} {b[key] - a[key]:+11.1e}{mark}")


def compare(script: str, data: list[Path], arguments: list[str], folder: Path) -> None:
    print(f"{script}: {RANKS[script]} rank{'s' if RANKS[script] > 1 else ''}", flush=True)
    runs = {}
    for library in (DEEPSPEED, OURS):
        place = folder / f"{script}-{library}"
        prepare(script, library, place)
        runs[library] = launch(script, place, data, *arguments)
    print_beside(runs[DEEPSPEED], runs[OURS])
    found = difference(runs[DEEPSPEED], runs[OURS])
    print(f"differences of the losses: median {found.loss_median:.1e}, largest {found.loss_max:.1e}")
    print(f"differences of the norms: median {found.norm_median:.1e}, relative to DeepSpeed's")
    print(f"differences of the rates: largest {found.rate_max:.1e}, relative to DeepSpeed's")
    last = [steps_of(runs[library])[-1]["loss"] for library in (DEEPSPEED, OURS)]
    print(f"final loss: {last[0]:.4f} DeepSpeed, {last[1]:.4f} ours\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--script", action="append", choices=list(RANKS), help="default: all")
    parser.add_argument("--steps", type=int, help="number of steps (default: the script's own number)")
    parser.add_argument("--folder", type=Path, help="folder for what the runs write (default: a temporary folder)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deepspeed-scripts-"))
    arguments = [] if options.steps is None else ["--steps", str(options.steps)]
    data = [path.resolve() for path in options.data]
    for script in options.script or RANKS:
        compare(script, data, arguments, folder.resolve())


if __name__ == "__main__":
    main()
