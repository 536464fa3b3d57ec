# SPDX-License-Identifier: Apache-2.0
"""Measures the most memory that training a model takes with ziggurat.torch.offload(), and without it.

    python bench/larger/memory.py --folder /fast/dir [--only NAME...]

Each row is a process with offload(), whose state, parameters and gradients are on the drive, and one without it, whose state is
there, until the optimizer is closed. The limit of a row: what offload() was given, what the process without it takes beside
parameters and gradients (activations, and the engine's memory for state), and 128 MiB; for a model that was built in memory its
parameters too, which are there until the engine has them. Then a model is trained in three sizes of equal blocks, with the same
budget: what grows is memory by parameter. Exits with 77 if PyTorch, transformers or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import libraries

MIB = 1 << 20
SLACK = 128  # MiB
SHAPE = "12x1024x16000"
STEPS = 3


class Setting(NamedTuple):
    """How a row trains."""

    memory: int  # MiB
    dtype: str = "bfloat16"
    is_built_in_files: bool = True
    checkpointing: bool = True
    backwards: int = 1  # a step
    tokens: int = 256
    clips: bool = False
    autocast: bool = False
    adapters: bool = False  # of a frozen model
    turns: bool = False  # micro_batches()
    shape: str = SHAPE


SETTINGS = {
    "bf16": Setting(200),
    "bf16, twice the budget": Setting(400),
    "bf16, built in memory": Setting(200, is_built_in_files=False),
    "bf16, activations kept": Setting(200, checkpointing=False),
    "bf16, 4 backwards": Setting(200, backwards=4),
    "bf16, 4 micro-batches in turn": Setting(200, backwards=4, turns=True),
    "bf16, clipped": Setting(200, clips=True),
    "fp32": Setting(400, dtype="float32"),
    "fp32, autocast": Setting(400, dtype="float32", autocast=True),
    "adapters of a frozen base": Setting(200, adapters=True),
}
SIZES = [Setting(200, shape=f"{blocks}x1024x16000") for blocks in (6, 12, 24)]


def train(folder: Path, how: Setting, offloads: bool) -> dict[str, Any]:
    """Returns the most memory beyond what was there before the model, bytes of parameters and gradients, and losses."""
    import ziggurat.torch
    from models import Shape, batch, built, forget_peak, of_process

    import torch

    torch.set_num_threads(1)
    dtype, shape = getattr(torch, how.dtype), Shape.of(how.shape)

    def run(shape: Shape, folder: Path, offloads: bool, steps: int) -> dict[str, Any]:
        folder.mkdir()
        in_files = how.is_built_in_files and offloads
        with ziggurat.torch.streamed_init(folder, dtype=None if dtype == torch.float32 else dtype) if in_files else contextlib.nullcontext():
            model = built(shape).to(dtype)
        if not how.checkpointing:
            model.gradient_checkpointing_disable()
        if how.adapters:
            import peft

            torch.manual_seed(2)
            model.requires_grad_(False)
            model.enable_input_require_grads()
            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if offloads:
            ziggurat.torch.offload(model, memory=f"{how.memory}MiB", placement="params=nvme,grads=nvme", chunked_loss=False)
        optimizer = ziggurat.torch.AdamW(trained, lr=1e-4, placement=f"nvme:{folder}/store", host_memory="64MiB")
        losses = []

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
                return model(input_ids=tokens, labels=tokens).loss / how.backwards

        for step in range(steps):
            batches = [batch(shape, step * how.backwards + k, how.tokens) for k in range(how.backwards)]
            if how.turns and offloads:
                parts = [{"input_ids": tokens, "labels": tokens} for tokens in batches]
                each = ziggurat.torch.micro_batches(model, parts, lambda output, _: output.loss / how.backwards)
                losses += [loss.item() for loss in each]
            else:
                for tokens in batches:
                    loss = loss_of(tokens)
                    loss.backward()
                    losses.append(loss.item())
            if how.clips:
                torch.nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peak = of_process("VmHWM")
        optimizer.close()  # parameters are the script's then
        sizes = {"parameters": sum(p.nbytes for p in model.parameters()), "gradients": sum(p.nbytes for _, p in trained)}
        return {"peak": peak, **sizes, "losses": losses}

    run(Shape(1, 256, 500), folder / "first", offloads, 1)  # loads what PyTorch and the engine load once
    from ziggurat._memory.memory import return_freed

    return_freed()
    before = of_process("VmRSS")
    forget_peak()
    found = run(shape, folder / "run", offloads, STEPS)
    return {**found, "peak": found["peak"] - before}


def measured(folder: Path, how: Setting, offloads: bool) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), "--run", json.dumps([how, offloads])]
    try:
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)


def check_settings(folder: Path, names: list[str]) -> bool:
    """Prints a row for each; returns whether all keep to their limit and have the losses of runs without offload()."""
    right = True
    print(f"| {'MiB':<30} | budget | without: peak | beside parameters, gradients | offload(): peak | limit | |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        how = SETTINGS[name]
        plain, ours = (measured(folder / "row", how, offloads) for offloads in (False, True))
        rest = plain["peak"] - plain["parameters"] - plain["gradients"]
        built = 0 if how.is_built_in_files else ours["parameters"]
        limit = how.memory + (max(0, rest) + built) / MIB + SLACK
        kept = ours["peak"] / MIB <= limit
        same = ours["losses"] == plain["losses"]
        right = right and kept and same
        print(
            f"| {name:<30} | {how.memory} | {plain['peak'] / MIB:.0f} | {rest / MIB:.0f} | {ours['peak'] / MIB:.0f} | {limit:.0f} "
            f"| {'within' if kept else 'ABOVE'}{'' if same else ', OTHER LOSSES'} |",
            flush=True,
        )
    return right


def check_sizes(folder: Path) -> bool:
    """Prints the memory of each size; returns whether a billion parameters more take at most 1 GB."""
    found = []
    for how in SIZES:
        its = measured(folder / "size", how, True)
        found.append((its["parameters"] // 2, its["peak"]))
        print(f"{found[-1][0] / 1e6:8.0f} M parameters: {found[-1][1] / MIB:.0f} MiB", flush=True)
    (small, least), *_, (large, most) = found
    grows = (most - least) / (large - small)
    print(f"{grows:8.2f} GB for a billion parameters more (limit 1)")
    return grows <= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS, "sizes"], default=[*SETTINGS, "sizes"], metavar="NAME")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        how, offloads = json.loads(given.run)
        print(json.dumps(train(given.folder, Setting(*how), offloads)))
        return
    libraries.require()
    folder = given.folder / f"memory-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        right = check_settings(folder, [name for name in given.only if name != "sizes"])
        if "sizes" in given.only:
            right = check_sizes(folder) and right
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(not right)


if __name__ == "__main__":
    main()
