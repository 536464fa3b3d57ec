# SPDX-License-Identifier: Apache-2.0
"""Is what `auto` chooses as fast as the best by hand? In a control group with little memory.

    python bench/auto_choice.py --command build/release/bin/ziggurat --folder /fast/dir [--rounds 3] [--only train]

Runs `ziggurat train`, and a small PyTorch model of blocks with offload(), once with all left to "auto" and once with each
placement by hand, in turns, `--rounds` times. By hand units get what `ziggurat plan` calls comfortable, and records the rest
of the group. Prints the median seconds of a step of each, the spread of its runs (the noise), and the ratio of auto
to the best by hand. What is not durable at every step is shown, and counts only where auto may choose it too (PyTorch). What has
no room says so. Needs root, for the group (77 without it). Takes less than four minutes on two cores.

Exits with 1 if the ratio is above 1.05 by more than the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "larger"))

from in_a_group import MIB, Group  # noqa: E402

MOST = 1.05
PART_S = 80  # after which no other round begins: on a busy machine there are fewer
WARM_UP = 3  # steps that learn the order of units
TRAIN = ["--model", "8x512x8", "--context", "64", "--batch", "4", "--accumulate", "1"]  # 25 million parameters
TRAIN_GROUP, TORCH_GROUP = 340 * MIB, 820 * MIB
TRAIN_BY_HAND = {
    "all in memory (durable at times)": "params=device,grads=host,optimizer=host",
    "parameters on the device": "params=device,grads=host,optimizer=nvme",
    "parameters on the host": "params=host,grads=host,optimizer=nvme",
    "gradients on NVMe": "params=device,grads=nvme,optimizer=nvme",
    "parameters on NVMe": "params=nvme,grads=host,optimizer=nvme",
    "all on NVMe": "params=nvme,grads=nvme,optimizer=nvme",
}
NOT_DURABLE = next(iter(TRAIN_BY_HAND))
Run = Callable[[int], tuple[float | None, str]]  #: of a round: the median step, or None, and what was said


class Told(Exception):
    """What a run said that did not end well."""


def in_group(command: list[str], limit_bytes: int, environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Returns what the command printed on standard output and standard error. Errors: Told."""
    group = Group(limit_bytes)
    try:
        done = subprocess.run(
            command,
            preexec_fn=lambda: group.of(os.getpid()),
            capture_output=True,
            text=True,
            env=environment or os.environ.copy(),
            timeout=120,
            check=False,
        )
    finally:
        time.sleep(0.05)  # until the kernel has let the last process go
        group.close()
    if done.returncode:
        ended = f"ended by signal {-done.returncode}"  # 9: the group had no room
        lines = [ended] if done.returncode < 0 else done.stderr.strip().splitlines()
        raise Told(next((line for line in lines if "error" in line.lower()), lines[-1])[:110])
    return done.stdout, done.stderr


def comfortable(command: str, folder: Path, placement: str) -> int:
    """Returns the device memory that `ziggurat plan` calls comfortable."""
    out = folder / "plan.json"
    how = [command, "plan", *TRAIN, "--placement", placement, "--json", str(out)]
    subprocess.run(how, check=True, capture_output=True)
    return int(json.loads(out.read_text())["strategies"][0]["run"]["budgets"]["device_bytes"])


def train_runs(command: str, folder: Path, steps: int) -> dict[str, Run]:
    data = folder / "data.txt"
    data.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(20_000)))

    def run(how: list[str]) -> tuple[float, str]:
        store, out = folder / "store", folder / "train.json"
        shutil.rmtree(store, ignore_errors=True)
        given = [*TRAIN, *how, "--data", str(data), "--store", str(store), "--steps", str(steps), "--json", str(out)]
        said, _ = in_group([command, "train", *given], TRAIN_GROUP)
        walls = [step["wall_s"] for step in json.loads(out.read_text())["steps"]]
        return statistics.median(walls[WARM_UP:]), "\n".join(line for line in said.splitlines() if "auto" in line)

    def by_hand(placement: str) -> Run:
        device = comfortable(command, folder, placement) + MIB
        host = int(0.85 * TRAIN_GROUP) - device
        sizes = ["--device-memory", str(device), "--host-memory", str(max(host, MIB))]
        return lambda _: run(["--placement", placement, *sizes])

    auto = ["--placement", "auto", "--device-memory", "auto", "--host-memory", "auto"]
    runs: dict[str, Run] = {"auto": lambda _: run(auto)}
    return runs | {name: by_hand(placement) for name, placement in TRAIN_BY_HAND.items()}


TORCH_BY_HAND: dict[str, dict[str, Any]] = {
    "all in memory": {"memory": "all", "placement": "host", "state": "host"},
    "state on NVMe, as by itself": {"memory": "all", "placement": "host", "state": "nvme"},
    "state on NVMe, 128 MiB kept": {"memory": "all", "placement": "host", "state": "nvme", "host_memory": "128MiB"},
    "parameters on NVMe": {"memory": "least", "placement": "params=nvme,grads=host", "state": "nvme"},
    "all on NVMe": {"memory": "least", "placement": "params=nvme,grads=nvme", "state": "nvme"},
}


