# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: processes of their own that talk over gloo, as torchrun would start them."""

import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401: the first optimizer of a process imports it, for 1.5 s in each rank
import torch.distributed as dist

_PATIENCE = 120.0  # for a case of a few seconds, on a machine that has other work


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _be_rank(
    rank: int, world: int, port: int, out: int, words: str, run: Callable[[], Any]
) -> None:
    """In a forked child: what `run` returns goes to `out`, what is said to the file `words`."""
    status = 1
    try:
        sys.stderr = open(words, "w", buffering=1)  # noqa: SIM115: pytest's is its own
        os.dup2(sys.stderr.fileno(), 2)
        # What waits for a rank that never comes says where.
        faulthandler.dump_traceback_later(_PATIENCE, exit=True, file=sys.stderr)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        torch.set_num_threads(1)
        with warnings.catch_warnings(action="ignore"):
            dist.init_process_group("gloo")
            memory = io.BytesIO()
            torch.save(run(), memory)
            dist.barrier()
            dist.destroy_process_group()
        with os.fdopen(out, "wb") as pipe:
            pipe.write(memory.getvalue())
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Ranks:
    """Forked children, each with a pipe for what it returns and a file for what it says."""

    def __init__(self, world: int, folder: Path, run: Callable[[int], Any]) -> None:
        port = free_port()
        self._words = [folder / f"words-{rank}" for rank in range(world)]
        self.children: list[int] = []
        self.pipes: list[int] = []
        for rank in range(world):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read)
                _be_rank(rank, world, port, write, str(self._words[rank]), lambda r=rank: run(r))
            os.close(write)
            self.children.append(child)
            self.pipes.append(read)
        self.codes: list[int | None] = [None] * world

    def poll(self) -> None:
        for rank, child in enumerate(self.children):
            if self.codes[rank] is None:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    def wait(self, until: float) -> None:
        self.poll()
        while None in self.codes and time.monotonic() < until:
            time.sleep(0.005)
            self.poll()

    def words(self, rank: int) -> str:
        return self._words[rank].read_text(errors="replace")

    def check(self) -> None:
        said = "".join(f"\nrank {r}:\n{self.words(r)[-6000:]}" for r in range(len(self.children)))
        assert self.codes == [0] * len(self.children), f"the ranks ended with {self.codes}{said}"

    def close(self) -> None:
        self.poll()
        for child, code in zip(self.children, self.codes, strict=True):
            if code is None:
                os.kill(child, signal.SIGKILL)
        self.wait(time.monotonic() + 30)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.close(pipe)


def on_ranks(world: int, run: Callable[..., Any], *given: Any) -> list[Any]:
    """What ``run(rank, *given)`` returns on each of `world` ranks. All must succeed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _Ranks(world, Path(folder), lambda rank: run(rank, *given))
        try:
            results = []
            for pipe in ranks.pipes:
                with os.fdopen(pipe, "rb") as read_end:
                    results.append(read_end.read())
            ranks.wait(time.monotonic() + _PATIENCE)
            ranks.check()
        finally:
            ranks.close()
    return [torch.load(io.BytesIO(result), weights_only=False) for result in results]


class RankProcesses:
    """Ranks of ``run(rank, *given, out, told)``, to be killed: ``told(steps)`` says how far it is,
    and `out` is a file of each rank's own, from the last of `given`."""

    def __init__(self, world: int, run: Callable[..., None], *given: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._told = Path(self._folder.name) / "told"
        self._told.mkdir()

        def told(rank: int) -> Callable[[int], None]:
            return lambda steps: (self._told / f"{rank}").write_text(str(steps))

        self._ranks = _Ranks(
            world,
            Path(self._folder.name),
            lambda rank: run(rank, *given[:-1], f"{given[-1]}-{rank}", told(rank)),
        )

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()
        self._folder.cleanup()

    def wait_for_a_step(self) -> bool:
        """Until every rank has made one; False if they have all ended."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if len(list(self._told.iterdir())) == len(self._ranks.children):
                return True
            self._ranks.poll()
            if None not in self._ranks.codes:
                self._ranks.check()
                return False
            time.sleep(0.002)
        raise AssertionError("the ranks made no step")

    def kill(self, rank: int) -> bool:
        """False if it had ended by itself before."""
        self._ranks.poll()
        if self._ranks.codes[rank] is not None:
            return False
        os.kill(self._ranks.children[rank], signal.SIGKILL)
        self._ranks.codes[rank] = os.waitstatus_to_exitcode(
            os.waitpid(self._ranks.children[rank], 0)[1]
        )
        return self._ranks.codes[rank] == -signal.SIGKILL

    def end(self, within: float) -> Iterator[tuple[int, int | None, str]]:
        """Each rank, what it ended with, None if it did not by then, and what it said."""
        self._ranks.wait(within)
        for rank, code in enumerate(self._ranks.codes):
            yield rank, code, self._ranks.words(rank)

    def finish(self) -> None:
        """All must succeed."""
        self._ranks.wait(time.monotonic() + _PATIENCE)
        self._ranks.check()
