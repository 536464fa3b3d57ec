# SPDX-License-Identifier: Apache-2.0
"""Runs of deepspeed_scripts/ under DeepSpeed and under ours, and how far they are apart."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import deepspeed_operations
import rank_end

SCRIPTS = Path(__file__).parent / "deepspeed_scripts"
RANKS = {
    "offload_cpu": 1,
    "offload_nvme": 1,
    "stage3_adam": 1,
    "stage3_cpu": 1,
    "stage3_nvme": 1,
    "encoder_fp16": 1,
    "ranks": 2,
    "stage3_ranks": 2,
    "stage3_ranks_nvme": 2,
}
# Scripts that run with several settings.
SOURCES = {
    "stage3_adam": "offload_cpu",
    "stage3_cpu": "offload_nvme",
    "stage3_nvme": "offload_nvme",
    "stage3_ranks": "ranks",
    "stage3_ranks_nvme": "ranks",
}
ON_NVME = ("offload_nvme", "stage3_nvme", "stage3_ranks_nvme")
DEEPSPEED, OURS = "deepspeed", "ziggurat.deepspeed"

Line = dict[str, float]


def source_of(script: str, library: str) -> str:
    """The script's text, with one line changed where it is to run under ours."""
    source = (SCRIPTS / f"{SOURCES.get(script, script)}.py").read_text()
    if library == DEEPSPEED:
        return source
    return source.replace("\nimport deepspeed\n", f"\nimport {library} as deepspeed\n")


def prepare(script: str, library: str, folder: Path) -> None:
    """Puts the script, what it imports and its settings into `folder`; builds what DeepSpeed loads."""
    folder.mkdir(parents=True)
    shutil.copy(SCRIPTS / "transformer.py", folder)
    shutil.copy(SCRIPTS / f"ds_{script}.json", folder / "settings.json")
    (folder / "script.py").write_text(source_of(script, library))
    if library == DEEPSPEED:
        more = ["AsyncIO"] if script in ON_NVME else []
        deepspeed_operations.build("CPUAdam", "ShareMemComm", *more)


def launch(script: str, folder: Path, data: Sequence[Path], *arguments: str) -> list[Line]:
    """Runs what `prepare` put into `folder`; returns the lines that the script logs.

    torchrun takes --log for one of its own, unless "--" stands before the script.
    """
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS[script]), "--", rank_end.__file__, "script.py"]
    command += ["--deepspeed_config", "settings.json", "--data", *map(str, data)]
    command += ["--log", str(log), *arguments]
    more = deepspeed_operations.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        status = subprocess.run(
            command, cwd=folder, env=os.environ | more, stdout=output, stderr=output
        ).returncode
    if status != 0:
        said = (folder / "output.txt").read_text().splitlines()
        wrong = [line for line in said if "Error" in line] or said[-1:]
        raise RuntimeError(f"{folder}/script.py: exit code {status}: {wrong[0]}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def steps_of(lines: Sequence[Line]) -> list[Line]:
    """Without those of evaluations."""
    return [line for line in lines if "loss" in line]


@dataclass
class Difference:
    """Between two runs, over their steps; that of rates and norms is relative."""

    loss_median: float
    loss_max: float
    rate_max: float
    norm_median: float


def difference(one: Sequence[Line], other: Sequence[Line]) -> Difference:
    pairs = list(zip(steps_of(one), steps_of(other), strict=True))
    if any(a["step"] != b["step"] for a, b in pairs):
        raise ValueError("the runs made other steps")

    def relative(key: str) -> list[float]:
        return [abs(a[key] - b[key]) / max(abs(a[key]), 1e-30) for a, b in pairs]

    losses = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    return Difference(
        loss_median=statistics.median(losses),
        loss_max=max(losses),
        rate_max=max(relative("lr")),
        norm_median=statistics.median(relative("grad_norm")),
    )
