# SPDX-License-Identifier: Apache-2.0
"""Measures how long a step takes with ziggurat.torch.offload(), beside a run without it and DeepSpeed.

    python bench/larger/speed.py --folder /fast/dir [--tokens 512] [--rounds 10] [--row NAME]...

A Llama of equal blocks in bf16 is trained in these rows, in turn:

  plain      without offload(), ziggurat.torch.AdamW with its state in memory
  again      the same once more: how far the machine lets two equal runs differ
  fits       offload(), parameters in memory, room for all units
  host       offload(), parameters in memory, room for three blocks
  nvme       offload(), parameters and state on the drive, room for three blocks
  nvme-clip  the same, with the norm of all gradients clipped
  ds-cpu     DeepSpeed, ZeRO-3, parameters and optimizer in memory
  ds-nvme    DeepSpeed, ZeRO-3, parameters and optimizer on the drive

Each row is a process that waits for its turn. A turn is one step and then --steps, which are timed; what is on its way to the
drive then comes down before the next row's turn. Rows on the drive have --host-memory for the state, less than a step's. Prints medians of the rounds' seconds a step and of the ratios in the same
round, each with the interval that holds the median at 95 % (by rank). Rows on the drive come beside the least time that the
bytes of a step and the computing leave (core/plan/step_bound.h): bytes by the engine's own count, forward and backward as the
row `plain` took them in that round, the drive's rate by fio after each round, with as many reads for a write.
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

ROWS = ["plain", "again", "fits", "host", "nvme", "nvme-clip", "ds-cpu", "ds-nvme"]
ON_DRIVE = ("nvme", "nvme-clip")
RATES = {"lr": 1e-4, "betas": (0.9, 0.95)}


def prepare(given: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Returns the function that makes the row's turn."""
    import torch
    from models import Shape, batch, built

    name = given.row[0]
    torch.set_num_threads(given.threads)
    shape = Shape.of(given.shape)
    model = built(shape).to(torch.bfloat16)
    if not given.checkpointing:
        model.gradient_checkpointing_disable()
    run = DeepSpeed(model, given, name) if name.startswith("ds") else Ours(model, given, name)
    made = 0

    def step() -> tuple[float, float, float]:
        nonlocal made
        tokens = batch(shape, made, given.tokens)
        made += 1
        begin = time.perf_counter()
        loss = run.forward(tokens)
        middle = time.perf_counter()
        run.backward(loss)
        end = time.perf_counter()
        run.finish()
        return middle - begin, end - middle, loss.item()

    def turn() -> dict[str, Any]:
        step()
        before = run.moved()
        begin, processor = time.perf_counter(), time.process_time()
        steps = [step() for _ in range(given.steps)]
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        moved = [(after - then) / given.steps for then, after in zip(before, run.moved(), strict=True)]
        run.drain()
        forwards, backwards, losses = zip(*steps, strict=True)
        return {
            "seconds": seconds / given.steps,
            "processor": processor / given.steps,
            "forward": statistics.mean(forwards),
            "backward": statistics.mean(backwards),
            "loss": losses[-1],
            "moved": moved,
            **run.said(),
        }

    return turn


class Ours:
    """A row with ziggurat's optimizer."""

    def __init__(self, model: Any, given: argparse.Namespace, name: str) -> None:
        import ziggurat.torch

        import torch

        self.name, self.model, self.torch = name, model, torch
        self.streams = name not in ("plain", "again")
        self.on_drive = name in ON_DRIVE
        if self.streams:
            memory = memory_for(model, 3 if name != "fits" else None)
            ziggurat.torch.offload(model, memory=memory, placement="nvme" if self.on_drive else "host", chunked_loss=False)
        place = f"nvme:{given.folder}/store" if self.on_drive else "host"
        its = {**RATES, "host_memory": given.host_memory} if self.on_drive else RATES
        self.optimizer = ziggurat.torch.AdamW(model.parameters(), placement=place, **its)
        self.plan = ziggurat.torch.plan

    def forward(self, tokens: Any) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def finish(self) -> None:
        if self.name == "nvme-clip":
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> tuple[float, float]:
        if not self.on_drive:
            return 0, 0
        figures = self.optimizer.figures()
        return figures["nvme_read_bytes"], figures["nvme_write_bytes"]

    def drain(self) -> None:
        if self.on_drive:
            self.optimizer.synchronize()

    def said(self) -> dict[str, Any]:
        if not self.on_drive:
            return {}
        clips = self.name == "nvme-clip"
        step = self.plan(self.model, tokens=1, clips=clips, recomputes=self.model.is_gradient_checkpointing).step
        leased = self.optimizer.figures()["host_budget_bytes"]
        return {"step": vars(step), "planned": [step.read, step.written], "leased": leased}


class DeepSpeed:
    """A row with DeepSpeed's engine."""

    def __init__(self, model: Any, given: argparse.Namespace, name: str) -> None:
        port = str(29531 + ROWS.index(name))
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, weight_decay=0.01, **RATES)
        largest = max(p.numel() for p in model.parameters())
        home: dict[str, Any] = {"device": name[3:], "pin_memory": False}
        if name == "ds-nvme":
            home["nvme_path"] = str(given.folder)
        zero = {
            "stage": 3,
            "offload_param": {**home, "buffer_count": 8, "buffer_size": largest},
            "offload_optimizer": {**home, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
            if name == "ds-nvme"
            else home,
            "sub_group_size": 10_000_000,
            "stage3_max_live_parameters": sum(p.numel() for p in model.model.layers[0].parameters()) * 3,
            "stage3_prefetch_bucket_size": sum(p.numel() for p in model.model.layers[0].parameters()),
        }
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": zero,
                "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True, "thread_count": 1},
                "zero_allow_untested_optimizer": True,
            },
        )

    def forward(self, tokens: Any) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        self.model.backward(loss)

    def finish(self) -> None:
        self.model.step()

    def moved(self) -> tuple[float, float]:
        """Returns what the process has read and written past the page cache."""
        found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(found["read_bytes"]), int(found["write_bytes"])

    def drain(self) -> None:
        pass

    def said(self) -> dict[str, Any]:
        return {}


