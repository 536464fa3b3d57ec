#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/tensors.py: what do a state's tensors cost the processor beside its bytes? The cost of a tensor must not grow
# with their number.
"""Prints, for each operation and number of tensors, the microseconds of user time per tensor, less those of the same
operation on 16 tensors. User time hardly depends on what else the machine does. The ceiling: the figure for 10,000
tensors equals that for 1,000.

  from-hf, inspect, verify, to-hf, diff   weights of 16 values each, by `ziggurat ckpt`
  new, open, save, load, foreign          an engine of parameters of 1,024 values with AdamW's state, by tensors_bench
  convert                                 its state in bf16-moments to fp32
  verify store, save store, reshard       that engine's store, by `ziggurat ckpt`

With --instructions it counts instructions with callgrind, in thousands per tensor, instead of time; these do not
depend on the machine's load. Prints Markdown."""

import argparse
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

FEW = 16


def write_weights(folder, count):
    """Writes a directory that transformers could have saved, of `count` tensors of 16 values."""
    folder.mkdir(parents=True)
    header = {"__metadata__": {"format": "pt"}}
    for t in range(count):
        header[f"model.layers.{t // 400}.mlp.experts.{t % 400}.weight"] = {
            "dtype": "F32", "shape": [4, 4], "data_offsets": [64 * t, 64 * (t + 1)]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in range(count):
            file.write(struct.pack("<16f", *range(t, t + 16)))


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.environment = dict(os.environ)
        if options.instructions:
            self.environment["ZIGGURAT_IO"] = "threads"  # callgrind does not support io_uring

    def command(self, *arguments):
        """Runs a command of `ziggurat ckpt`, and returns its cost."""
        words = [self.options.ziggurat, "ckpt", *map(str, arguments)]
        return self.measured(words, None)

    def engine(self, what, count, folder, *more):
        words = [self.options.tensors_bench, what, str(count), str(folder), *more]
        return self.measured(words, lambda out: float(out))

    def measured(self, words, said):
        if self.options.instructions:
            words = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *words]
        result, log = self.folder / "result", self.folder / "log"  # warnings go to the log
        with result.open("w") as out, log.open("w") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, env=self.environment)
            _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"{' '.join(words)}\n{result.read_text()}{log.read_text()}")
        if self.options.instructions:
            return int(re.search(r"Collected : (\d+)", log.read_text())[1])
        return said(result.read_text()) if said else usage.ru_utime

    def all(self, count):
        """Returns the cost of each operation with `count` tensors."""
        at = self.folder / str(count)
        shutil.rmtree(at, ignore_errors=True)
        write_weights(at / "hf", count)
        costs = {}
        costs["from-hf"] = self.command("from-hf", at / "hf", at / "weights")
        costs["inspect"] = self.command("inspect", at / "weights")
        costs["verify"] = self.command("verify", at / "weights")
        costs["to-hf"] = self.command("to-hf", at / "weights", at / "back")
        costs["diff"] = self.command("diff", at / "weights", at / "weights")
        if count <= self.options.engine_tensors:
            self.engines(count, at, costs)
        shutil.rmtree(at)
        return costs

    def engines(self, count, at, costs):
        engine = at / "engine"
        costs["new"] = self.engine("new", count, engine)
        costs["open"] = self.engine("open", count, engine)
        costs["save"] = self.engine("save", count, engine)
        costs["load"] = self.engine("load", count, engine)
        self.command("to-hf", engine / "saved", engine / "hf")
        costs["foreign"] = self.engine("foreign", count, engine)
        costs["verify store"] = self.command("verify", engine / "store")
        costs["save store"] = self.command("save", engine / "store", engine / "copies")
        costs["reshard"] = self.command("reshard", engine / "store", "--nproc", 2, "--host-memory", "64MiB")
        self.engine("new", count, engine, "bf16-moments")
        self.engine("save", count, engine, "bf16-moments")
        costs["convert"] = self.engine("load", count, engine)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ziggurat")
    parser.add_argument("tensors_bench")
    parser.add_argument("--tensors", default="1000,10000", help="the numbers of tensors, one for each column")
    parser.add_argument("--engine-tensors", type=int, default=10000, help="the largest number of tensors for which "
                                                                          "engines are measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args()
    counts = [int(count) for count in options.tensors.split(",")]
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        for _ in range(options.rounds):
            for count in [FEW, *counts]:
                for name, cost in bench.all(count).items():
                    found.setdefault(name, {}).setdefault(count, []).append(cost)
    unit = "thousand instructions" if options.instructions else "us"
    print(f"| {unit} a tensor | " + " | ".join(f"{count:,} tensors" for count in counts) + " | last / first |")
    print("|---|" + "---|" * (len(counts) + 1))
    scale = 1e-3 if options.instructions else 1e6
    for name, costs in found.items():
        middle = {count: statistics.median(its) for count, its in costs.items()}
        each = [(middle[count] - middle[FEW]) / (count - FEW) * scale for count in counts if count in middle]
        cells = [f"{cost:.1f}" for cost in each] + ["-"] * (len(counts) - len(each))
        growth = each[-1] / each[0] if each[0] > 0 else float("nan")
        print(f"| {name} | {' | '.join(cells)} | {growth:.2f} |", flush=True)


if __name__ == "__main__":
    main()
