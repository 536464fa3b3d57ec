#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch, FSDP2, DeepSpeed, torchao and ziggurat.torch on public reports of this field's
defects.

    python3 bench/peers/field_reports.py [--library NAME]... [--report NUMBER]... [--limit SECONDS]

docs/field-reports.md describes each report. The scripts are in the folder field, one module for
each library. They run on the CPU, each in a process of its own, or in two ranks if a library
divides its state. Prints versions, hardware and a table in Markdown, in which a script is

  right    the outcome is that of the page, with numbers within field/jobs.py's TOLERANCE
  wrong    the outcome is another one, with the number
  refuses  the library raised an error on purpose, with its words
  raises   an error that the library did not foresee, with its words
  crashes  the process was ended by a signal
  hangs    the script did not end within --limit
  not run  with the reason

Exits with 77 if PyTorch, ziggurat or a library that --library names is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

HERE = Path(__file__).resolve()
Script = Callable[[Path], "str | None"]


class Library(NamedTuple):
    heading: str
    module: str  # the module of its scripts
    package: str
    ranks: int


LIBRARIES = {
    "torch": Library("torch.optim", "field.pytorch", "torch", 1),
    "fsdp2": Library("FSDP2", "field.fsdp2", "torch", 2),
    "deepspeed": Library("DeepSpeed", "field.deepspeed_zero", "deepspeed", 2),
    "torchao": Library("torchao", "field.torchao_optim", "torchao", 1),
    "ziggurat": Library("Ziggurat", "field.ours", "ziggurat", 1),
}
# The reports in the page's order; the last two have no number on the page.
REPORTS = [str(number) for number in range(1, 15)] + ["sparse", "compiled"]
NOWHERE = {"3": "takes 8.6 GB and more"}
OTHERS_S = 5  # seconds that other ranks get once one rank has ended with another outcome than right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="default: all")
    parser.add_argument("--report", action="append", choices=REPORTS, help="default: all")
    parser.add_argument("--limit", type=float, default=240, help="number of seconds for one script")
    parser.add_argument("--host", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host:
        return answer(options.host, options.limit)
    asked = [LIBRARIES[name].package for name in options.library or []]
    for package in ("torch", "ziggurat", *asked):
        if importlib.util.find_spec(package) is None:
            print(f"skipped: no {package}")
            sys.exit(77)
    libraries = options.library or list(LIBRARIES)
    print_setting(libraries)
    print("| # |" + "".join(f" {LIBRARIES[name].heading} |" for name in libraries))
    print("|---|" + "---|" * len(libraries), flush=True)
    hosts = [Host(name, options.limit) for name in libraries]
    for report in options.report or REPORTS:
        print(f"| {report} |" + "".join(f" {host.cell(report)} |" for host in hosts), flush=True)
    for host in hosts:
        host.close()
    return None


def print_setting(libraries: list[str]) -> None:
    versions = []
    for package in dict.fromkeys(LIBRARIES[name].package for name in libraries):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            there = importlib.util.find_spec(package) is not None
            versions.append(f"{package} {'of this tree' if there else 'is not installed'}")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
    day = datetime.datetime.now(datetime.timezone.utc).date()
    python = platform.python_version()
    print(f"{day}: CPU only, {cpu}; Python {python}, {', '.join(versions)}\n", flush=True)


class Host:
    """A process that has imported a library, and forks a process for each script."""

    def __init__(self, name: str, limit: float) -> None:
        self._missing = ""
        if importlib.util.find_spec(LIBRARIES[name].package) is None:
            self._missing = f"not run: no {LIBRARIES[name].package}"
            return
        settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--host", name, "--limit", str(limit)],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def cell(self, report: str) -> str:
        if report in NOWHERE:
            return f"not run: {NOWHERE[report]}"
        if self._missing:
            return self._missing
        print(report, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip() or "not run: the library ended the process"

    def close(self) -> None:
        if not self._missing:
            self._process.stdin.close()
            self._process.wait()


def answer(name: str, limit: float) -> None:
    """Prints, for each line of standard input, the outcome of a report's scripts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        scripts = importlib.import_module(LIBRARIES[name].module)
        missing = ""
    except ImportError as error:
        missing = f"not run: {error}"
    for line in sys.stdin:
        report = line.strip()
        text = missing or f"not run: {scripts.NOT_RUN.get(report)}"
        if not missing and report in scripts.CELLS:
            text = ends_of(scripts.CELLS[report], LIBRARIES[name].ranks, limit)
        print(text, file=answers, flush=True)


def ends_of(variants: dict[str, Script], ranks: int, limit: float) -> str:
    """Groups the variants that had the same outcome."""
    ends: dict[str, list[str]] = {}
    for name, script in variants.items():
        ends.setdefault(run(script, ranks, limit), []).append(name)
    if len(ends) == 1:
        return next(iter(ends))
    rightest = sorted(ends.items(), key=lambda one: not one[0].startswith("right"))
    return "; ".join(f"{', '.join(names)}: {end}" for end, names in rightest)


def run(script: Script, ranks: int, limit: float) -> str:
    folder = Path(tempfile.mkdtemp(prefix="field-reports-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    try:
        for rank in range(ranks):
            children[rank] = os.fork()
            if children[rank] == 0:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                be_a_rank(script, folder, {key: str(value) for key, value in place.items()})
        return end_of(children, folder, limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def be_a_rank(script: Script, folder: Path, place: dict[str, str]) -> NoReturn:
    try:
        os.setsid()
        os.environ |= place
        log = os.open(folder / f"log-{place['RANK']}", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        part = folder / f"part-{place['RANK']}"
        part.write_text(end_of_script(script, folder))
        part.rename(folder / f"end-{place['RANK']}")
    finally:
        os._exit(0)  # leaves threads and process groups, which are no part of the outcome


def end_of(children: dict[int, int], folder: Path, limit: float) -> str:
    until = time.monotonic() + limit
    statuses: dict[int, int] = {}
    while len(statuses) < len(children) and time.monotonic() < until:
        for rank in children.keys() - statuses.keys():
            pid, status = os.waitpid(children[rank], os.WNOHANG)
            if pid:
                statuses[rank] = os.waitstatus_to_exitcode(status)
                if not answer_of(folder, rank).startswith("right"):
                    until = min(until, time.monotonic() + OTHERS_S)
        time.sleep(0.02)
    for rank, pid in children.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also kills every process that the rank started
        if rank not in statuses:
            os.waitpid(pid, 0)
    return first_end(statuses, len(children), folder, limit)


def first_end(statuses: dict[int, int], ranks: int, folder: Path, limit: float) -> str:
    """Returns the outcome of all ranks. If some are not right, it is that of the first of them,
    because the other ranks only lost it."""
    answers = [file for rank in range(ranks) if (file := folder / f"end-{rank}").exists()]
    answers.sort(key=lambda file: file.stat().st_mtime_ns)
    said = [file.read_text() for file in answers]
    silent = [silent_end(statuses.get(r), limit) for r in range(ranks) if not answer_of(folder, r)]
    return [*(end for end in said if not end.startswith("right")), *silent, *said][0]


def answer_of(folder: Path, rank: int) -> str:
    file = folder / f"end-{rank}"
    return file.read_text() if file.exists() else ""


def silent_end(status: int | None, limit: float) -> str:
    if status is None:
        return f"hangs: it did not end within {limit:g} s"
    return f"crashes: {signal.Signals(-status).name if status < 0 else f'exit code {status}'}"


def end_of_script(script: Script, folder: Path) -> str:
    from field.jobs import Wrong
    from field.models import brief

    try:
        remark = script(folder)
    except Wrong as wrong:
        return f"wrong: {wrong}"
    except BaseException as error:
        traceback.print_exc()
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        foreseen = line.startswith(("raise", "assert"))
        return f"{'refuses' if foreseen else 'raises'}: {brief(error)}"
    return f"right{remark or ''}"


if __name__ == "__main__":
    main()
