# SPDX-License-Identifier: Apache-2.0
"""Lets chosen system calls of this process fail, as a full or a broken drive does: a filter of seccomp asks a thread of this
module about each of them. Filters stay until the process ends, so use it in a process of the test's own."""

import ctypes
import fcntl
import os
import platform
import struct
import threading

# A drive's calls of an engine with ZIGGURAT_IO=threads, by their numbers.
_CALLS = {
    "x86_64": {"pwrite64": 18, "fsync": 74, "fdatasync": 75, "fallocate": 285},
    "aarch64": {"pwrite64": 68, "fsync": 82, "fdatasync": 83, "fallocate": 47},
}.get(platform.machine(), {})
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine(), 0)
_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8  # prctl(2), seccomp(2)
_ASK, _ALLOW, _GO_ON = 0x7FC00000, 0x7FFF0000, 1
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl(2), of 80 and 24 bytes
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF


class Unsupported(Exception):
    """The machine has no such filters."""


class FailingCalls:
    """Counts the calls, and has some of them fail."""

    def __init__(self) -> None:
        """Of this thread and those that begin later."""
        if not _CALLS:
            raise Unsupported(platform.machine())
        self.count = 0  #: of calls since arm()
        self.failed: list[str] = []  #: the names of those that failed
        self._at, self._times, self._error = 0, 0, 0
        self._opened = threading.Event()
        self._listener = -1
        threading.Thread(target=self._answer, daemon=True).start()  # has no filter
        self._listener = _listener()
        self._opened.set()

    def arm(self, at: int, error: int, times: int = 1) -> None:
        """Has call number `at` from now on, from 1 on, and those after it, `times` in all, fail with errno `error`."""
        self.count, self._at, self._times, self._error = 0, at, times, error

    def disarm(self) -> None:
        self._times = 0

    def _answer(self) -> None:
        self._opened.wait()
        names = {number: name for name, number in _CALLS.items()}
        while True:
            asked = bytearray(80)
            fcntl.ioctl(self._listener, _RECEIVE, asked)
            identity, _, _, number = struct.unpack_from("=QIIi", asked)
            self.count += 1
            fails = self._at <= self.count < self._at + self._times
            if fails:
                self.failed.append(names[number])
            answer = struct.pack("=QqiI", identity, 0, -self._error if fails else 0, 0 if fails else _GO_ON)
            fcntl.ioctl(self._listener, _SEND, bytearray(answer))


def _listener() -> int:
    """Sets the filter, and returns the descriptor with which it asks."""
    numbers = list(_CALLS.values())
    code = [struct.pack("=HBBI", _LOAD, 0, 0, 0)]  # the number of the call
    for place, number in enumerate(numbers):
        code.append(struct.pack("=HBBI", _JUMP_IF_EQUAL, len(numbers) - place, 0, number))
    code += [struct.pack("=HBBI", _RETURN, 0, 0, value) for value in (_ALLOW, _ASK)]
    program = ctypes.create_string_buffer(b"".join(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise Unsupported(os.strerror(ctypes.get_errno()))
    descriptor: int = libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, header)
    if descriptor < 0:
        raise Unsupported(os.strerror(ctypes.get_errno()))
    return descriptor
