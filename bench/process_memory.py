# SPDX-License-Identifier: Apache-2.0
"""What the kernel says that PyTorch scripts take in host memory, beside the peak that ziggurat.torch.plan() says: the
scripts of bench/predicted_scripts.py with one rank, in their large size.

    python bench/process_memory.py FOLDER

The growth of a process from before its model to its highest mark in later steps. What PyTorch's products take outside of its
allocator is not planned; it is measured on the plain model, by the same mark beside the allocator's own. The C library
gives back what is freed (MALLOC_MMAP_THRESHOLD_), which by itself it keeps up to the size of the gradients.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import predicted_scripts
import torch
from predicted_scripts import SCRIPTS, Script, called, loss_of, most_of, said_of, step
from torch.profiler import ProfilerActivity, profile

import ziggurat.torch

STEPS = 3


def resident() -> dict[str, int]:
    """Returns the process's memory now and at its highest mark, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0]: int(line[1]) << 10 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def begin_mark() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins at what is there
    return resident()["VmRSS:"]


def warm_up(script: Script) -> int:
    """Makes what a process has once, and returns its memory then."""
    predicted_scripts.size = predicted_scripts.SMALL
    model, batch = script.model(), script.batch()
    loss_of(called(model, batch)).backward()
    optimizer = ziggurat.torch.SGD(torch.nn.Linear(8, 8).parameters(), lr=0.1)
    optimizer.close()
    predicted_scripts.size = predicted_scripts.LARGE
    del model, batch
    ctypes.CDLL(None).malloc_trim(0)
    return begin_mark()


def said(script: Script, folder: Path) -> int:
    return int(said_of(script, script.model().train(), script.batch(), folder).bytes["peak"])


def plain(script: Script, _: Path) -> int:
    """Returns what the plain model's step takes outside of PyTorch's allocator."""
    before = warm_up(script)
    model, batch = script.model().train(), script.batch()
    lasting = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    begin_mark()
    for _ in range(STEPS):
        loss_of(called(model, batch)).backward()
        model.zero_grad()
    grown = resident()["VmHWM:"] - before - lasting
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss_of(called(model, batch)).backward()
    return max(0, grown - most_of(recorded))


def offloaded(script: Script, folder: Path) -> int:
    before = warm_up(script)
    model, batch = script.model().train(), script.batch()
    ziggurat.torch.offload(model, memory=script.memory(model), placement=script.placement)
    trained = [param for param in model.parameters() if param.requires_grad]
    placement = f"nvme:{folder}/state" if script.on_drive else "host"
    optimizer = getattr(ziggurat.torch, script.optimizer)(trained, lr=1e-3, placement=placement, **script.given)
    for number in range(2 * STEPS):
        if number == STEPS:  # from here on, without what opening takes
            optimizer.synchronize()
            begin_mark()
        step(script, model, optimizer, batch)
    optimizer.synchronize()
    grown = resident()["VmHWM:"] - before
    optimizer.close()
    return grown


ROLES = {"said": said, "plain": plain, "offloaded": offloaded}


def in_process(role: str, name: str, folder: str) -> int:
    shutil.rmtree(Path(folder) / "state", ignore_errors=True)
    environment: dict[str, Any] = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, __file__, folder, role, name]
    made = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(made.stdout.splitlines()[-1]))


def main() -> None:
    torch.set_num_threads(1)
    folder, *one = sys.argv[1:]
    if one:
        role, name = one
        predicted_scripts.size = predicted_scripts.LARGE
        print(json.dumps(ROLES[role](SCRIPTS[name], Path(folder))), flush=True)
        os._exit(0)  # the C library's own end is of no interest
    print(f"{'':30}{'peak said':>15}{'process grew':>15}{'PyTorch outside':>17}{'grew beyond':>13}")
    for name, script in SCRIPTS.items():
        if not script.has_peak or script.ranks > 1:
            continue
        peak, outside, grew = (in_process(role, name, folder) for role in ROLES)
        print(f"{name:30}{peak:>15,}{grew:>15,}{outside:>17,}{(grew - outside) / peak - 1:>+13.1%}", flush=True)


if __name__ == "__main__":
    main()
