# SPDX-License-Identifier: Apache-2.0
"""Measures what a checkpoint in the background costs the steps beside it, and how long it takes.

    python bench/background_save.py --folder /fast/dir [--placement nvme|host] [--rounds 7]

Rounds alternate: some steps alone, then steps while a checkpoint is written at half of the drive's
rate, which is measured first. The limits: a step beside a save can be as fast as one alone, and a
save takes its bytes at that rate. Exits with 77 if PyTorch or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

try:
    import torch

    import ziggurat.torch
    from ziggurat.torch import save_checkpoint
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

_BLOCK = 8 << 20


def write_rate(folder: Path, size_bytes: int) -> float:
    """Bytes a second that one writer gets past the page cache, synced."""
    path = folder / "rate"
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    try:
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    except OSError:
        file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    begin = time.perf_counter()
    for _ in range(size_bytes // _BLOCK):
        os.write(file, block)
    os.fsync(file)
    took = time.perf_counter() - begin
    os.close(file)
    path.unlink()
    return size_bytes / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--placement", choices=["nvme", "host"], default="nvme")
    parser.add_argument("--layers", type=int, default=24, help="matrices of 1024 x 1024")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps alone in a round")
    given = parser.parse_args()
    folder = given.folder / f"background-save-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        measure(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(given: argparse.Namespace, folder: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(given.layers)])
    place = "host" if given.placement == "host" else f"nvme:{folder}/store"
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement=place)
    batch = torch.randn(256, 1024)

    def step() -> float:
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    for _ in range(4):
        step()
    drive = write_rate(folder, 1 << 30)
    bytes_saved = 12 * sum(p.numel() for p in model.parameters())
    alone: list[float] = []
    beside: list[float] = []
    took: list[float] = []
    ends: list[float] = []
    for _ in range(given.rounds):
        alone += [step() for _ in range(given.steps)]
        begin = time.perf_counter()
        save = save_checkpoint(
            folder / "saved", optimizer, model, background=True, bandwidth=drive / 2, keep_last=1
        )
        ended = threading.Thread(target=lambda: (save.wait(), ends.append(time.perf_counter())))
        ended.start()
        while not save.done:
            beside.append(step())
        ended.join()
        took.append(ends.pop() - begin)
    optimizer.close()
    ideal = bytes_saved / (drive / 2)
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"placement {given.placement}, {bytes_saved / 1e6:.0f} MB of state, {given.rounds} saves")
    print(f"the drive writes {drive / 1e6:.0f} MB/s; a save may write half of that")
    print(f"step alone           {statistics.median(alone):8.3f} s (median of {len(alone)})")
    print(
        f"step beside a save   {statistics.median(beside):8.3f} s (median of {len(beside)}), "
        f"{ratio:.2f} of alone (limit 1.00), the longest {max(beside):.3f} s"
    )
    print(
        f"save                 {statistics.median(took):8.3f} s (median), "
        f"{statistics.median(took) / ideal:.2f} of what its bytes take ({ideal:.3f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
