#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_launchers_test.py: `train` under a launcher of others has the bits of `train --nproc 2`.
"""    cli_launchers_test.py ZIGGURAT mpirun|torchrun|srun

Exit code 77 (skipped) where the launcher is not installed. For srun a Slurm of one node is started, in a folder, and ended:
that takes root.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from launchers import PATIENCE_S, mpirun, one_node_slurm, require

STEPS = 4


class Run:
    def __init__(self, ziggurat, folder):
        self.ziggurat = ziggurat
        self.folder = folder
        self.count = 0
        text = folder / "text.txt"
        text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 400)
        self.train = [ziggurat, "train", "--model", "2x64x2", "--data", text, "--steps", STEPS, "--batch", 2, "--context", 32,
                      "--device-memory", "16MiB", "--host-memory", "32MiB", "--print-loss-bits"]

    def bits(self, launcher, *more, environment=None):
        """The fp32 loss of every step, and what was said."""
        self.count += 1
        command = [*launcher, *self.train, "--store", self.folder / f"store{self.count}", *more]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                              env={**os.environ, **(environment or {})})
        if done.returncode != 0:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        found = re.findall(r"step (\d+) loss-bits (0x[0-9a-f]+)", done.stdout)
        if len(found) != STEPS:
            sys.exit(f"{command}: {len(found)} losses of {STEPS}: rank 0 alone should print\n{done.stdout}")
        return found, done.stdout


def check(what, expected, got):
    if got != expected:
        sys.exit(f"{what}: {got}, where --nproc 2 has {expected}")
    print(f"{what}: the bits of --nproc 2")


def under_mpirun(run, expected):
    command, is_open_mpi = mpirun(2)
    # What MPI leaves behind at the end is not ours to count.
    os.environ["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    check("mpirun", expected, run.bits(command)[0])
    if (pathlib.Path(run.ziggurat).parent.parent / "lib" / "libziggurat_mpi.so").exists():
        got, said = run.bits(command, "--collectives", "mpi", "--zero-stage", "3")
        check("mpirun, through MPI", expected, got)
        if "ranks talk through messages of" not in said:
            sys.exit(f"it does not say that MPI carries them:\n{said}")
        # Each rank on one core of its own, where there are two.
        if is_open_mpi and os.cpu_count() > 1:
            check("mpirun, bound", expected, run.bits([*command, "--bind-to", "core"])[0])


def under_torchrun(run, expected):
    require("torchrun")
    check("torchrun", expected, run.bits(["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"])[0])


def under_srun(run, expected):
    with one_node_slurm(run.folder / "slurm") as environment:
        srun = ["srun", "--ntasks", "2", "--overcommit"]
        check("srun", expected, run.bits(srun, environment=environment)[0])


def main():
    ziggurat, launcher = sys.argv[1:]
    under = {"mpirun": under_mpirun, "torchrun": under_torchrun, "srun": under_srun}[launcher]
    with tempfile.TemporaryDirectory(dir=".", prefix="launchers-") as folder:
        run = Run(ziggurat, pathlib.Path(folder).resolve())
        expected, _ = run.bits([], "--nproc", 2)
        under(run, expected)


main()
