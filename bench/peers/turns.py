# SPDX-License-Identifier: Apache-2.0
"""Runs the rows of a comparison in turn on one machine, and measures what memory and drive alone
take.

Hosts drift by tens of per cent within minutes, so rows are compared with their neighbours in time.
Each row is one process, or one for each of its ranks, that waits for its turn. A worker calls
`answer_turns`; a driver makes `Row`s, calls `alternate` and prints medians with `interval`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import mmap
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD_BYTES = 12  # bytes of a parameter's record, which each step reads and writes
# The bytes that an update moves in memory: the record, the gradient, the parameter, and the
# parameter's cache line.
UPDATE_BYTES = 2 * RECORD_BYTES + 2 + 2 + 2
TURN_LIMIT_S = 900  # the first turn builds DeepSpeed's operations if they are not built


class CannotRun(Exception):
    pass


class Row:
    """The processes of a row, one for each rank, which begin their turns together."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        folder: Path,
        environments: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        self.name = name
        self._logs = [folder / f"{name}-{rank}.log" for rank in range(len(commands))]
        self._processes = []
        for command, more, log in zip(commands, environments, self._logs, strict=True):
            with log.open("w") as file:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        env={**os.environ, **more},
                    )
                )

    def turn(self) -> list[dict[str, Any]]:
        """Returns what each rank reports of its turn."""
        said: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + TURN_LIMIT_S
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            try:
                for process in self._processes:
                    print(file=process.stdin, flush=True)
                while len(said) < len(self._processes):
                    ready = waiting.select(until - time.monotonic())
                    if not ready:
                        raise CannotRun(f"a process did not answer within {TURN_LIMIT_S} s")
                    for key, _ in ready:
                        said[key.data] = json.loads(key.fileobj.readline())
                        waiting.unregister(key.fileobj)
            except (OSError, ValueError):
                raise CannotRun(self._last_words()) from None
        return [said[rank] for rank in sorted(said)]

    def kill(self) -> None:
        """Ends processes that may still work beside other rows."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # the process was killed
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _last_words(self) -> str:
        """Returns the last line of the first rank that ended."""
        ended = [
            log
            for process, log in zip(self._processes, self._logs, strict=True)
            if process.poll() is not None
        ]
        lines = [
            line for log in ended or self._logs for line in log.read_text().strip().splitlines()
        ]
        return lines[-1] if lines else "no word"


def answer_turns(prepare: Callable[[], Callable[[], dict[str, Any]]]) -> None:
    """Calls the function that `prepare` returns for each line of standard input, and prints the
    result. What libraries print goes to the log.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turn = prepare()
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answer, flush=True)


def alternate(
    rows: Sequence[Row], rounds: int, after: Callable[[], None]
) -> dict[str, list[list[dict[str, Any]]]]:
    """Returns what the ranks of each row reported in each round.

    A row that cannot run is named with its reason and left out.
    """
    figures: dict[str, list[list[dict[str, Any]]]] = {row.name: [] for row in rows}
    for number in range(-1, rounds):  # the first round is warm-up
        for row in rows:
            if row.name not in figures:
                continue
            try:
                said = row.turn()
            except CannotRun as reason:
                print(f"{row.name} cannot run: {reason}", flush=True)
                row.kill()
                del figures[row.name]
                continue
            if number >= 0:
                figures[row.name].append(said)
                loss = statistics.mean(one["loss"] for one in said)
                took = f"{slowest(said):.3f} s a step, loss {loss:.3f}"
                print(f"round {number + 1}: {row.name:10} {took}", flush=True)
        if number >= 0:
            after()
    return figures


def slowest(said: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds per step of a row's slowest rank in a round."""
    return max(one["seconds"] for one in said)


def speeds(
    row: Sequence[Sequence[Mapping[str, Any]]], base: Sequence[Sequence[Mapping[str, Any]]]
) -> list[float]:
    """Returns the speeds of `row` relative to `base`, round by round."""
    return [slowest(b) / slowest(r) for r, b in zip(row, base, strict=True)]


def memory_seconds(torch: Any, count: int) -> float:
    """Returns the seconds that copying takes for the bytes that an update of `count` parameters
    reads and writes."""
    source = torch.ones(8 << 20)  # more than caches hold, less than the activations that were here
    target = torch.zeros_like(source)
    begin = time.perf_counter()
    for _ in range(32):
        target.copy_(source)
    return UPDATE_BYTES * count / (32 * 2 * source.nbytes / (time.perf_counter() - begin))


def drive_seconds(directory: Path, total_bytes: int) -> float:
    """Returns the seconds that reading and then writing `total_bytes` takes, 8 MiB at a time from 4
    threads, past the page cache.
    """
    piece = 8 << 20
    total_bytes = math.ceil(total_bytes / piece) * piece
    path = directory / "drive"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, total_bytes)
    buffers = [mmap.mmap(-1, piece) for _ in range(4)]
    for buffer in buffers:
        buffer.write(os.urandom(piece))

    def run(call: Callable[..., int]) -> float:
        def part(index: int) -> None:
            for offset in range(index * piece, total_bytes, 4 * piece):
                call(fd, [buffers[index]], offset)

        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(part, range(4)))
        return time.perf_counter() - begin

    run(os.pwritev)
    seconds = run(os.preadv) + run(os.pwritev)
    os.close(fd)
    path.unlink()
    return seconds


def interval(values: Sequence[float]) -> str:
    """Returns the median, and the interval of ranks that holds it at 95 %, by the binomial
    distribution."""
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    low = max(rank - 1, 0)
    return f"{statistics.median(ordered):.3f} [{ordered[low]:.3f}, {ordered[count - 1 - low]:.3f}]"
