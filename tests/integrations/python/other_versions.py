#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/integrations/python/other_versions.py: the tests of models larger than memory with the oldest PyTorch that offload() takes and
the last transformers before 5.

other_versions.py --build DIR [TEST...]

Installs them into an environment of their own in DIR/other-versions, which weighs 5 GB, and runs the tests there, or those that are
named, with the library of the build in DIR. Prints what is installed, and a table as Markdown. ZIGGURAT_CASES=all runs all cases of
each. Ends with 1 if one failed, and with 77 where the packages cannot be had.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKAGES = {"torch": "2.12.0", "transformers": "4.57.6", "accelerate": "1.15.0", "peft": "0.21.2", "trl": "1.16.0"}
PAGE = ROOT / "integrations/python/MODELS_LARGER_THAN_MEMORY.md"
TESTS = [
    "offload_test.py",
    "offload_cases_test.py",
    "offload_strays_test.py",
    "offload_families_test.py",
    "hf_test.py",
    "hf_offload_test.py",
    "peft_offload_test.py",
    "pretrained_test.py",
    "streamed_init_test.py",
    "causal_loss_test.py",
    "micro_batches_models_test.py",
    "larger_page_test.py",
]


def is_complete(python):
    wanted = f"import pytest, importlib.metadata as m; assert all(m.version(a).split('+')[0] == b for a, b in {PACKAGES}.items())"
    return python.exists() and subprocess.run([str(python), "-c", wanted], stderr=subprocess.DEVNULL, check=False).returncode == 0


def install(folder):
    """Returns the environment's Python, or None where the packages cannot be had."""
    python = folder / "bin/python3"
    if is_complete(python):
        return python
    packages = [f"{name}=={version}" for name, version in PACKAGES.items()]
    print(f"other_versions: installing {' '.join(packages)} into {folder}", file=sys.stderr, flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False).returncode == 0
    pip = [str(python), "-m", "pip", "install", "-q", *packages, "numpy", "pytest"]
    return python if made and subprocess.run(pip, check=False).returncode == 0 else None


def run(python, test, build, logs):
    """Returns the outcome in a word, what the test says last, and how long it took."""
    more = {"PYTHONPATH": str(ROOT / "integrations/python"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "ZIGGURAT_LIBRARY": str(build / "lib/libziggurat.so"), "ZIGGURAT_COMMAND": str(build / "bin/ziggurat")}
    command = [str(python), str(HERE / test), *([str(PAGE)] if test == "larger_page_test.py" else [])]
    log, begin = logs / f"{test}.log", time.monotonic()
    with log.open("w") as out:
        status = subprocess.run(command, env={**os.environ, **more}, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    outcome = {0: "passed", 77: "skipped"}.get(status, f"failed ({status})")
    return outcome, said[0].partition(" in ")[0] if said and test != "larger_page_test.py" else "", time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="other_versions.py")
    parser.add_argument("--build", type=Path, required=True, help="the build's folder")
    parser.add_argument("tests", nargs="*", metavar="TEST", help=", ".join(TESTS))
    given = parser.parse_args()
    unknown = set(given.tests) - set(TESTS)
    if unknown:
        parser.error(f"there is no test {', '.join(sorted(unknown))}: give {', '.join(TESTS)}")
    build = given.build.resolve()
    logs = build / "other-versions"
    python = install(logs)
    if python is None:
        print("other_versions: skipped, because the packages cannot be had")
        sys.exit(77)
    print(", ".join(f"{name} {version}" for name, version in PACKAGES.items()), "\n\n| test | outcome | cases | s |\n|---|---|---|---|")
    failed = False
    for test in given.tests or TESTS:
        outcome, said, seconds = run(python, test, build, logs)
        failed |= outcome != "passed"  # all that a test needs is installed
        print(f"| {test} | {outcome} | {said} | {seconds:.0f} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
