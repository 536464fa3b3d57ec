# SPDX-License-Identifier: Apache-2.0
"""Holds what is said before a run to what the run then takes: `ziggurat plan` beside `ziggurat train` in 16 settings, and
ziggurat.torch.plan() beside 16 PyTorch scripts (bench/predicted_scripts.py).

    python bench/predictions.py --command build/release/bin/ziggurat --folder /fast/dir [--smoke] [--repeat 2]
        [--of trainer | scripts]

Of each: bytes as planned and as the engine's accounts have them at their peak, and those of the drive. The peak of a script
has what PyTorch takes in a step too. Without --smoke also the seconds of a step, after `ziggurat profile --measure` of the
folder: as `ziggurat simulate --machine this` or plan() plays it (of several ranks, and with activations on NVMe, plan()
says what it takes at least), the median of a run, and by how much runs differ. Memory is never more than planned and at most
5 % less, the drive's bytes 2 %. Exits with 1 if one is outside of that. Runs take 20 minutes on a machine that does nothing else, and seconds mean nothing on another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

TIERS = ("device", "host", "nvme", "peak")
MOST = {"nvme": 1.02} | dict.fromkeys(("device", "host", "peak"), 1.05)  # of what is taken, that a plan may say


class Size(NamedTuple):
    """A model, and the memory that its runs get where a setting does not give it."""

    layers: int
    width: int
    context: int
    batch: int
    host_mib: int
    device_mib: int

    @property
    def run(self) -> list[str]:
        model = f"{self.layers}x{self.width}x{self.width // 64}"
        return ["--model", model, "--context", str(self.context), "--batch", str(self.batch)]

    @property
    def budgets(self) -> list[str]:
        return ["--host-memory", f"{self.host_mib}MiB", "--device-memory", f"{self.device_mib}MiB"]


SMALL = Size(4, 256, 64, 2, 96, 64)
LARGE = Size(6, 512, 128, 4, 400, 400)  # whose steps take some tenths of a second
LITTLE = "little host memory"  #: a quarter of what the others get
SETTINGS: dict[str, list[str]] = {
    "as it is": [],
    LITTLE: [],
    "all in host memory": ["--placement", "params=host,grads=host,optimizer=host"],
    "all on NVMe": ["--placement", "params=nvme,grads=nvme,optimizer=nvme"],
    "parameters on the device": ["--placement", "params=device,grads=host,optimizer=nvme"],
    "state on the device": ["--placement", "all=device"],
    "fp32": ["--dtype", "fp32"],
    "moments in bf16": ["--state-format", "bf16-moments"],
    "8-bit moments": ["--state-format", "8bit"],
    "split": ["--state-format", "split"],
    "sgd": ["--optimizer", "sgd"],
    "one slot": ["--slots", "1"],
    "all activations": ["--activation-checkpointing", "off"],
    "8 micro-batches": ["--accumulate", "8"],
    "2 ranks": ["--ranks", "2"],
    "2 ranks, stage 3": ["--ranks", "2", "--zero-stage", "3"],
}
SMOKE = [*list(SETTINGS)[:4], "fp32", "8-bit moments", "2 ranks", "2 ranks, stage 3"]


class Row(NamedTuple):
    """What is said and taken, by tier; and seconds of a step, if they are measured."""

    said: dict[str, float]
    taken: dict[str, float]
    predicted: float = 0.0
    seconds: tuple[float, ...] = ()

    @property
    def good(self) -> bool:
        return all(had <= self.said[tier] <= MOST[tier] * had for tier, had in self.taken.items() if self.said[tier] != had)

    def text(self) -> str:
        columns = [self._column(tier) for tier in TIERS]
        times = ""
        if self.seconds:
            middle, noise = statistics.median(self.seconds), max(self.seconds) / min(self.seconds) - 1
            times = f" | {self.predicted:8.4f} {middle:8.4f} {self.predicted / middle - 1:+7.1%} {noise:6.1%}"
        return f"{' | '.join(columns)}{times}{'' if self.good else '  OFF'}"

    def _column(self, tier: str) -> str:
        if tier not in self.taken:
            return f"{'-':>12} {'-':>12} {'-':>7}"
        said, had = self.said[tier], self.taken[tier]
        return f"{said:>12,.0f} {had:>12,.0f} {said / max(1.0, had):>7.4f}"


# -- the reference trainer


def planned(command: str, folder: Path, size: Size, how: list[str]) -> dict[str, float]:
    """Returns a rank's bytes on each tier, of NVMe those in the store: parameters and gradients have unnamed files."""
    out = folder / "plan.json"
    stage = [] if "--zero-stage" in how else ["--zero-stage", "2"]
    subprocess.run([command, "plan", *size.run, *_budgets(size, how), *how, *stage, "--json", str(out)], check=True)
    strategy = json.loads(out.read_text())["strategies"][0]
    unnamed = {"parameters", "gradients"}
    beside = sum(one["bytes"] for one in strategy["items"] if one["tier"] == "nvme" and one["class"] in unnamed)
    found: dict[str, float] = strategy["rank_bytes"]
    return found | {"nvme": found["nvme"] - beside}


