# SPDX-License-Identifier: Apache-2.0
"""The directory of a run on ``nvme_path``, which other jobs may use too.

As with DeepSpeed's swap files, state on a drive lasts only as long as its run; a run continues
from ``save_checkpoint()``. Every rank has a directory with a name of its own, and holds a lock in
it. The directory is removed when the run ends. If the run was killed, the next run on that host
that uses the path removes it, because nobody holds its lock. Directories of other hosts are left
alone.
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

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._log import logger

_LOCK = "lock"


class RunDirectory:
    """Makes and locks a rank's directory. Errors: InvalidArgument, with the reason, if `nvme_path`
    cannot be written."""

    def __init__(
        self, nvme_path: str | os.PathLike[str], rank: int, section: str = "offload_optimizer"
    ) -> None:
        # The user's name keeps other users' jobs apart, whose directories this job must not remove.
        prefix = f"ziggurat-{os.getuid()}-{socket.gethostname()}-"
        try:
            os.makedirs(nvme_path, exist_ok=True)
            _remove_left_behind(Path(nvme_path), prefix)
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}rank{rank}-", dir=nvme_path))
            self._lock = _locked(self.path)
        except OSError as error:
            raise InvalidArgument(
                f'{section}.nvme_path="{nvme_path}": {error.strerror} ({error.filename}). '
                "Give a directory on a drive that this user can write"
            ) from error
        # The finalizer also runs when the interpreter ends.
        self.remove = weakref.finalize(self, _remove, os.getpid(), self.path, self._lock)


def _locked(folder: Path) -> int:
    """Makes the lock, which gets its name once it is held. So a lock that nobody holds belongs to a
    run that has ended."""
    made = folder / f"{_LOCK}.new"
    lock = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(folder / _LOCK)
    return lock


def _remove(process: int, folder: Path, lock: int) -> None:
    if os.getpid() != process:
        return  # a forked child, which has this object too, has ended
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