def memory_for(model: Any, blocks: int | None) -> int:
    """Returns the memory that has room for so many blocks beside what is always there, or for all units."""
    from ziggurat._units.units import ROOT, divide

    division = divide(model, "auto", also_meta=True)
    if blocks is None:
        return 2 * sum(unit.size_bytes for unit in division.units)
    root = sum(unit.size_bytes for unit in division.units if unit.name == ROOT)
    return root + blocks * max(unit.size_bytes for unit in division.units)


def share_of_reads(given: argparse.Namespace) -> float:
    """Returns which part of the bytes that a step of the row `nvme` moves are read."""
    from models import Shape, built

    import torch
    import ziggurat.torch

    with torch.device("meta"):
        model = built(Shape.of(given.shape)).to(torch.bfloat16)
    step = ziggurat.torch.plan(
        model,
        tokens=1,
        memory=memory_for(model, 3),
        placement="nvme",
        optimizer_placement="nvme",
        recomputes=given.checkpointing,
    ).step
    return step.read / (step.read + step.written)


def mixed_rate(folder: Path, reads: float) -> float:
    """Returns the bytes a second, reads and writes together, that fio moves if `reads` of them are read."""
    return processes.drive_rate(folder, "1g", 4, "--rw=randrw", f"--rwmixread={round(100 * reads)}")


Said = list[list[dict[str, Any]]]  # of a row, by round and rank


def bounds(said: Said, plain: Said, rates: list[float]) -> list[float]:
    """Returns for each round the least time of a step."""
    from ziggurat._plan.step_bound import step_bound
    from ziggurat._plan.traffic import StepBytes

    found = []
    for (one,), (base,), rate in zip(said, plain, rates, strict=True):
        step = StepBytes(**one["step"])
        # By the engine's count, which is the plan's but for pieces that stay
        scale = sum(one["moved"]) / (step.read + step.written)
        found.append(step_bound(step, base["forward"], base["backward"], rate / scale, one["leased"]).seconds)
    return found


def report(figures: dict[str, Said], rates: list[float]) -> None:
    print("\n| row | seconds a step | over plain | processor's, over plain | over DeepSpeed | over the least time | MB read, written a step |")
    print("|---|---|---|---|---|---|---|")
    plain = figures.get("plain")
    for name, said in figures.items():
        peer = {"host": "ds-cpu", "nvme": "ds-nvme"}.get(name, "")
        cells = [
            interval([slowest(one) for one in said]),
            over(said, plain, "seconds"),
            over(said, plain, "processor"),
            over(said, figures.get(peer), "seconds"),
        ]
        least = ""
        if name in ON_DRIVE and plain is not None:
            least_s = bounds(said, plain, rates)
            ratio = interval([slowest(one) / its for one, its in zip(said, least_s, strict=True)])
            least = f"{ratio} of {statistics.median(least_s):.3f} s at {statistics.median(rates) / 1e9:.2f} GB/s"
        print(f"| {name} | " + " | ".join([*cells, least, moved(said)]) + " |")


def over(said: Said, base: Said | None, what: str) -> str:
    return "" if base is None else interval([ours[what] / its[what] for (ours,), (its,) in zip(said, base, strict=True)])


def moved(said: Said) -> str:
    ways = [statistics.median(one["moved"][way] for (one,) in said) / 1e6 for way in (0, 1)]
    if not any(ways):
        return ""
    planned = said[-1][0].get("planned")
    beside = "" if planned is None else " (plan {:.0f}, {:.0f})".format(*(its / 1e6 for its in planned))
    return f"{ways[0]:.0f}, {ways[1]:.0f}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive that is used for training")
    parser.add_argument("--shape", default="8x1024x2048", help="blocks x width x vocabulary")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--host-memory", default="256MiB", help="of rows on the drive, for the state that is on its way")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in backward")
    parser.add_argument("--row", action="append", choices=ROWS, help="rows to run (default: all)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        answer_turns(lambda: prepare(given))
        return
    libraries.require()
    shared = [f"--{key.replace('_', '-')}={getattr(given, key)}" for key in ("shape", "tokens", "steps", "threads", "host_memory")]
    shared += ["--checkpointing"] * given.checkpointing
    rates: list[float] = []
    with processes.folder_of_rows(given.folder, "speed") as (folder, rows):
        for name in [one for one in ROWS if not given.row or one in given.row]:
            (folder / name).mkdir()
            command = [sys.executable, "-W", "ignore", str(HERE / "speed.py"), *shared, f"--folder={folder / name}", f"--row={name}", "--worker"]
            rows.append(Row(name, [command], folder, [{"DS_ACCELERATOR": "cpu"}]))
        on_drive = any(row.name in ON_DRIVE for row in rows)
        reads = share_of_reads(given) if on_drive else 0.0
        report(alternate(rows, given.rounds, lambda: rates.append(mixed_rate(folder, reads)) if on_drive else None), rates)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