def trained(command: str, folder: Path, size: Size, how: list[str], steps: int) -> tuple[dict[str, float], float]:
    """Returns rank 0's bytes on each tier at their peak, and the seconds of a step."""
    store, out = folder / "store", folder / "train.json"
    shutil.rmtree(store, ignore_errors=True)
    data = folder / "data.txt"
    data.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(20_000)))
    ranks = int(how[1]) if how[:1] == ["--ranks"] else 1
    program = [command, "train"] if ranks == 1 else [command, "launch", "--nproc", str(ranks), "--", command, "train"]
    how = how[2 * (ranks > 1) :]
    run = [*size.run, *_budgets(size, how), *how, "--data", str(data), "--store", str(store), "--steps", str(steps)]
    _run([*program, *run, "--json", str(out)])
    told = json.loads(out.read_text())
    tiers = told["total"]["tiers"]
    bytes_of = {name: float(tiers[name]["peak_bytes"]) for name in ("device", "host")}
    walls = [step["wall_s"] for step in told["steps"]][2:]
    return bytes_of | {"nvme": tiers["nvme"]["store_bytes"] / ranks}, statistics.median(walls) if walls else 0.0


def played(command: str, folder: Path, size: Size, how: list[str]) -> float:
    """Returns the seconds of a step in virtual time on this machine, as it was measured before."""
    out, model = folder / "simulate.json", folder / "config.json"
    # By its name it would have GPT-2's vocabulary, and the trainer has bytes.
    heads = size.width // 64
    shape = {"n_layer": size.layers, "n_embd": size.width, "n_head": heads, "n_positions": 1024, "vocab_size": 256}
    model.write_text(json.dumps({"model_type": "gpt2"} | shape))
    its = ["--model", str(model), *size.run[2:]]
    more = [] if "--accumulate" in how else ["--accumulate", "4"]
    ranks = ["--zero-stage", "2"] if "--ranks" in how and "--zero-stage" not in how else []
    run = [command, "simulate", "--machine", "this", *its, *more, *_budgets(size, how), *how, *ranks]
    _run([*run, "--steps", "6", "--json", str(out)])
    steps: list[dict[str, Any]] = json.loads(out.read_text())["steps"]
    return statistics.median(float(one["seconds"]) for one in steps[1:-1])  # the last one waits until all is durable


def _budgets(size: Size, how: list[str]) -> list[str]:
    its = size.budgets
    return [word for pair in zip(its[::2], its[1::2], strict=True) if pair[0] not in how for word in pair]


def _run(words: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


def _measure(command: str, folder: Path) -> None:
    """Measures this machine, for what is played and for what plan() says of a drive."""
    _run([command, "profile", "--measure", "--seconds", "0.5", "--path", str(folder)])


def of_trainer(command: str, folder: Path, name: str, steps: int, repeat: int) -> Row:
    size = SMALL if repeat == 1 else LARGE
    how = SETTINGS[name] if name != LITTLE else ["--host-memory", f"{size.host_mib // 4}MiB"]
    if repeat > 1:  # a machine's speed changes within minutes
        _measure(command, folder)
    said = planned(command, folder, size, how)
    predicted = played(command, folder, size, how) if repeat > 1 else 0.0
    runs = [trained(command, folder, size, how, steps) for _ in range(repeat)]
    if repeat == 1:
        return Row(said, runs[0][0])
    return Row(said, runs[0][0], predicted, tuple(seconds for _, seconds in runs))


# -- PyTorch scripts


def of_scripts(command: str, folder: Path, steps: int, repeat: int) -> dict[str, Row]:
    """Runs all, those of one rank in one process."""
    from predicted_scripts import SCRIPTS

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCRIPTS}
    for again in range(repeat):
        if repeat > 1:
            _measure(command, folder)
        for ranks in (1, 2):
            names = [name for name, script in SCRIPTS.items() if script.ranks == ranks]
            told = _told(folder / f"{ranks}-{again}", steps, "small" if repeat == 1 else "large", ranks, names)
            for name, its in zip(names, told, strict=True):
                found[name].append(its)
    times = {name: tuple(its["seconds"] for its in runs) if repeat > 1 else () for name, runs in found.items()}
    predicted = {name: statistics.median(its["predicted"] for its in runs) for name, runs in found.items()}
    return {name: Row(runs[0]["said"], runs[0]["taken"], predicted[name], times[name]) for name, runs in found.items()}


def _told(folder: Path, steps: int, size: str, ranks: int, names: list[str]) -> list[dict[str, Any]]:
    shutil.rmtree(folder, ignore_errors=True)
    script = [sys.executable, str(Path(__file__).with_name("predicted_scripts.py"))]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = [sys.executable, *launch, script[1]]
    out = _run([*script, str(folder), str(steps), size, *names])
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


# -- the table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="ziggurat")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--of", choices=("trainer", "scripts"))
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CONFIG_HOME"] = str(folder)  # for the profile of this drive alone
    head = " | ".join(f"{f'{tier} planned':>12} {'taken':>12} {'ratio':>7}" for tier in TIERS)
    print(f"{'':<30} {head}{'' if asked.smoke else ' | s before    taken   ratio  noise'}", flush=True)
    steps, repeat = (3, 1) if asked.smoke else (8, max(2, asked.repeat))
    good = True
    if asked.of != "scripts":
        for name in SMOKE if asked.smoke else SETTINGS:
            row = of_trainer(asked.command, folder, name, steps, repeat)
            print(f"{name:<30} {row.text()}", flush=True)
            good &= row.good
    if asked.of == "scripts" or (asked.of is None and not asked.smoke):
        for name, row in of_scripts(asked.command, folder, steps if repeat == 1 else 2 * steps, repeat).items():
            print(f"{name:<30} {row.text()}", flush=True)
            good &= row.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
