# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own, for tests that kill them."""

import contextlib
import os
import random
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

    def kill_and_resume(
        self, start: Callable[[], int], kills: int, took: float, ended: Callable[[], None]
    ) -> None:
        """Calls `start` for runs that go on from each other, and kills them until `kills` were, each within
        the `took` seconds of a whole one, by ZIGGURAT_SEED. `ended` looks at one that came to its end, and
        lets the next begin anew. The last one comes to its end."""
        draw = random.Random(int(os.environ.get("ZIGGURAT_SEED", "1")))
        killed = 0
        while killed < kills:
            child = start()
            status = self.status_of(child, within=draw.uniform(0.05, 0.9 * took))
            if status is None:
                status = self.status_after_kill(child)
            if status == -signal.SIGKILL:
                killed += 1
                continue
            assert status == 0
            ended()
        assert self.status_of(start()) == 0


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
