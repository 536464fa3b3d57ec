# SPDX-License-Identifier: Apache-2.0
"""Trains a model with a state of many times the memory that a control group lets the process have.

    python bench/larger/in_a_group.py --folder /fast/dir [--group 1280] [--model 22x2048x32000]

Within the group: the model is built in files, trained for three steps, saved, the store is removed, and another process
loads what was saved and computes the next loss. Without the group the same runs again. Prints the most memory that the
group held (page cache included), the disk that was used, and whether the losses have the same bits. Needs root, for the group,
and 22 bytes of disk for a parameter twice over. Exits with 77 if PyTorch, transformers or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import libraries
import processes

GIB = 1 << 30
MIB = 1 << 20
STEPS = 3


class Group:
    """A control group of memory, of version 1 or 2 (cgroups(7))."""

    def __init__(self, limit_bytes: int) -> None:
        first = Path("/sys/fs/cgroup/memory")
        self._is_first = first.is_dir()
        self.path = (first if self._is_first else Path("/sys/fs/cgroup")) / f"ziggurat-{os.getpid()}"
        self.path.mkdir()
        limit = "memory.limit_in_bytes" if self._is_first else "memory.max"
        (self.path / limit).write_text(str(limit_bytes))
        more = self.path / "memory.swap.max"
        if more.exists():
            more.write_text("0")

    def of(self, process: int) -> None:
        (self.path / "cgroup.procs").write_text(str(process))

    @property
    def peak_bytes(self) -> int:
        return int((self.path / ("memory.max_usage_in_bytes" if self._is_first else "memory.peak")).read_text())

    def close(self) -> None:
        self.path.rmdir()


@contextmanager
def disk_used(folder: Path) -> Iterator[list[int]]:
    """Gives the most bytes by which the drive became fuller, files without names too; others that write count as well."""
    before = shutil.disk_usage(folder).free
    most = [0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            most[0] = max(most[0], before - shutil.disk_usage(folder).free)

    looks = threading.Thread(target=look)
    looks.start()
    try:
        yield most
    finally:
        ended.set()
        looks.join()


def train(given: argparse.Namespace) -> None:
    """The process in the group: trains and saves, or loads; prints a line of JSON for each loss."""
    import ziggurat.torch
    from models import Shape, batch, built, of_process

    import torch

    torch.set_num_threads(2)
    folder, shape = given.folder, Shape.of(given.model)
    begin = time.monotonic()

    def say(**what: object) -> None:
        print(json.dumps({**what, "seconds": round(time.monotonic() - begin, 1), "anonymous": of_process("RssAnon")}), flush=True)

    with ziggurat.torch.streamed_init(folder, dtype=torch.bfloat16):
        model = built(shape).to(torch.bfloat16)
    say(did="built", parameters=sum(p.numel() for p in model.parameters()))
    ziggurat.torch.offload(model, memory=f"{given.memory}MiB", placement="params=nvme,grads=nvme")
    optimizer = ziggurat.torch.AdamW(
        model.named_parameters(), lr=1e-3, placement=f"nvme:{folder}/store", host_memory=f"{given.host_memory}MiB"
    )
    first = 0
    if given.run == "load":
        first = ziggurat.torch.load_checkpoint(folder / "saved", optimizer, model).step
        say(did="loaded", step=first)
    last = {"train": STEPS, "load": STEPS + 1, "straight": STEPS + 1}[given.run]
    for step in range(first, last):
        tokens = batch(shape, step, given.tokens)
        loss = model(input_ids=tokens, labels=tokens).loss
        if step < STEPS:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        say(did="step" if step < STEPS else "forward", step=step + 1, loss=loss.item().hex())
    if given.run == "train":
        ziggurat.torch.save_checkpoint(folder / "saved", optimizer, model)
        say(did="saved")
    optimizer.close()


def child(given: argparse.Namespace, run: str, group: Group | None) -> dict[int, str]:
    """Returns the losses of each step."""
    command = [sys.executable, __file__, "--run", run, "--folder", str(given.folder), "--model", given.model]
    for name in ("memory", "host_memory", "tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    enter = (lambda: group.of(os.getpid())) if group is not None else None
    return {said["step"]: said["loss"] for said in processes.said_by(command, run, enter) if "loss" in said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--model", default="22x2048x32000", help="blocks x width x vocabulary")
    parser.add_argument("--group", type=int, default=1280, help="memory of the group, in MiB")
    parser.add_argument("--memory", type=int, default=480, help="of offload(), in MiB")
    parser.add_argument("--host-memory", type=int, default=128, help="of the optimizer's state, in MiB")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--run", choices=["train", "load", "straight"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        train(given)
        return
    libraries.require()
    given.folder = given.folder / f"in-a-group-{os.getpid()}"
    given.folder.mkdir(parents=True)
    group = Group(given.group * MIB)
    try:
        with disk_used(given.folder) as disk:
            losses = child(given, "train", group)
            shutil.rmtree(given.folder / "store")
            losses |= child(given, "load", group)
        peak = group.peak_bytes
        shutil.rmtree(given.folder)
        given.folder.mkdir()
        straight = child(given, "straight", None)
    finally:
        group.close()
        shutil.rmtree(given.folder, ignore_errors=True)
    print(f"memory of the group   {peak / MIB:8.0f} MiB at most, limit {given.group}, page cache included")
    print(f"disk                  {disk[0] / 1e9:8.1f} GB at most")
    print(f"losses                {'the same bits' if losses == straight else f'differ: {losses} {straight}'}")
    sys.exit(losses != straight)


if __name__ == "__main__":
    main()
