# SPDX-License-Identifier: Apache-2.0
"""Runs ``ziggurat doctor --train``: twenty steps of a small model on every device that PyTorch has
here.

Each device trains the model with torch.optim.AdamW and with ziggurat.torch.AdamW in each
placement. The check prints whether the bits are the same, or else the differences, and seconds and
peaks. A report of a defect needs what it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STEPS = 20
WIDTH, HIDDEN, ROWS = 192, 512, 64
#: Both sides compute in fp32, but add in another order and divide at another place: a few roundings
#: per step.
LOSS_TOLERANCE = 1e-4


@dataclass
class Run:
    """The results of twenty steps."""

    losses: list[float]
    weights: list  # the weights, copied to the CPU
    step_s: float  # the median of all steps but the first
    peak_bytes: int | None  # the device's peak, if PyTorch counts it


def _model(device, dtype):
    import torch

    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)]
    return torch.nn.Sequential(*layers).to(device=device, dtype=dtype)


def _batch(step, device, dtype):
    """Draws a batch on the CPU, so that every device gets the same numbers."""
    import torch

    draw = torch.Generator().manual_seed(1000 + step)
    rows = torch.randn(ROWS, WIDTH, generator=draw)
    return rows.to(device=device, dtype=dtype), rows.flip(1).to(device=device, dtype=dtype)


def _counter(device, name):
    """Returns PyTorch's function that counts the device's memory, or None if there is none."""
    import torch

    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return getattr(module, name, None)


def _train(device, dtype, make, finish=lambda: None) -> Run:
    import torch

    model = _model(device, dtype)
    optimizer = make(model)
    if (reset := _counter(device, "reset_peak_memory_stats")) is not None:
        reset(device)
    losses, seconds = [], []
    for step in range(STEPS):
        begin = time.perf_counter()
        rows, target = _batch(step, device, dtype)
        loss = torch.nn.functional.mse_loss(model(rows).float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    if (synchronize := getattr(optimizer, "synchronize", None)) is not None:
        synchronize()
    weights = [param.detach().float().cpu().clone() for param in model.parameters()]
    if (close := getattr(optimizer, "close", None)) is not None:
        close()
    peak = _counter(device, "max_memory_allocated")
    return Run(losses, weights, statistics.median(seconds[1:]), None if peak is None else peak(device))


def _same_bits(one: Run, other: Run) -> bool:
    import torch

    return one.losses == other.losses and all(map(torch.equal, one.weights, other.weights))


def _difference(one: Run, other: Run) -> float:
    """Returns the largest relative difference of the losses."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(one.losses, other.losses, strict=True))


def _row(name: str, run: Run, verdict: str) -> None:
    peak = "not counted" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.1f} MiB"
    print(f"  {name:<34} {run.step_s * 1e3:9.2f} ms a step   peak {peak:<12} loss {run.losses[-1]:.6f}   {verdict}")


def _name(device, dtype) -> str:
    return f"{device}, {str(dtype).removeprefix('torch.')}"


