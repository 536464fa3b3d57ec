# SPDX-License-Identifier: Apache-2.0
"""Asks optimizer.why_slow() what limits runs of offload(), makes each change that it proposes, and measures what that saves.

    python bench/larger/why.py --folder /fast/dir [--run NAME]... [--rounds 7]

The runs train a Llama of equal blocks in bf16, and are limited by different things:

  compute    all parameters and the state in memory, room for all units, many tokens
  memory     parameters on the drive, of which the norms' alone are trained, room for three blocks, few tokens
  update     parameters in memory, the state too, room for three blocks, few tokens
  drive      parameters and state on the drive, room for three blocks, little host memory, few tokens
  gradients  the same with gradients in files, and two backwards a step

Of each it prints the limit that why_slow() names, and for each change the time of a step's tokens that it expects beside the one
that is measured, as a share of the run without the change: medians of the rounds, in which the run and all its changes make some
steps in turn, with the interval that holds the median at 95 % (by rank). A faster drive cannot be tried. Exits with 77 if
PyTorch, transformers or ziggurat is missing, and with 1 if a proposed change makes no step shorter.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

import libraries  # noqa: E402
from turns import Row, alternate, answer_turns, interval  # noqa: E402


class Run(NamedTuple):
    memory: int = 0  # 0: room for all units; -N: for N blocks
    placement: str = "host"
    on_drive: bool = False
    host_memory: str | int = "128MiB"
    tokens: int = 64
    backwards: int = 1
    norms_alone: bool = False  # whether matrices are frozen


RUNS = {
    "compute": Run(tokens=768),
    "memory": Run(memory=-3, placement="nvme", on_drive=True, norms_alone=True),
    "update": Run(memory=-3),
    "drive": Run(memory=-3, placement="nvme", on_drive=True),
    "gradients": Run(memory=-3, placement="params=nvme,grads=nvme", on_drive=True, backwards=2),
}


def changed(run: Run, what: str) -> Run | None:
    """Returns the run with a change that why_slow() names, or None if it cannot be tried."""
    if found := re.match(r"(memory|host_memory)=(\d+), ", what):
        return run._replace(**{found[1]: int(found[2])})
    if what.startswith("twice as many backwards"):
        return run._replace(backwards=2 * run.backwards)
    if what.startswith("twice as many tokens"):
        return run._replace(tokens=2 * run.tokens)
    if what.startswith("grads=host"):
        return run._replace(placement=run.placement.replace("grads=nvme", "grads=host"))
    return None


def prepare(given: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Returns the function that makes the run's turn."""
    import ziggurat.torch
    from models import Shape, batch, built
    from speed import memory_for

    import torch

    torch.set_num_threads(given.threads)
    run, shape = Run(*json.loads(given.worker)), Shape.of(given.shape)
    model = built(shape).to(torch.bfloat16)
    model.gradient_checkpointing_disable()
    if run.norms_alone:
        for param in model.parameters():
            param.requires_grad_(param.dim() == 1)
    memory = run.memory if run.memory > 0 else memory_for(model, -run.memory or None)
    ziggurat.torch.offload(model, memory=memory, placement=run.placement, chunked_loss=False)
    place = f"nvme:{given.folder}/store" if run.on_drive else "host"
    host = {"host_memory": run.host_memory} if run.on_drive else {}
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement=place, **host)
    made = 0

    def step() -> float:
        nonlocal made
        for _ in range(run.backwards):
            tokens = batch(shape, made, run.tokens)
            made += 1
            loss = model(input_ids=tokens, labels=tokens).loss / run.backwards
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def turn() -> dict[str, Any]:
        step()
        optimizer.why_slow()  # what it counts begins anew
        begin = time.perf_counter()
        losses = [step() for _ in range(given.steps)]
        seconds = (time.perf_counter() - begin) / given.steps
        slow = optimizer.why_slow()
        optimizer.synchronize()
        return {
            "seconds": seconds,
            "tokens": run.tokens * run.backwards,
            "loss": losses[-1],
            "limit": slow.limit,
            "text": str(slow),
            "changes": {change.what: change.step_s / slow.step_s for change in slow.changes},
        }

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--shape", default="8x1024x2048", help="blocks x width x vocabulary")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--run", action="append", choices=list(RUNS), help="runs to look at (default: all)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        answer_turns(lambda: prepare(given))
        return
    libraries.require()
    given.folder.mkdir(parents=True, exist_ok=True)
    right = [look_at(name, given) for name in given.run or RUNS]
    sys.exit(not all(right))


def look_at(name: str, given: argparse.Namespace) -> bool:
    """Prints what limits the run, and what its changes save; returns whether all that can be tried save something."""
    folder = Path(tempfile.mkdtemp(prefix="why-", dir=given.folder))
    rows: list[Row] = []

    def start(label: str, run: Run) -> Row:
        place = folder / str(len(rows))
        place.mkdir()
        shared = [f"--{key}={getattr(given, key)}" for key in ("shape", "steps", "threads")]
        command = [sys.executable, "-W", "ignore", __file__, *shared, f"--folder={place}", f"--worker={json.dumps(run)}"]
        rows.append(Row(label, [command], place))
        return rows[-1]

    try:
        base = start(name, RUNS[name])
        first = [base.turn()[0] for _ in range(3)][-1]
        print(f"\n{name}: {first['text']}", flush=True)
        tried = {what: run for what in first["changes"] if (run := changed(RUNS[name], what)) is not None}
        for what, run in tried.items():
            start(what, run)
        figures = alternate(rows, given.rounds, lambda: None) if tried else {}
        right = len(figures) == (1 + len(tried) if tried else 0)
        print(f"\n| {name}: limited by {first['limit']} | expected | measured |\n|---|---|---|")
        for what in tried:
            ratios = [per_token(its) / per_token(own) for (its,), (own,) in zip(figures.get(what, []), figures[name], strict=False)]
            right = right and bool(ratios) and statistics.median(ratios) < 1
            print(f"| {what} | {first['changes'][what]:.2f} | {interval(ratios) if ratios else 'did not run'} |")
        return right
    finally:
        for row in rows:
            row.close()
        shutil.rmtree(folder, ignore_errors=True)


def per_token(said: dict[str, Any]) -> float:
    return said["seconds"] / said["tokens"]


if __name__ == "__main__":
    main()
