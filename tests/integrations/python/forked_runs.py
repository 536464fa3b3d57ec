# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own, for tests that kill them."""

import contextlib
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator


class Runs:
    """Processes in the group `group`, so that what they leave behind can be ended."""

    def __init__(self, group: int) -> None:
        self._group = group

    def started(self, run: Callable[..., None], *arguments) -> int:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setpgid(0, self._group)
                with warnings.catch_warnings(action="ignore"):
                    run(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return child

    def status_of(self, child: int, within: float | None = None) -> int | None:
        """What it ended with; None if it still runs after `within` seconds."""
        until = None if within is None else time.monotonic() + within
        while True:
            pid, status = os.waitpid(child, os.WNOHANG if until else 0)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if until and time.monotonic() > until:
                return None
            time.sleep(0.002)

    def status_after_kill(self, child: int) -> int:
        """-SIGKILL, or what it ended with just before."""
        os.kill(child, signal.SIGKILL)
        status = self.status_of(child)
        assert status is not None
        return status


@contextlib.contextmanager
def forked_runs() -> Iterator[Runs]:
    group = os.fork()  # lives as long as the group is needed
    if group == 0:
        while True:
            signal.pause()
    os.setpgid(group, group)
    try:
        yield Runs(group)
    finally:
        # A DataLoader's worker whose trainer was killed before the worker had asked for its
        # parent's process id waits for it for ever.
        os.killpg(group, signal.SIGKILL)
        os.waitpid(group, 0)
