# SPDX-License-Identifier: Apache-2.0
"""Ranks of the package in processes of their own: exchanges, steps together, and a rank that dies.

Run by pytest; as a script it exits with 77 where pytest is missing.
"""

from __future__ import annotations

import array
import math
import os
import signal
import socket
import subprocess
import sys
import time

try:
    import pytest
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def runtime_of(rank: int, world_size: int, port: int) -> ziggurat.Runtime:
    ranks = ziggurat.Ranks(rank, world_size, f"127.0.0.1:{port}", connect_timeout_s=60)
    return ziggurat.Runtime(threads=1, ranks=ranks)


def address(values: array.array) -> int:
    return values.buffer_info()[0]


class Job:
    """Processes that each run `function` of this file as one rank."""

    def __init__(self, function: str, world_size: int, *arguments: object, first: int = 0) -> None:
        self.port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, function, str(rank), str(world_size), str(self.port)]
                + [str(argument) for argument in arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(first, world_size)
        ]

    def said(self) -> list[str]:
        """What each printed; all must end well."""
        texts = [process.communicate(timeout=120)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(texts), texts
        return texts


def exchanges(rank: int, world_size: int, port: int) -> None:
    runtime = runtime_of(rank, world_size, port)
    exchange = ziggurat.Exchange(runtime, "gradients")
    count = 50_000  # of doubles, for each rank
    sent = array.array("d", [0.0]) * (count * world_size)
    for to in range(world_size):
        sent[to * count] = 100 * rank + to
    came = array.array("d", [-1.0]) * len(sent)
    everything = array.array("d", [-1.0]) * len(sent)
    tickets = [
        exchange.all_to_all(address(sent), address(came), 8 * count),
        exchange.all_gather(address(sent), address(everything), 8 * count),
    ]
    assert exchange.all_reduce([rank, 0.5]) == [sum(range(world_size)), 0.5 * world_size]
    for ticket in reversed(tickets):
        ticket.finish()
    assert [came[r * count] for r in range(world_size)] == [
        100 * r + rank for r in range(world_size)
    ]
    assert [everything[r * count] for r in range(world_size)] == [
        100 * r for r in range(world_size)
    ]
    assert came[1] == everything[count - 1] == 0.0
    exchange.barrier()
    exchange.close()
    runtime.close()
    print("exchanged", end="")


def test_ranks_exchange_what_is_in_their_memory():
    assert Job("exchanges", 3).said() == ["exchanged"] * 3


def steps(rank: int, world_size: int, port: int, store: str) -> None:
    runtime = runtime_of(rank, world_size, port)
    values = array.array("f", [1.0] * (10 + 1000 * rank))
    gradient = array.array("f", [1.0] * len(values))
    piece = ziggurat.Param("weight", (len(values),), "fp32", address(values))
    engine = ziggurat.Engine(
        runtime, [piece], {"store": f"{store}/{rank}", "optimizer": "sgd", "run": "model=small"}
    )
    begun_at = engine.generation
    good = ziggurat.GroupStep(lr=0.25, betas=(0.0, 0.0))
    for _ in range(3):
        engine.lend_gradient(0, "fp32", address(gradient), len(gradient))
        engine.step([good])
        engine.wait()
    engine.lend_gradient(0, "fp32", address(gradient), len(gradient))
    try:
        engine.step([ziggurat.GroupStep(lr=float("nan"))] if rank == 1 else [good])
    except ziggurat.InvalidArgument as refused:
        assert ("rank 1 refused the step" in str(refused)) == (rank != 1), refused
    else:
        raise AssertionError("the step was made")
    engine.make_durable()
    print(begun_at, engine.durable_generation, values[-1], end="")
    engine.close()
    runtime.close()


def test_ranks_step_and_resume_together(tmp_path):
    assert Job("steps", 2, tmp_path).said() == ["0 3 0.25"] * 2
    assert Job("steps", 2, tmp_path).said() == ["3 6 -0.5"] * 2


def reads(rank: int, world_size: int, port: int) -> None:
    runtime = runtime_of(rank, world_size, port)
    meet = ziggurat.Exchange(runtime, "meet")
    values = array.array("f", [float(rank + 1)] * (5 + rank))
    piece = ziggurat.Param("weight", (len(values),), "fp32", address(values))
    engine = ziggurat.Engine(runtime, [piece], {"placement": "optimizer=host"})
    if rank == 0:  # the other does nothing for it
        found = {}
        for other in range(world_size):
            for name, count in engine.pieces_of(other).items():
                master = array.array("f", [0.0] * count)
                engine.read_state_of(other, name, "master", address(master), count)
                found[other] = list(master)
        assert found == {0: [1.0] * 5, 1: [2.0] * 6}, found
        with pytest.raises(ziggurat.InvalidArgument, match="rank 1, 'bias'"):
            engine.read_state_of(1, "bias", "master", address(values), 5)
    meet.barrier()
    for closed in (engine, meet, runtime):
        closed.close()


def test_a_rank_reads_what_another_has():
    Job("reads", 2).said()


def waits(rank: int, world_size: int, port: int) -> None:
    runtime = runtime_of(rank, world_size, port)
    exchange = ziggurat.Exchange(runtime, "gradients")
    exchange.barrier()
    print("met", flush=True)
    time.sleep(600)


def test_a_rank_that_dies_fails_the_calls_of_the_others():
    job = Job("waits", 2, first=1)
    (other,) = job.processes
    runtime = runtime_of(0, 2, job.port)
    exchange = ziggurat.Exchange(runtime, "gradients")
    exchange.barrier()
    assert other.stdout.readline() == "met\n"
    sent, came = array.array("d", [1.0] * 10), array.array("d", [0.0] * 20)
    pending = exchange.all_gather(address(sent), address(came), 80)
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(ziggurat.Unavailable, match="rank 1 .*all_gather"):
        pending.finish()
    with pytest.raises(ziggurat.Unavailable, match="rank 1 .*barrier"):
        exchange.barrier()
    other.communicate()
    exchange.close()
    runtime.close()


def test_settings_that_make_no_ranks_are_refused():
    with pytest.raises(ziggurat.InvalidArgument, match="no rank 2 among 2 ranks"):
        ziggurat.Runtime(ranks=ziggurat.Ranks(2, 2, "localhost:9"))
    with pytest.raises(ziggurat.InvalidArgument, match="rendezvous"):
        ziggurat.Runtime(ranks=ziggurat.Ranks(0, 2))


def norms(rank: int, world_size: int, port: int) -> None:
    runtime = runtime_of(rank, world_size, port)
    exchange = ziggurat.Exchange(runtime, "norms")
    values = array.array("f", [1.0] * 10)
    gradient = array.array("f", [0.5] * 10)
    piece = ziggurat.Param("weight", (10,), "fp32", address(values))
    engine = ziggurat.Engine(
        runtime, [piece], {"placement": "optimizer=host", "optimizer": "sgd", "run": "small"}
    )
    made = []
    for broken in (float("nan"), float("inf"), 0.5):
        gradient[3] = broken if rank == 1 else 0.5
        engine.lend_gradient(0, "fp32", address(gradient), len(gradient))
        (total,) = exchange.all_reduce([engine.gradient_norm() ** 2])
        if not math.isfinite(total):
            engine.discard_gradients()
            continue
        scale = min(1.0, 1.0 / math.sqrt(total))
        made.append(engine.step([ziggurat.GroupStep(lr=1.0, betas=(0.0, 0.0))], grad_scale=scale))
        engine.wait()
    print(made, f"{values[3]:.4f}", end="")
    for closed in (engine, exchange, runtime):
        closed.close()


def test_ranks_that_clip_skip_a_step_of_gradients_that_are_not_finite_on_one():
    """The norm over two ranks is sqrt(2 * 10 * 0.25): each gradient becomes 0.5 / sqrt(5)."""
    assert Job("norms", 2).said() == [f"[1] {1 - 0.5 / math.sqrt(5):.4f}"] * 2


def test_the_engines_word_that_a_norm_is_not_finite_is_an_error_of_its_own(monkeypatch):
    """No engine that is lent gradients clips them, so the library here says what one that clips
    does. Scripts that caught Unavailable catch it."""

    class Library:
        @staticmethod
        def ziggurat_step(*_):
            return 9

        @staticmethod
        def ziggurat_last_error_in_settings():
            return b"step 4: the norm of the gradients is nan"

    monkeypatch.setattr("ziggurat._library.abi.library", Library)
    for caught in (ziggurat.NotFinite, ziggurat.Unavailable):
        with pytest.raises(caught, match="step 4: the norm of the gradients is nan"):
            ziggurat._library.abi.call("ziggurat_step", 1, None, None)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given, which, count, at, *more = sys.argv[1:]
        globals()[given](int(which), int(count), int(at), *more)
        sys.exit(0)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
