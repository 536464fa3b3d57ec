# SPDX-License-Identifier: Apache-2.0
"""Measures what offload(activations="nvme") saves in memory and costs in time, beside a run that keeps all in memory.

    python bench/larger/activations.py --folder /fast/dir [--tokens 2048] [--rounds 10] [--row NAME]...

A Llama of equal blocks is trained in these rows, in turn, by ziggurat.torch.AdamW with its state in memory; in bf16, or
--dtype float32 where the processor has no products in bf16:

  plain          without offload()
  again          the same once more: how far the machine lets two equal runs differ
  checkpointing  without offload(), and blocks computed again in backward
  drive          offload() with room for all units, and activations="nvme" with --activation-memory

A row's turn is one step and then --steps, which are timed; its peak is the most anonymous memory in those steps less what the
process had when a first, small step was made and what that made was let go. The memory for activations counts. Prints medians of the rounds with the
interval that holds the median at 95 % (by rank), the bytes that crossed the drive in a step, and the drive's rate by fio.
Exits with 77 if PyTorch, transformers or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

import libraries  # noqa: E402
import processes  # noqa: E402
from turns import Row, alternate, answer_turns, interval, slowest  # noqa: E402

ROWS = ["plain", "again", "checkpointing", "drive"]


def prepare(given: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Returns the function that makes the row's turn."""
    import torch
    import ziggurat.torch
    from models import Shape, batch, built, forget_peak, of_process
    from speed import memory_for
    from ziggurat._activations.activations import IN_PLACE
    from ziggurat._memory.memory import bytes_of, return_freed

    name = given.row[0]
    torch.set_num_threads(given.threads)
    shape = Shape.of(given.shape)
    model = built(shape).to(getattr(torch, given.dtype))
    if name != "checkpointing":
        model.gradient_checkpointing_disable()
    if name == "drive":
        ziggurat.torch.offload(
            model,
            memory=memory_for(model, None),
            chunked_loss=False,
            activations=f"nvme:{given.folder}",
            activation_memory=given.activation_memory,
        )
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4)
    made = 0

    def step(tokens: int) -> float:
        nonlocal made
        text = batch(shape, made, tokens)
        made += 1
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(16)
    return_freed()
    # Their part that is not PyTorch's is there from the first forward on, and is what activations take.
    window = int(bytes_of("activation_memory", given.activation_memory) * (1 - IN_PLACE))
    begun = of_process("RssAnon") - (window if name == "drive" else 0)

    def turn() -> dict[str, Any]:
        step(given.tokens)
        return_freed()
        forget_peak()
        before = optimizer.figures()
        begin, processor = time.perf_counter(), time.process_time()
        losses = [step(given.tokens) for _ in range(given.steps)]
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        after = optimizer.figures()
        moved = [
            (after.get(key, 0) - before.get(key, 0)) / given.steps
            for key in ("activations_read_bytes", "activations_written_bytes")
        ]
        return {
            "seconds": seconds / given.steps,
            "processor": processor / given.steps,
            "loss": losses[-1],
            "peak": of_process("VmHWM") - (of_process("VmRSS") - of_process("RssAnon")) - begun,
            "moved": moved,
        }

    return turn


def report(figures: dict[str, list[list[dict[str, Any]]]], rate: float) -> None:
    print(
        "\n| row | seconds a step | over plain | processor's | over plain | MB at most beyond a small step | over plain "
        "| MB read, written a step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    plain = figures.get("plain")
    for name, said in figures.items():
        cells = [interval([slowest(one) for one in said])]
        for what in ("seconds", "processor", "peak"):
            if what != "seconds":
                middle = statistics.median(one[what] for (one,) in said)
                cells.append(f"{middle / 1e6:.0f}" if what == "peak" else f"{middle:.2f}")
            ratios = [] if plain is None else [a[what] / b[what] for (a,), (b,) in zip(said, plain, strict=True)]
            cells.append(interval(ratios) if ratios else "")
        moved = [statistics.median(one["moved"][way] for (one,) in said) / 1e6 for way in (0, 1)]
        cells.append("{:.0f}, {:.0f}".format(*moved) if any(moved) else "")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nfio, half of it reads: {rate / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--shape", default="8x1024x2048", help="blocks x width x vocabulary")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a row in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--activation-memory", default="320MiB", help="of the row `drive`")
    parser.add_argument("--row", action="append", choices=ROWS, help="rows to run (default: all)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        answer_turns(lambda: prepare(given))
        return
    libraries.require()
    keys = ("shape", "tokens", "steps", "threads", "dtype", "activation_memory")
    shared = [f"--{key.replace('_', '-')}={getattr(given, key)}" for key in keys]
    with processes.folder_of_rows(given.folder, "activations") as (folder, rows):
        for name in [one for one in ROWS if not given.row or one in given.row]:
            (folder / name).mkdir()
            command = [sys.executable, "-W", "ignore", os.fspath(HERE / "activations.py"), *shared]
            rows.append(Row(name, [[*command, f"--folder={folder / name}", f"--row={name}", "--worker"]], folder))
        figures = alternate(rows, given.rounds, lambda: None)
        report(figures, processes.drive_rate(folder, "1g", 4, "--rw=randrw", "--rwmixread=50"))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