def torch_runs(folder: Path, steps: int) -> dict[str, Run]:
    def run(how: dict[str, Any]) -> tuple[float, str]:
        shutil.rmtree(folder / "state", ignore_errors=True)
        child = [sys.executable, __file__, "--child", json.dumps(how), "--folder", str(folder), "--steps", str(steps)]
        out, said = in_group(child, TORCH_GROUP)
        walls: list[float] = json.loads(out.splitlines()[-1])
        return statistics.median(walls[WARM_UP:]), "\n".join(line for line in said.splitlines() if "auto:" in line)

    def of(how: dict[str, Any]) -> Run:
        return lambda _: run(how)

    return {"auto": of({"memory": "auto", "placement": "auto", "state": "auto"})} | {
        name: of(how) for name, how in TORCH_BY_HAND.items()
    }


def child(how: dict[str, Any], folder: Path, steps: int) -> None:
    """Trains in the group, and prints the seconds of each step."""
    import ziggurat.torch
    from ziggurat._units.units import divide

    import torch

    torch.manual_seed(1)
    torch.set_num_threads(2)
    width, depth = 640, 10  # 33 million parameters

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = torch.nn.Sequential(*(Block() for _ in range(depth))).bfloat16()
    memory, given = how["memory"], {}
    if memory in ("all", "least"):
        division = divide(model, "auto")
        memory = division.all_bytes if memory == "all" else 2 * division.smallest()[0]
    if "host_memory" in how:
        given["host_memory"] = how["host_memory"]
    ziggurat.torch.offload(model, memory=memory, placement=how["placement"])
    state = how["state"] if how["state"] == "host" else f"{how['state']}:{folder}/state"
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement=state, **given)
    inputs = torch.randn(256, width).bfloat16()
    walls = []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        walls.append(time.perf_counter() - begin)
    optimizer.close()
    print(json.dumps(walls))


def compared(title: str, runs: dict[str, Run], rounds: int, counts: Callable[[str], bool]) -> bool:
    """Makes the runs in turns, prints their rows, and returns whether auto is as fast as the best that counts."""
    walls: dict[str, list[float]] = {name: [] for name in runs}
    refused: dict[str, str] = {}
    said = ""
    begin = time.monotonic()
    for turn in range(rounds):
        if time.monotonic() - begin > PART_S:
            print(f"{turn} of {rounds} rounds, since these took {PART_S} s", flush=True)
            break
        for name, run in runs.items():
            if name in refused:
                continue
            try:
                seconds, words = run(turn)
            except (Told, subprocess.TimeoutExpired) as error:
                refused[name] = str(error)
                continue
            assert seconds is not None
            walls[name].append(seconds)
            said = words if name == "auto" and not said else said
    print(f"\n{title}\n{said}\n{'':<34}{'s a step':>10}{'noise':>8}")
    for name, own in walls.items():
        if name in refused or not own:
            print(f"{name:<34}{'no room: ' + refused.get(name, ''):>10}")
            continue
        spread = max(own) / min(own) - 1
        print(f"{name:<34}{statistics.median(own):>10.4f}{spread:>8.1%}{'' if counts(name) else '  (not counted)'}")
    if not walls["auto"] or "auto" in refused:
        print("auto did not run")
        return False
    rivals = {name: own for name, own in walls.items() if name != "auto" and own and name not in refused and counts(name)}
    best = min(rivals, key=lambda name: statistics.median(rivals[name]))
    ratio = statistics.median(walls["auto"]) / statistics.median(rivals[best])
    noise = max(max(own) / min(own) - 1 for own in (walls["auto"], rivals[best]))
    good = ratio <= max(MOST, 1 + noise)
    print(f"auto / best by hand ({best}): {ratio:.3f}; noise {noise:.1%}{'' if good else '  OFF'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="ziggurat")
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=["train", "torch"])
    parser.add_argument("--profile", action="store_true", help="measure the machine before, which takes most of a minute")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(json.loads(given.child), given.folder, given.steps)
        return 0
    try:
        Group(TRAIN_GROUP).close()
    except OSError as error:
        print(f"a control group cannot be made: {error}")
        return 77
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.profile:
        measure = [given.command, "profile", "--measure", "--path", str(given.folder)]
        subprocess.run(measure, check=True, capture_output=True)
    good = True
    if given.only != "torch":
        runs = train_runs(given.command, given.folder, given.steps)
        title = f"ziggurat train {' '.join(TRAIN)}, in {TRAIN_GROUP // MIB} MiB"
        good &= compared(title, runs, given.rounds, lambda name: name != NOT_DURABLE)
    if given.only != "train":
        title = f"offload() of 33 million parameters, in {TORCH_GROUP // MIB} MiB"
        good &= compared(title, torch_runs(given.folder, given.steps), given.rounds, lambda _: True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
