# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's compiled operations, built once for all tests that run DeepSpeed.

They are of these tests alone. A job that is killed while it builds or loads one leaves a lock
behind, for which every later job would wait for ever. So jobs only load what build() has built, one
process at a time, and a lock that is older than a load takes is removed.
"""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

_FOLDER = Path(get_default_build_root()) / "ziggurat_deepspeed"
_STALE_S = 60.0  # a job that only loads has its lock for less than a second

# What every job that loads operations is given. ninja is beside the interpreter.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "TORCH_EXTENSIONS_DIR": str(_FOLDER),
    "CXX": str(Path(__file__).with_name("g++-without-symbols")),
}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "one_at_a_time").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_left_locks() -> None:
    with _alone():
        _remove_left_locks()


def _remove_left_locks() -> None:
    for lock in _FOLDER.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError):  # its job has ended
            if time.time() - lock.stat().st_mtime > _STALE_S:
                lock.unlink()


def build(*names: str) -> None:
    """Builds DeepSpeed's op_builder.cpu.NAMEBuilder of each name, where that is not done yet."""
    # Where something else was installed, ninja would compile in a job's load, beside those of others.
    installed = [Path(importlib.util.find_spec(name).origin) for name in ("torch", "deepspeed")]
    by = " ".join([sys.executable, ENVIRONMENT["CXX"], *(f"{path} {path.stat().st_mtime_ns}" for path in installed)])
    with _alone():
        _remove_left_locks()
        marks = [_FOLDER / f"{name}.built" for name in names]
        left = [mark for mark in marks if not mark.exists() or mark.read_text() != by]
        if not left:
            return
        loads = [f"cpu.{mark.stem}Builder().load(verbose=False)" for mark in left]
        done = subprocess.run(
            [sys.executable, "-c", "; ".join(["from deepspeed.ops.op_builder import cpu", *loads])],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"DeepSpeed's operations were not built: {done.stdout[-6000:]}")
        for mark in left:
            mark.write_text(by)
