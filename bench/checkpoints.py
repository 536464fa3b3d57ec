#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/checkpoints.py: what do saves cost training, and how fast is state saved, loaded and resharded, compared with
# the drive?
"""Compares each rate with a ceiling: the drive's speed, measured with fio in the same run and in the way that the work uses the drive:
fresh files whose space is reserved (an overwrite is faster on most filesystems), direct transfers of 4 MiB, four in
flight, synced at the end.

  save      the last step's state, while training rests: written from memory (optimizer=host: the ceiling is writing) or
            from the store (optimizer=nvme: the ceiling is reading it while writing as much)
  load      a checkpoint into a new store, and resharding a store of 2 ranks into one of 3 in place: as much is read as
            is written
  stall     the seconds that updates wait for a save, with --checkpoint-bandwidth at twice what a save needs to end
            within a step (no wait is expected), and at a tenth of what it needs (updates wait for the rest of the save)

Prints Markdown. Needs fio, and twice to six times the state's size on the drive."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20


def fio(folder, size, *jobs):
    """Returns the bytes per second of each of `jobs` (read or write), which run at the same time in files of their
    own."""
    command = ["fio", "--output-format=json", "--direct=1", "--ioengine=io_uring", "--bs=4m", "--iodepth=4",
               f"--size={size}", "--end_fsync=1", f"--directory={folder}", "--fallocate=native", "--refill_buffers"]
    for job in jobs:
        command += [f"--name={job}", f"--rw={job}", f"--filename=limit-{job}"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [its[job]["bw_bytes"] for job, its in zip(jobs, found["jobs"])]


def ceilings(folder, size):
    """Returns the speed of writing a fresh file, and of reading one file while a fresh one is written."""
    def fresh():
        (folder / "limit-write").unlink(missing_ok=True)
    fresh()
    written, = fio(folder, size, "write")
    (folder / "limit-write").rename(folder / "limit-read")
    both = min(fio(folder, size, "read", "write"))
    (folder / "limit-read").unlink()
    fresh()
    return {"write": written, "copy": both}


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.peak_mib = 0  # the peak memory of the last command, without the ranks that it launched

    def run(self, command):
        """Runs a command; returns its output and its seconds. Ends with the output if the command failed."""
        log = self.folder / "log"
        begin = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"{' '.join(command)}\n{log.read_text()}")
        self.peak_mib = usage.ru_maxrss / 1024
        return log.read_text(), time.monotonic() - begin

    def train(self, store, *arguments, ranks=1, steps):
        report = self.folder / "report.json"
        accumulate = 6 // ranks  # gives a step as many sequences for any number of ranks, so that any number may resume
        shape = ["--context", str(self.options.context), "--batch", "1", "--accumulate", str(accumulate),
                 "--activation-checkpointing", "off", "--device-memory", self.options.device_memory]
        command = [self.options.ziggurat, "train", "--model", self.options.model, "--data", self.options.data,
                   "--store", str(self.folder / store), "--steps", str(steps), "--nproc", str(ranks), *shape,
                   "--json", str(report), *map(str, arguments)]
        self.run(command)
        return json.loads(report.read_text())

    def empty(self, *names):
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def row(self, name, rates, limits):
        """Prints a row; `rates` and `limits` are of the same rounds, in bytes per second."""
        shares = [rate / limit for rate, limit in zip(rates, limits)]
        print(f"| {name} | {statistics.median(rates) / 1e9:.2f} | {statistics.median(limits) / 1e9:.2f} | "
              f"{statistics.median(shares):.2f} | {min(shares):.2f} to {max(shares):.2f} |", flush=True)

    def speeds(self):
        names = ["save, from memory", "save, from the store", "load", "reshard 2 to 3 ranks"]
        rates = {name: [] for name in names}
        limits = {name: [] for name in names}
        peaks = {name: [] for name in names}
        memory_s = []  # seconds until the budgets' memory is filled, before a load begins

        def note(name, rate, limit):
            rates[name].append(rate)
            limits[name].append(limit)
            peaks[name].append(self.peak_mib)

        host = ["--host-memory", self.options.host_memory, "--placement", "params=host,grads=host,optimizer=host"]
        small = ["--host-memory", self.options.small_host_memory]
        for round_ in range(self.options.rounds):
            self.empty("store", "target", "other", "two", "again")
            run = self.train("store", *host, "--durable-every", "0", "--checkpoint-dir", self.folder / "target", steps=1)
            save = run["total"]["saves"][-1]
            size = save["size_bytes"]
            note(names[0], size / save["seconds"], ceilings(self.folder, size)["write"])
            self.empty("store")
            copy = ceilings(self.folder, size)["copy"]
            run = self.train("other", *small, "--load", self.folder / "target", "--checkpoint-dir", self.folder / "again",
                             steps=2)
            note(names[2], size / run["run"]["open_state_s"], copy)
            memory_s.append(run["run"]["open_s"] - run["run"]["open_state_s"])
            save = run["total"]["saves"][-1]
            note(names[1], size / save["seconds"], ceilings(self.folder, size)["copy"])
            self.empty("other", "again")
            self.train("two", *small, "--load", self.folder / "target", ranks=2, steps=1)
            self.empty("target")
            copy = ceilings(self.folder, size)["copy"]
            text, seconds = self.run([self.options.ziggurat, "ckpt", "reshard", str(self.folder / "two"), "--nproc", "3",
                                      *small])
            note(names[3], size / seconds, copy)
            self.empty("two")
            print(f"round {round_ + 1}: {size / 1e6:.0f} MB; {text.strip().splitlines()[-2]}", file=sys.stderr, flush=True)
        print(f"\n{size / 1e6:.0f} MB of state, {self.options.rounds} rounds\n\n"
              "| | GB/s | ceiling, GB/s | share, median | rounds |\n|---|---|---|---|---|", flush=True)
        for name in names:
            self.row(name, rates[name], limits[name])
        print(f"\nFilling the budgets' memory with pages before a load takes "
              f"{statistics.median(memory_s):.1f} s", flush=True)
        print("\nPeak memory: " + "; ".join(f"{name} {max(peaks[name]):.0f} MiB" for name in names), flush=True)

    def stalls(self):
        steps = 12
        target = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=self.options.target or self.folder)) / "target"
        host = ["--host-memory", self.options.small_host_memory, "--placement",
                f"params=host,grads=host,optimizer={self.options.stall_tier}"]
        self.empty("store")
        plain = self.train("store", *host, steps=steps)
        plain_mib = self.peak_mib
        walls = [step["wall_s"] for step in plain["steps"][2:]]
        step_s = statistics.median(walls)
        self.empty("store")
        one = self.train("store", *host, "--checkpoint-dir", target, steps=1)
        size = one["total"]["saves"][-1]["size_bytes"]
        self.empty("store", target)
        free = size / step_s  # what must be saved before the sweep after the next one reaches the first record
        print(f"\n{size / 1e6:.0f} MB a save, {step_s:.2f} s a step\n\n| target, MB/s | save, s | waited, s | of a step | "
              "missing bandwidth, s | waited of it |\n|---|---|---|---|---|---|", flush=True)
        for share in (2, 0.1):
            bandwidth = int(free * share)
            rows = []
            for _ in range(self.options.rounds):
                self.empty("store", target)
                every = 4 if share > 1 else steps
                report = self.train("store", *host, "--checkpoint-dir", target, "--checkpoint-every",
                                    every, "--checkpoint-bandwidth", bandwidth, "--checkpoint-stall-max", "600",
                                    steps=steps if share > 1 else steps + 4)
                saving_mib = self.peak_mib
                rows += [save for save in report["total"]["saves"][:-1] if "failure" not in save]
            stalled = statistics.median(save["stalled_s"] for save in rows)
            seconds = statistics.median(save["seconds"] for save in rows)
            missing = size / bandwidth - 2 * step_s
            print(f"| {bandwidth / 1e6:.0f} | {seconds:.2f} | {stalled:.3f} | {stalled / step_s * 100:.1f} % | "
                  + (f"{missing:.2f} | {stalled / missing:.2f} |" if share < 1 else "none | |"), flush=True)
        print(f"\nPeak memory in the same budget: {plain_mib:.0f} MiB without saves, {saving_mib:.0f} MiB with them", flush=True)
        self.empty("store", target)
        target.parent.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ziggurat", default="build/release/bin/ziggurat")
    parser.add_argument("--data", default="README.md", help="the text file to train on; it holds more bytes than --context")
    parser.add_argument("--folder", help="a directory on the drive that is measured (default: the working directory)")
    parser.add_argument(
        "--target", help="where the saves of stalls are written (default: the folder's drive, which steps use too)"
    )
    parser.add_argument("--model", default="12x768x12")
    parser.add_argument("--context", default=32, type=int)
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--host-memory", default="3GiB", help="a budget that holds the whole state")
    parser.add_argument("--small-host-memory", default="768MiB")
    parser.add_argument("--stall-tier", default="nvme", help="where the optimizer's state is kept while stalls are "
                                                             "measured")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("parts", nargs="*", default=["speeds", "stalls"], help="speeds, stalls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or ".", prefix="checkpoints-") as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
