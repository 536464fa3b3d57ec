#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/long.py: campaigns that the suite runs a sample of, whole. scripts/test --long runs it over a build.

long.py --build DIR [--report FILE] [NAME...]

Each campaign is a test program with more cases, or a script of a folder here. Runs those that are NAMED, or all, one after the
other, and prints a table as Markdown, which --report writes too: it is filled while the campaigns run, so that one that is
stopped keeps what it has. Ends with 1 if one failed. With all of them it takes hours.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Name, program or Python test or script, what it tries, and how many.
CAMPAIGNS = [
    ("calls", "c_call_order_test", "calls of the C interface in random order", {"ZIGGURAT_CALLS": "2000000"}),
    ("units", "c_unit_order_test", "calls on streamed parameters, each predicted", {"ZIGGURAT_CALLS": "2000000"}),
    ("corruptions", "checkpoint_corruption_test", "damaged checkpoints", {"ZIGGURAT_CORRUPTIONS": "1000000"}),
    ("lies", "store_lies_test", "drives that lie about what is durable, seeds", {"ZIGGURAT_SEEDS": "10000"}),
    ("rehearsals", "rehearsal_faults_test", "faults in virtual time, seeds", {"ZIGGURAT_SEEDS": "10000"}),
    ("mutants", "mutants/run.py", "mistakes that rehearsals must find, seeds each", {"ZIGGURAT_SEEDS": "100"}),
    ("commits", "checkpoint_commit_test", "faults at each call of a commit", {"ZIGGURAT_FAULTS": "all"}),
    ("saves", "checkpoint_fault_test", "faults at each call of a save", {"ZIGGURAT_FAULTS": "all"}),
    ("reshards", "reshard_fault_test", "faults at each call of a resharding", {"ZIGGURAT_FAULTS": "all"}),
    ("targets", "hanging_target_test", "targets of saves that hang", {"ZIGGURAT_FAULTS": "all"}),
    ("shutdowns", "checkpoint_shutdown_test", "machines that go down in a save", {"ZIGGURAT_FAULTS": "all"}),
    ("lines", "cli_lines_test", "runs that go back", {"ZIGGURAT_SEEDS": "200"}),
    ("gpu-orders", "engine_cuda_test", "orders of a GPU's streams", {"ZIGGURAT_SEEDS": "100"}),
    ("gpu-faults", "engine_cuda_faults_test", "faults at each call of CUDA", {"ZIGGURAT_FAULTS": "all"}),
    ("kills", "cli_kill_test", "kills of each setting", {"ZIGGURAT_KILLS": "200"}),
    ("python-kills", "resume_test.py", "killed runs of a script", {"ZIGGURAT_KILLS": "200"}),
    ("python-saves", "background_save_test.py", "runs killed in a background save", {"ZIGGURAT_KILLS": "100"}),
    ("python-trainer", "hf_offload_test.py", "offloaded models in Trainer", {"ZIGGURAT_CASES": "all"}),
    ("python-checkpoints", "hf_offload_checkpoint_test.py", "Trainer's checkpoints of offloaded models", {"ZIGGURAT_CASES": "all"}),
    ("python-adapters", "peft_offload_test.py", "adapters of offloaded models", {"ZIGGURAT_CASES": "all"}),
    ("python-turns", "micro_batches_test.py", "micro-batches that take turns", {"ZIGGURAT_CASES": "all"}),
    ("python-offload-kills", "offload_kill_test.py", "killed runs of an offloaded model", {"ZIGGURAT_KILLS": "200"}),
    ("python-faults", "offload_faults_test.py", "faults at each write under an offloaded model", {"ZIGGURAT_FAULTS": "all"}),
    ("python-gpu", "offload_device_test.py", "orders of a GPU's streams under offloaded models", {"ZIGGURAT_CASES": "all"}),
    ("python-strays", "offload_strays_test.py", "stray uses of parameters that are away", {"ZIGGURAT_CASES": "all"}),
    ("python-families", "offload_families_test.py", "families, types and budgets of offloaded models", {"ZIGGURAT_CASES": "all"}),
    ("python-foreign", "foreign_deepspeed_test.py", "checkpoints of DeepSpeed", {"ZIGGURAT_CASES": "all"}),
    ("python-scripts", "deepspeed_scripts_test.py", "scripts written for DeepSpeed, beside it", {"ZIGGURAT_CASES": "all"}),
    ("python-ranks", "torch_ranks_kill_test.py", "killed runs of two ranks", {"ZIGGURAT_KILLS": "40"}),
    ("other-versions", "integrations/python/other_versions.py", "larger models, older PyTorch and transformers", {"ZIGGURAT_CASES": "all"}),
    ("patches", "patches/run.py", "kept changes: files that they touch", {"ZIGGURAT_PATCHES": "all"}),
]


def command_of(program, build):
    if "/" in program:
        return [sys.executable, str(ROOT / "tests" / program), "--build", str(build)]
    if program.endswith(".py"):
        return [sys.executable, str(ROOT / "tests/integrations/python" / program)]
    found = [path for path in build.rglob(program) if path.is_file() and os.access(path, os.X_OK)]
    return [str(found[0])] if found else None


def run(campaign, build, logs):
    """Returns the outcome in a word, and how long it took."""
    name, program, _, more = campaign
    command = command_of(program, build)
    if command is None:
        return "not in this build", 0.0
    environment = {**os.environ, **more, "PYTHONPATH": str(ROOT / "integrations/python"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                   "ZIGGURAT_LIBRARY": str(build / "lib/libziggurat.so"), "ZIGGURAT_COMMAND": str(build / "bin/ziggurat")}
    begin = time.monotonic()
    with (logs / f"{name}.log").open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                check=False).returncode
    outcome = {0: "passed", 77: "skipped"}.get(status, f"failed ({status})")
    return outcome, time.monotonic() - begin


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit():
    told = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "no commit"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="long.py")
    parser.add_argument("--build", type=Path, required=True, help="the build's folder")
    parser.add_argument("--report", type=Path, help="where the table is written")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(one[0] for one in CAMPAIGNS))
    given = parser.parse_args()
    unknown = set(given.names) - {one[0] for one in CAMPAIGNS}
    if unknown:
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}: give {', '.join(one[0] for one in CAMPAIGNS)}")
    build = given.build.resolve()
    logs = build / "long"
    logs.mkdir(exist_ok=True)
    lines = [f"# Long campaigns, {datetime.date.today()}", "",
             f"{commit()}; build {build.name}; {os.cpu_count()} x {processor()}", "",
             "| campaign | tries | size | outcome | s |", "|---|---|---|---|---|"]
    failed = False
    for campaign in CAMPAIGNS:
        if given.names and campaign[0] not in given.names:
            continue
        print(f"long: {campaign[0]}: {campaign[2]}, log in {logs / campaign[0]}.log", file=sys.stderr, flush=True)
        outcome, seconds = run(campaign, build, logs)
        failed |= outcome.startswith("failed")
        (size,) = campaign[3].values()
        lines.append(f"| {campaign[0]} | {campaign[2]} | {size} | {outcome} | {seconds:.0f} |")
        if given.report:
            given.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
