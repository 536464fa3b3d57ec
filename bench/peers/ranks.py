#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares ziggurat.torch among ranks of one core each with DDP, FSDP2 and DeepSpeed, in turn.

Trains GPT-2 small's shape over bytes in PyTorch on the CPU, with bf16 parameters and exchange, clip 1.0, no
recomputation, and gloo over loopback, in three contests whose rows alternate:

  ddp        DDP and fused AdamW over fp32 masters in RAM, on every rank
  ddp-host   DDP and ziggurat.torch.AdamW, placement="host"
  ddp-nvme   the same, placement="nvme:DIR"

  fsdp2      fully_shard and fused AdamW in RAM, fp32 shards gathered and reduced in bf16
  fsdp2-host fully_shard over bf16 parameters and ziggurat.torch.AdamW, placement="host"
  fsdp2-nvme the same, placement="nvme:DIR"

  ds-cpu     DeepSpeed, ZeRO-2, optimizer in RAM
  ds-nvme    DeepSpeed, ZeRO-3, optimizer on NVMe
  zds-cpu    the same script and settings with ziggurat.deepspeed
  zds-nvme   likewise

and `compute` in each: forward and backward alone on all ranks at once, which no row can beat.

    python3 bench/peers/ranks.py --data TEXT --store DIR [--ranks 2] [--tokens 512] [--rounds 10]
        [--steps 8] [--contest NAME]... [--row NAME]...

A rank is a process that has one core to itself. Prints for each row the median over the rounds of its seconds per step
(of the slowest rank), and of its speed relative to the contest's rival and to `compute` in the same round, with the
interval that holds the median at 95 % (by rank), beside the speed that we ask for. It also prints each rank's peak
resident and proportional memory, what was planned, and what exchange, memory and drive alone take for a step's bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_gpt2 import POSITIONS, VOCABULARY, shape_of
from turns import (
    RECORD_BYTES,
    UPDATE_BYTES,
    Row,
    alternate,
    drive_seconds,
    interval,
    slowest,
    speeds,
)

HERE = Path(__file__).resolve().parent
CONTESTS = {
    "ddp": ["compute", "ddp", "ddp-host", "ddp-nvme"],
    "fsdp2": ["compute", "fsdp2", "fsdp2-host", "fsdp2-nvme"],
    "deepspeed": ["compute", "ds-cpu", "ds-nvme", "zds-cpu", "zds-nvme"],
}
# The rival, and the speed relative to it that we ask for.
BARS = {
    "ddp-host": ("ddp", 1.0),
    "ddp-nvme": ("ddp", 0.95),
    "fsdp2-host": ("fsdp2", 1.0),
    "fsdp2-nvme": ("fsdp2", 1.0),
    "zds-cpu": ("ds-cpu", 1.2),
    "zds-nvme": ("ds-nvme", 1.5),
}

Said = Sequence[Sequence[dict[str, Any]]]


def params_of(model: str) -> int:
    layers, width, _ = shape_of(model)
    return layers * (12 * width**2 + 13 * width) + (VOCABULARY + POSITIONS + 2) * width


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def row_of(name: str, options: argparse.Namespace, folder: Path) -> Row:
    """Returns a row whose ranks wait for their first turn before they connect to each other."""
    store = folder / name
    store.mkdir()
    cores = sorted(os.sched_getaffinity(0))
    job = {"row": name, "store": str(store)}
    job |= {key: getattr(options, key) for key in ("data", "model", "steps", "tokens")}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands, environments = [], []
    for rank in range(options.ranks):
        text = json.dumps(job | {"core": cores[rank]})
        commands.append([sys.executable, str(HERE / "rank_rows.py"), text])
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
        environments.append(meeting | place | {"OMP_NUM_THREADS": "1"})
    return Row(name, commands, folder, environments)


def each_rank(said: Said, key: str) -> str:
    """Returns the largest figure of every rank, in MiB."""
    ranks = range(len(said[0]))
    return "/".join(str(max(one[rank][key] for one in said) >> 20) for rank in ranks)


def report(figures: dict[str, list[list[dict[str, Any]]]]) -> None:
    for name, said in figures.items():
        text = f"{name:10} {interval([slowest(one) for one in said])} s a step"
        rival, bar = BARS.get(name, ("", 0.0))
        if rival in figures:
            text += f"; speed over {rival} {interval(speeds(said, figures[rival]))} (asked: {bar})"
        if "compute" in figures and name != "compute":
            text += f"; over compute {interval(speeds(said, figures['compute']))}"
        text += f"; MiB of each rank: peak {each_rank(said, 'peak_bytes')}"
        text += f", proportional {each_rank(said, 'proportional_bytes')}"
        if said[0][0]["budget_bytes"]:
            text += f", planned {each_rank(said, 'budget_bytes')}"
        print(text, flush=True)
    if "compute" in figures:
        report_limits(figures["compute"])


def report_limits(said: Said) -> None:
    def seconds(key: str) -> str:
        return interval([max(rank[key] for rank in one) for one in said])

    mib = int(said[0][0]["exchanged_bytes"]) >> 20
    both = "all-to-all and all-gather"
    print(f"exchange   {seconds('all_reduce_seconds')} s for {mib} MiB by gloo's all-reduce")
    print(f"exchange   {seconds('slices_seconds')} s for {mib} MiB by gloo's {both}, as ours")
    part = f"{UPDATE_BYTES} bytes a parameter of a rank's part"
    print(f"memory     {seconds('memory_seconds')} s for {part}, by copying on all ranks at once")


def compete(names: Sequence[str], options: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=options.store))
    rows: list[Row] = []
    drive: list[float] = []

    def measure_drive() -> None:
        if any(name.endswith("nvme") for name in names):
            drive.append(drive_seconds(folder, RECORD_BYTES * params_of(options.model)))

    try:
        rows += [row_of(name, options, folder) for name in names]
        report(alternate(rows, options.rounds, measure_drive))
        if drive:
            every = "a parameter, of all ranks, read and written"
            print(f"drive      {interval(drive)} s for {RECORD_BYTES} bytes {every}", flush=True)
    finally:
        for row in rows:
            row.close()
        shutil.rmtree(folder, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=os.path.abspath, required=True)
    parser.add_argument("--store", required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="number of tokens of each rank in a step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="number of steps of a row in a round")
    parser.add_argument("--contest", action="append", choices=list(CONTESTS), help="default: all")
    rows = sorted({name for names in CONTESTS.values() for name in names})
    parser.add_argument(
        "--row", action="append", choices=rows, help="rows of the contests to run (default: all)"
    )
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if not 1 <= options.ranks <= cores:
        parser.error(f"--ranks {options.ranks}: each rank takes a core, but this machine has {cores}")
    return options


def main() -> None:
    options = parse_arguments()
    os.makedirs(options.store, exist_ok=True)
    for contest in options.contest or CONTESTS:
        names = [n for n in CONTESTS[contest] if not options.row or n in options.row]
        if names:
            print(f"contest: {contest}", flush=True)
            compete(names, options)


if __name__ == "__main__":
    main()
