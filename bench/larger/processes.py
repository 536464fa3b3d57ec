# SPDX-License-Identifier: Apache-2.0
"""Other processes of a measurement: what they say, and fio."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def folder_of_rows(parent: Path, name: str) -> Iterator[tuple[Path, list[Any]]]:
    """Yields a new folder in `parent`, and a list for the rows (bench/peers/turns.py) that run in it. Ends them, and removes
    the folder."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    rows: list[Any] = []
    try:
        yield folder, rows
    finally:
        for row in rows:
            row.close()
        shutil.rmtree(folder, ignore_errors=True)


def said_by(command: Sequence[str], name: str, enter: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the lines of JSON that a process says, and prints them. `enter` is called in the process before it begins. Ends
    the program if it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {name}: {line.strip()}", flush=True)
            yield json.loads(line)
    if process.returncode != 0:
        sys.exit(f"the process '{name}' ended with {process.returncode}")


def drive_rate(folder: Path, size: str, seconds: int, *how: str) -> float:
    """Returns the bytes a second, reads and writes together, that fio moves past the page cache, 1 MiB at a time, `how` it is told."""
    command = ["fio", "--name=rate", f"--directory={folder}", f"--size={size}", "--bs=1m", "--direct=1", "--ioengine=io_uring",
               "--iodepth=16", "--time_based", f"--runtime={seconds}", "--output-format=json", *how]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["jobs"][0]
    (folder / "rate.0.0").unlink()
    return float(found["read"]["bw_bytes"] + found["write"]["bw_bytes"])
