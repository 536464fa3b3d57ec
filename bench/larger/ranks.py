# SPDX-License-Identifier: Apache-2.0
"""Measures how long a step takes on several ranks with ziggurat.torch.offload(), beside FSDP2 and DeepSpeed.

    python bench/larger/ranks.py --folder /fast/dir [--ranks 2] [--tokens 512] [--rounds 10] [--row NAME]...

A Llama of equal blocks is trained in bf16 with fp32 masters in these rows, in turn, each rank on a core of its own:

  whole      ziggurat.torch.AdamW: whole parameters on each rank, slices of the state (ZeRO-2)
  offload    offload(): slices of parameters and state in memory, room for three blocks (ZeRO-3)
  fsdp2      fully_shard() of each block, fp32 shards in memory, fused AdamW
  deepspeed  DeepSpeed, ZeRO-3, parameters and optimizer in memory

A row's ranks wait for its turn. A turn is one step and then --steps, which are timed. Prints medians of the rounds' seconds a
step of the slowest rank and of the ratios in the same round, each with the interval that holds the median at 95 % (by rank),
and what each rank has in memory at most, beside what plan() says where it is ours.
Exits with 77 if PyTorch, transformers or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
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

ROWS = ["whole", "offload", "fsdp2", "deepspeed"]
RATES = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}


def prepare(given: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """Returns the function that makes the row's turn."""
    import torch
    from models import Shape, batch, built, forget_peak, of_process

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shape = Shape.of(given.shape)
    before = of_process("VmRSS")
    model = built(shape)
    model.gradient_checkpointing_disable()
    make = {"fsdp2": Fsdp2, "deepspeed": DeepSpeed}.get(given.row[0], Ours)
    run = make(model, given)
    made = 0

    def step() -> float:
        nonlocal made
        tokens = batch(shape, world * made + rank, given.tokens)
        made += 1
        loss = run.model(input_ids=tokens, labels=tokens).loss
        run.backward(loss)
        run.finish()
        return loss.item()

    step()
    forget_peak()

    def turn() -> dict[str, Any]:
        step()
        torch.distributed.barrier()
        begin, processor = time.perf_counter(), time.process_time()
        losses = [step() for _ in range(given.steps)]
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        return {
            "seconds": seconds / given.steps,
            "processor": processor / given.steps,
            "loss": losses[-1],
            "peak": of_process("VmHWM") - before,
        }

    return turn


class Ours:
    def __init__(self, model: Any, given: argparse.Namespace) -> None:
        import ziggurat.torch
        from speed import memory_for

        import torch

        self.model = model.to(torch.bfloat16)
        if given.row[0] == "offload":
            ziggurat.torch.offload(self.model, memory=memory_for(self.model, 3), chunked_loss=False)
        self.optimizer = ziggurat.torch.AdamW(
            self.model.parameters(),
            model=self.model,
            group=torch.distributed.group.WORLD,
            exchange=given.exchange,
            **RATES,
        )

    def backward(self, loss: Any) -> None:
        loss.backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fsdp2:
    def __init__(self, model: Any, given: argparse.Namespace) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        import torch

        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATES)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed:
    def __init__(self, model: Any, given: argparse.Namespace) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        import torch

        model = model.to(torch.bfloat16)
        adam = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **RATES)
        home = {"device": "cpu", "pin_memory": False}
        block = sum(p.numel() for p in model.model.layers[0].parameters())
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": home,
                    "offload_optimizer": home,
                    "stage3_max_live_parameters": 3 * block,
                    "stage3_prefetch_bucket_size": block,
                },
                "zero_allow_untested_optimizer": True,
            },
        )

    def backward(self, loss: Any) -> None:
        self.model.backward(loss)

    def finish(self) -> None:
        self.model.step()


def report(figures: dict[str, list[list[dict[str, Any]]]]) -> None:
    print("\n| row | seconds a step | over FSDP2 | over DeepSpeed | processor's, all ranks | MB at most, a rank |")
    print("|---|---|---|---|---|---|")
    for name, said in figures.items():
        cells = [interval([slowest(one) for one in said])]
        for peer in ("fsdp2", "deepspeed"):
            base = figures.get(peer)
            cells.append(
                "" if base is None else interval([slowest(a) / slowest(b) for a, b in zip(said, base, strict=True)])
            )
        cells.append(interval([sum(one["processor"] for one in ranks) for ranks in said]))
        cells.append(f"{statistics.median(max(one['peak'] for one in ranks) for ranks in said) / 1e6:.0f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory for logs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="8x1024x2048", help="blocks x width x vocabulary")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row in a round")
    parser.add_argument("--exchange", default="torch", choices=["torch", "ziggurat"], help="what carries gradients")
    parser.add_argument("--row", action="append", choices=ROWS, help="rows to run (default: all)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        answer_turns(lambda: prepare(given))
        return
    libraries.require()
    shared = [f"--{key}={getattr(given, key)}" for key in ("ranks", "shape", "tokens", "steps", "exchange", "folder")]
    with processes.folder_of_rows(given.folder, "ranks") as (folder, rows):
        for name in [one for one in ROWS if not given.row or one in given.row]:
            command = [sys.executable, "-W", "ignore", str(HERE / "ranks.py"), *shared, f"--row={name}", "--worker"]
            port = str(free_port())
            job = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **job} for rank in range(given.ranks)]
            rows.append(Row(name, [command] * given.ranks, folder, ranks))
        report(alternate(rows, given.rounds, lambda: None))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
