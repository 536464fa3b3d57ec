# SPDX-License-Identifier: Apache-2.0
"""The directory of a run on ``nvme_path``, which other jobs may use too.

State on a drive lasts as long as its run: ``save_checkpoint()`` is what a run is gone on from, as
with DeepSpeed's swap files. Every rank has a directory of its own name there, and holds a lock in
it. It is removed when the run ends; what a killed run left is removed by the next one on that host
that uses the path, since nobody holds its lock. A directory of another host is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed._log import logger

_LOCK = "lock"


class RunDirectory:
    """Errors: InvalidArgument where `nvme_path` cannot be written, naming the reason."""

    def __init__(self, nvme_path: str | os.PathLike[str], rank: int) -> None:
        # A user's name keeps jobs of other users apart: their directories are not ours to remove.
        prefix = f"ziggurat-{os.getuid()}-{socket.gethostname()}-"
        try:
            os.makedirs(nvme_path, exist_ok=True)
            _remove_left_behind(Path(nvme_path), prefix)
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}rank{rank}-", dir=nvme_path))
            self._lock = _locked(self.path)
        except OSError as error:
            raise InvalidArgument(
                f'offload_optimizer.nvme_path="{nvme_path}": {error.strerror} ({error.filename}): '
                "give a directory on a drive that this user can write"
            ) from error
        # Also at exit: an interpreter that ends runs it.
        self.remove = weakref.finalize(self, _remove, os.getpid(), self.path, self._lock)


def _locked(folder: Path) -> int:
    """The lock gets its name when it is held: one that nobody holds is of a run that has ended."""
    made = folder / f"{_LOCK}.new"
    lock = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(folder / _LOCK)
    return lock


def _remove(process: int, folder: Path, lock: int) -> None:
    if os.getpid() != process:
        return  # a forked child ends, which has this object too
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_left_behind(nvme_path: Path, prefix: str) -> None:
    for folder in nvme_path.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                logger.info(f"removed {folder}, which a run that has ended left behind")
            finally:
                os.close(lock)