def _check(device, dtype, folders: Sequence[Path]) -> list[str]:
    """Prints the device's rows in one type; returns what is wrong."""
    import torch

    import ziggurat.torch

    name = _name(device, dtype)
    print(f"{name}:", flush=True)
    wrong: list[str] = []

    theirs = _train(device, dtype, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    again = _train(device, dtype, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    repeats = _same_bits(theirs, again)
    _row("torch.optim.AdamW", theirs, "" if repeats else "the device gave different bits in two "
                                                         "equal runs")

    def ours(placement, waits):
        return _train(
            device,
            dtype,
            lambda model: ziggurat.torch.AdamW(
                model.parameters(), lr=1e-3, placement=placement, model=model if waits else None
            ),
        )

    first = ours("host", False)
    difference = _difference(theirs, first)
    verdict = f"losses within {difference:.1e} of torch.optim's"
    if dtype == torch.float32 and not difference <= LOSS_TOLERANCE:
        verdict += f": MORE THAN {LOSS_TOLERANCE:g}"
        wrong.append(f"{name}: the losses differ from torch.optim's by {difference:.1e}")
    if dtype != torch.float32:
        verdict += " (which keeps no fp32 master)"
    _row("ziggurat, host", first, verdict)
    others = [("ziggurat, host, model=", "host", True)]
    for number, folder in enumerate(folders, 1):
        row = "ziggurat, nvme" if len(folders) == 1 else f"ziggurat, nvme {number}"
        others += [(row, f"nvme:{folder / name / 'plain'}", False)]
        others += [(f"{row}, model=", f"nvme:{folder / name / 'waits'}", True)]
    for title, placement, waits in others:
        run = ours(placement, waits)
        if _same_bits(first, run):
            verdict = "same bits"
        else:
            verdict = f"OTHER BITS, losses within {_difference(first, run):.1e}"
            if repeats:
                wrong.append(f'{name}: the row "{title}" has other bits than the row "ziggurat, host"')
            else:
                verdict += " (the device gives different bits in equal runs)"
        _row(title, run, verdict)
    return wrong


def devices():
    """Returns every device that PyTorch can use here."""
    import torch

    found = [torch.device("cpu")]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [torch.device(kind, index) for index in range(module.device_count())]
    return found


def _machine() -> None:
    import torch

    import ziggurat

    print(f"ziggurat {ziggurat.version()}, PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for device in devices():
        module = None if device.type == "cpu" else torch.get_device_module(device)
        print(f"{device}: {platform.processor() or platform.machine() if module is None else module.get_device_name(device)}")


def _offload() -> str:
    """Returns what ziggurat.torch.offload() finds of what it needs in PyTorch."""
    import torch

    from ziggurat import ZigguratError
    from ziggurat._pytorch import storages
    from ziggurat._pytorch.torch_private import require_for_offload

    try:
        require_for_offload()
    except ZigguratError as error:
        return str(error)
    guard = (
        "a read in C++ of a parameter that is away is an error"
        if storages.guards_reads()
        else "NOT GUARDED: a read in C++ of a parameter that is away would end the process"
    )
    return f"offload(): with PyTorch {torch.__version__}, by exchanging the memory of storages (_swap_data_ptr_); {guard}"


def check(on, *folders: Path) -> int:
    """Runs the check on the devices `on`, with state in each of `folders`. Returns the exit code: 0
    if nothing is wrong."""
    import torch

    wrong: list[str] = []
    for device in on:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                wrong += _check(device, dtype, folders)
            except Exception:  # tries the next device all the same; the report has this error
                traceback.print_exc(file=sys.stdout)
                wrong.append(f"{_name(device, dtype)}: training failed with an error")
    print()
    for line in wrong:
        print(f"wrong: {line}")
    if wrong:
        print("Please report this with all lines printed above, and the output of `ziggurat doctor` and "
              "of nvidia-smi or a similar tool.")
    else:
        print(
            "all is right. If a device here is not a CPU, please send what is printed above all "
            "the same: few people have run this."
        )
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ziggurat doctor --train",
        description=f"Trains a small model for {STEPS} steps on every device that PyTorch has, with torch.optim.AdamW and with "
        "ziggurat.torch.AdamW, and compares the results. Takes some seconds per device, and needs "
        "PyTorch.",
    )
    parser.add_argument("--train", action="store_true", help="this check")
    parser.add_argument(
        "--path",
        metavar="DIR",
        action="append",
        help="a folder on a drive for the NVMe rows; give it again for more folders (default: a "
             "temporary folder)",
    )
    options = parser.parse_args(arguments)
    # otherwise cuBLAS gives different bits in equal runs
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"ziggurat: error: doctor --train needs PyTorch: {error}; pip install torch", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as kept:
        folders = []
        for path in options.path or [None]:
            try:
                made = tempfile.TemporaryDirectory(prefix="ziggurat-train-", dir=path)
            except OSError as error:
                print(f"ziggurat: error: cannot write in {path}: {error.strerror}; give another --path", file=sys.stderr)
                return 1
            folders.append(Path(kept.enter_context(made)))
        _machine()
        print(_offload())
        for number, path in enumerate(options.path or [], 1):
            print(f"nvme{f' {number}' if len(options.path) > 1 else ''}: {path}")
        return check(devices(), *folders)
