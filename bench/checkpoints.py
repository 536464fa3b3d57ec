#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/checkpoints.py: what saves cost training, and how fast state leaves, comes back and is cut anew, beside the drive.
"""The ceiling is the drive's, measured with fio in the same run and as the work uses it: fresh files whose space is
reserved (an overwrite is faster on most filesystems), direct transfers of 4 MiB, four under way, synced at the end.

  save      the last step's state, training at rest: written from memory (optimizer=host: the ceiling is writing) and
            from the store (optimizer=nvme: reading it while writing as much)
  load      a checkpoint into a new store, reshard a store of 2 ranks into one of 3 in its own place: as much is read as
            written
  stall     seconds that updates wait for a save, with a target of twice the bandwidth that a step leaves free, and of a
            tenth of that: there the missing bandwidth is what must be waited for

Prints Markdown. Needs fio, and twice to six times the state's size on the drive."""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20


def fio(folder, size, *jobs):
    """Bytes a second of each of `jobs` (read or write), at the same time, in files of their own."""
    command = ["fio", "--output-format=json", "--direct=1", "--ioengine=io_uring", "--bs=4m", "--iodepth=4",
               f"--size={size}", "--end_fsync=1", f"--directory={folder}", "--fallocate=native", "--refill_buffers"]
    for job in jobs:
        command += [f"--name={job}", f"--rw={job}", f"--filename=limit-{job}"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [its[job]["bw_bytes"] for job, its in zip(jobs, found["jobs"])]


def ceilings(folder, size):
    """Of writing a fresh file, and of reading one while a fresh one is written."""
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
        self.rows = []

    def train(self, store, *arguments, ranks=1, steps):
        report = self.folder / "report.json"
        accumulate = 6 // ranks  # as many sequences a step whatever the ranks, so that any may go on
        shape = ["--context", str(self.options.context), "--batch", "1", "--accumulate", str(accumulate),
                 "--activation-checkpointing", "off", "--device-memory", self.options.device_memory]
        command = [self.options.ziggurat, "train", "--model", self.options.model, "--data", self.options.data,
                   "--store", str(self.folder / store), "--steps", str(steps), "--nproc", str(ranks), *shape,
                   "--json", str(report), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        return json.loads(report.read_text())

    def empty(self, *names):
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def row(self, name, rates, limits):
        """`rates` and `limits` of the same rounds, in bytes a second."""
        shares = [rate / limit for rate, limit in zip(rates, limits)]
        self.rows.append(f"| {name} | {statistics.median(rates) / 1e9:.2f} | {statistics.median(limits) / 1e9:.2f} | "
                         f"{statistics.median(shares):.2f} | {min(shares):.2f} to {max(shares):.2f} |")
        print(self.rows[-1], flush=True)

    def speeds(self):
        print("\n| | GB/s | ceiling, GB/s | share, median | rounds |\n|---|---|---|---|---|", flush=True)
        names = ["save, from memory", "save, from the store", "load", "reshard 2 to 3 ranks"]
        rates = {name: [] for name in names}
        limits = {name: [] for name in names}
        host = ["--host-memory", self.options.host_memory]
        for _ in range(self.options.rounds):
            self.empty("store", "target", "other", "two")
            last = self.train("store", "--placement", "params=host,grads=host,optimizer=host", *host, "--durable-every",
                              "0", "--checkpoint-dir", self.folder / "target", steps=1)["total"]["saves"][-1]
            size = last["size_bytes"]
            limit = ceilings(self.folder, size)
            rates[names[0]].append(size / last["seconds"])
            limits[names[0]].append(limit["write"])
            self.empty("store")
            small = ["--host-memory", self.options.small_host_memory]
            opened = self.train("other", *small, "--load", self.folder / "target", "--checkpoint-dir",
                                self.folder / "again", steps=2)
            rates[names[2]].append(size / opened["run"]["open_s"])
            limits[names[2]].append(limit["copy"])
            save = opened["total"]["saves"][-1]
            rates[names[1]].append(size / save["seconds"])
            limits[names[1]].append(limit["copy"])
            self.empty("other", "again")
            self.train("two", *small, "--load", self.folder / "target", ranks=2, steps=1)
            self.empty("target")
            cut = self.train("two", *small, "--resume", "reshard", ranks=3, steps=2)
            rates[names[3]].append(size / cut["run"]["open_s"])
            limits[names[3]].append(limit["copy"])
            self.empty("two")
        for name in names:
            self.row(name, rates[name], limits[name])
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(f"\nThe largest process had {children / 1024:.0f} MiB.", flush=True)

    def stalls(self):
        steps = 12
        host = ["--host-memory", self.options.small_host_memory, "--placement",
                f"params=host,grads=host,optimizer={self.options.stall_tier}"]
        self.empty("store")
        plain = self.train("store", *host, steps=steps)
        walls = [step["wall_s"] for step in plain["steps"][2:]]
        step_s = statistics.median(walls)
        self.empty("store")
        one = self.train("store", *host, "--checkpoint-dir", self.folder / "target", steps=1)
        size = one["total"]["saves"][-1]["size_bytes"]
        self.empty("store", "target")
        free = size / step_s  # what must leave before the sweep after the next comes to the first record
        print(f"\n{size / 1e6:.0f} MB a save, {step_s:.2f} s a step\n\n| target, MB/s | save, s | waited, s | of a step | "
              "missing bandwidth, s | waited of it |\n|---|---|---|---|---|---|", flush=True)
        for share in (2, 0.1):
            bandwidth = int(free * share)
            rows = []
            for _ in range(self.options.rounds):
                self.empty("store", "target")
                every = 4 if share > 1 else steps
                report = self.train("store", *host, "--checkpoint-dir", self.folder / "target", "--checkpoint-every",
                                    every, "--checkpoint-bandwidth", bandwidth, "--checkpoint-stall-max", "600",
                                    steps=steps if share > 1 else steps + 4)
                rows += [save for save in report["total"]["saves"][:-1] if "failure" not in save]
            stalled = statistics.median(save["stalled_s"] for save in rows)
            seconds = statistics.median(save["seconds"] for save in rows)
            missing = size / bandwidth - 2 * step_s
            print(f"| {bandwidth / 1e6:.0f} | {seconds:.2f} | {stalled:.3f} | {stalled / step_s * 100:.1f} % | "
                  + (f"{missing:.2f} | {stalled / missing:.2f} |" if share < 1 else "none | |"), flush=True)
        self.empty("store", "target")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ziggurat", default="build/release/bin/ziggurat")
    parser.add_argument("--data", default="README.md", help="any text of some length")
    parser.add_argument("--folder", help="on the drive that is measured (default: the working directory's)")
    parser.add_argument("--model", default="12x768x12")
    parser.add_argument("--context", default=32, type=int)
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--host-memory", default="3GiB", help="for all of the state")
    parser.add_argument("--small-host-memory", default="768MiB")
    parser.add_argument("--stall-tier", default="nvme", help="where optimizer state is while stalls are measured")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("parts", nargs="*", default=["speeds", "stalls"], help="speeds, stalls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or ".", prefix="checkpoints-") as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
