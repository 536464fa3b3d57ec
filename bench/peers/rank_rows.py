# SPDX-License-Identifier: Apache-2.0
"""Runs one rank of one row of ranks.py: the model, the exchange of gradients, and the update of
parameters."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CONTEXT = 256
RATE, DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0
PIECE_BYTES = 25 << 20  # bytes exchanged at a time: a bucket of DDP


class Job:
    """A row: how it makes a step from a batch."""

    def step(self, tokens: Any, targets: Any) -> float:
        raise NotImplementedError

    def settle(self) -> None:
        """Waits for work that is still in progress, so that it does not run beside the next row."""

    def budget_bytes(self) -> int:
        """Returns the bytes that were planned of this rank's memory, or 0 if nothing was
        planned."""
        return 0

    def limits(self) -> dict[str, float]:
        """Returns what is measured of the machine beside the row."""
        return {}


class Compute(Job):
    """Runs forward and backward of every rank at once, with no exchange and no update."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch.distributed

        self._model = model.bfloat16()
        torch.distributed.init_process_group("gloo")

    def step(self, tokens: Any, targets: Any) -> float:
        loss = self._model(tokens, targets, False)
        self._model.zero_grad()
        loss.backward()
        return float(loss.item())

    def limits(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist
        from turns import memory_seconds

        count = sum(p.numel() for p in self._model.parameters())
        ranks = dist.get_world_size()
        pieces = -(-2 * count // PIECE_BYTES)
        rows = torch.zeros(ranks, PIECE_BYTES // 2 // ranks, dtype=torch.bfloat16)
        other = torch.zeros_like(rows)
        own = rows[dist.get_rank()].clone()

        def seconds(exchange: Callable[[], Any]) -> float:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(pieces):
                exchange()
            dist.barrier()
            return time.perf_counter() - begin

        def slices() -> None:
            dist.all_to_all_single(other.view(-1), rows.view(-1))
            dist.all_gather_into_tensor(other.view(-1), own)

        return {
            "all_reduce_seconds": seconds(lambda: dist.all_reduce(rows)),
            "slices_seconds": seconds(slices),
            "exchanged_bytes": pieces * PIECE_BYTES,
            "memory_seconds": memory_seconds(torch, count) / ranks,  # each rank updates its part
        }


class Torchs(Job):
    """Runs DDP, or FSDP2, with PyTorch's fused AdamW over fp32 masters."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch.distributed
        from pytorch_ranks import Ddp, Fsdp2

        torch.distributed.init_process_group("gloo")
        settings = argparse.Namespace(lr=RATE, weight_decay=DECAY)
        self._job = (Ddp if options.row == "ddp" else Fsdp2)(model, settings)

    def step(self, tokens: Any, targets: Any) -> float:
        loss = self._job.wrapped(tokens, targets, False)
        loss.backward()
        self._job.step(RATE, CLIP)
        return float(loss.item())


class Ours(Job):
    """Runs DDP, or FSDP2 over bf16 parameters, with ziggurat.torch.AdamW."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        import ziggurat.torch
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        model.bfloat16()
        wrapping, place = options.row.split("-")
        if wrapping == "ddp":
            ddp = torch.nn.parallel.DistributedDataParallel
            self._model = ddp(model, gradient_as_bucket_view=True)
        else:
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
            self._model = model
        self._optimizer = ziggurat.torch.AdamW(
            groups_of(self._model.parameters()),
            lr=RATE,
            betas=BETAS,
            model=self._model,
            placement="host" if place == "host" else f"nvme:{options.store}/state",
        )
        self._on_drive = place == "nvme"
        self._clip = torch.nn.utils.clip_grad_norm_

    def step(self, tokens: Any, targets: Any) -> float:
        loss = self._model(tokens, targets, False)
        loss.backward()
        self._clip(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())

    def settle(self) -> None:
        if self._on_drive:
            settled(self._optimizer)

    def budget_bytes(self) -> int:
        return planned(self._optimizer)


class DeepSpeeds(Job):
    """Runs DeepSpeed's engine, or ours with its interface: stage 2 in RAM, stage 3 with NVMe."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        from deepspeed_settings import configuration

        sys.argv[1:] = []
        self._is_ours = options.row.startswith("zds")
        if self._is_ours:
            import ziggurat.deepspeed as deepspeed
        else:
            import deepspeed
        place = options.row.split("-")[1]
        self._on_drive = place == "nvme"
        settings = argparse.Namespace(
            optimizer=place, nvme_path=str(options.store), dtype="bf16", clip=CLIP
        )
        adam = deepspeed.ops.adam.DeepSpeedCPUAdam(
            groups_of(model.parameters()), lr=RATE, betas=BETAS, adamw_mode=True
        )
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam,
            config=configuration(settings, options.tokens // CONTEXT),
        )

    def step(self, tokens: Any, targets: Any) -> float:
        loss = self._engine(tokens, targets, False)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())

    def settle(self) -> None:
        if self._is_ours and self._on_drive:
            settled(self._optimizer)

    def budget_bytes(self) -> int:
        return planned(self._optimizer) if self._is_ours else 0


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns groups with weight decay on matrices."""
    every = list(params)
    return [
        {"params": [p for p in every if p.dim() == 2], "weight_decay": DECAY},
        {"params": [p for p in every if p.dim() != 2], "weight_decay": 0.0},
    ]


def planned(optimizer: Any) -> int:
    """Returns a rank's planned memory: for the state, for gradients, and for what ranks send each
    other."""
    figures = optimizer.figures()
    return int(figures["host_budget_bytes"] + figures["exchange_planned_bytes"])


def settled(optimizer: Any) -> None:
    optimizer.synchronize()
    optimizer.engine.make_durable()


JOBS: dict[str, type[Job]] = {
    "compute": Compute,
    "ddp": Torchs,
    "ddp-host": Ours,
    "ddp-nvme": Ours,
    "fsdp2": Torchs,
    "fsdp2-host": Ours,
    "fsdp2-nvme": Ours,
    "ds-cpu": DeepSpeeds,
    "ds-nvme": DeepSpeeds,
    "zds-cpu": DeepSpeeds,
    "zds-nvme": DeepSpeeds,
}


def proportional_bytes() -> int:
    """Returns this process's memory, in which shared memory is divided by the number of processes
    that share it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no Pss: this program needs Linux 4.14 or newer")


def prepare(options: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from pytorch_gpt2 import Gpt2, read_text, shape_of

    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = read_text(options.data, CONTEXT)
    job = JOBS[options.row](Gpt2(*shape_of(options.model)), options)
    torch.manual_seed(1 + int(os.environ["RANK"]))  # the draws of batches follow

    def step() -> float:
        starts = torch.randint(len(text) - CONTEXT, (options.tokens // CONTEXT,)).tolist()
        rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        return job.step(rows[:, :-1], rows[:, 1:])

    def turn() -> dict[str, Any]:
        begin = time.perf_counter()
        losses = [step() for _ in range(options.steps)]
        seconds = (time.perf_counter() - begin) / options.steps
        job.settle()
        return {
            "seconds": seconds,
            "loss": losses[-1],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "proportional_bytes": proportional_bytes(),
            "budget_bytes": job.budget_bytes(),
            **job.limits(),
        }

    return turn


def main() -> None:
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, {options.core})  # before any library asks for the number of cores
    from turns import answer_turns

    answer_turns(lambda: prepare(options))


if __name__ == "__main__":
    main()
