# SPDX-License-Identifier: Apache-2.0
"""Runs the test programs of this folder in forks of one process that has imported PyTorch: importing it a hundred times
was a tenth of the tests' work.

preloaded.py start SOCKET                runs such a process, which ends when the program that called this ends, as ctest
preloaded.py run SOCKET FILE ARGUMENTS   as `python FILE ARGUMENTS`; just that where no such process listens
preloaded.py stop SOCKET                 ends the process once what it runs has ended

All three are called by the same program, whose number the socket's name ends with: another has a process of its own.

Imported is what each of these programs imports anyway: neither transformers nor PEFT, since the package asks whether a
script has imported these.
"""

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

_STREAMS = 3
_LARGEST = 1 << 20  # of a request, which has an environment
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _preload() -> None:
    import gc

    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401: the first optimizer imports it

    gc.collect()
    gc.freeze()  # what stays to the end is not looked at for garbage


def _kill_tree(pid: int) -> None:
    """Kills a process and its descendants, in whatever group they are, as ctest does with those of its own: an orphan is
    no descendant. Any of them, and any of their threads, may end meanwhile."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)  # it starts none meanwhile
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in children.read_text().split():
                    _kill_tree(int(child))
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


class _Server:
    """Forks for each request, and says what the fork ended with. The program of one who asked and went away is killed."""

    def __init__(self, listener: socket.socket, caller: int) -> None:
        self._listener, self._caller = listener, caller
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by the process's descriptor: its id, who asked
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(caller, select.POLLIN)

    def serve(self) -> bool:
        """Returns True in a fork that is the program now, False in the server, when it is to end."""
        stopping = False
        while not stopping or self._running:
            ready = self._poll.poll()[0][0]
            if ready == self._listener.fileno():
                asking, _ = self._listener.accept()
                text, files, _, _ = socket.recv_fds(asking, _LARGEST, _STREAMS)
                stopping = stopping or text == b"stop"
                if files and self._fork(asking, json.loads(text), files):
                    return True
            elif ready == self._caller:
                stopping = True
                self._poll.unregister(ready)
                for child, _ in self._running.values():
                    self._kill(child)
            elif ready in self._running:
                self._tell_end(ready)
            else:
                self._poll.unregister(ready)
                self._kill(next(pid for pid, asking in self._running.values() if asking.fileno() == ready))
        return False

    @staticmethod
    def _kill(child: int) -> None:
        _kill_tree(child)
        with contextlib.suppress(ProcessLookupError):  # those of its group whose parents had ended
            os.killpg(child, signal.SIGKILL)

    def _fork(self, asking: socket.socket, asked: dict, files: list[int]) -> bool:
        server = os.getpid()
        child = os.fork()
        if child == 0:
            self._leave(asking)
            _become(asked, files, server)
            return True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # either of both may be first
            os.setpgid(child, child)
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # who asked may have gone, which the poll tells
            asking.send(b"runs")
        descriptor = os.pidfd_open(child)
        self._running[descriptor] = child, asking
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(asking, select.POLLIN)
        return False

    def _leave(self, asking: socket.socket) -> None:
        for descriptor, (_, other) in self._running.items():
            os.close(descriptor)
            other.close()
        os.close(self._caller)
        self._listener.close()
        asking.close()

    def _tell_end(self, descriptor: int) -> None:
        child, asking = self._running.pop(descriptor)
        _, status = os.waitpid(child, 0)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError, KeyError):  # who asked may have gone
            self._poll.unregister(asking)
            asking.send(str(os.waitstatus_to_exitcode(status)).encode())
        asking.close()


def _become(asked: dict, files: list[int], server: int) -> None:
    """Takes the streams, the folder and the environment of who asked."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["program"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def start(name: str) -> None:
    try:
        caller = os.pidfd_open(os.getppid())
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Path(name).unlink(missing_ok=True)
        listener.bind(name)
    except (OSError, AttributeError) as error:  # Python has none of these where its system had not
        print(f"each test imports PyTorch by itself: {error}")
        return
    listener.listen(128)
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(_STREAMS):
        os.dup2(nothing, stream)
    os.close(nothing)
    try:
        _preload()
    except (ImportError, OSError):  # the tests say so, each by itself
        Path(name).unlink(missing_ok=True)
        return
    if _Server(listener, caller).serve():
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        Path(name).unlink(missing_ok=True)


def run(name: str, *program: str) -> None:
    asked = {"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}
    answer = b""
    with contextlib.suppress(OSError):
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asking.connect(name)
        socket.send_fds(asking, [json.dumps(asked).encode()], range(_STREAMS))
        answer = asking.recv(_LARGEST)
    if not answer:
        os.execv(sys.executable, [sys.executable, *program])
    ended = asking.recv(_LARGEST)
    if not ended:
        sys.exit(f"{name}: the process that ran {program[0]} has gone")
    if int(ended) < 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
        os.kill(os.getpid(), -int(ended))
    sys.exit(int(ended))


def stop(name: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(name)
        asking.send(b"stop")


if __name__ == "__main__":
    {"start": start, "run": run, "stop": stop}[sys.argv[1]](f"{sys.argv[2]}.{os.getppid()}", *sys.argv[3:])
