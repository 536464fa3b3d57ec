# SPDX-License-Identifier: Apache-2.0
"""Bounds the freed memory that the C library keeps, while much is taken and freed again and again.

Giving it back (malloc_trim) is dear: the call takes milliseconds, and each page that is taken again costs a
fault. So it is given back only where the process would otherwise have more than its most used memory
and a reserve. Below that the peak of the process does not grow by it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from pathlib import Path
from typing import Any

from ziggurat._memory.memory import advise, is_tuned, libc, return_freed

__all__ = ["RESERVE_BYTES", "LooseMemory", "loose", "resident_bytes"]

RESERVE_BYTES = 160 << 20  #: of freed memory beyond the most used memory
_LOOK_BYTES = 16 << 20  # are freed between two looks, which take 20 us
_PAGE = mmap.PAGESIZE  # of which /proc/self/statm counts
_MADV_HUGEPAGE = 14


class LooseMemory:
    """Follows the memory of this process, for any thread."""

    def __init__(self) -> None:
        self._freed_bytes = 0  # since the last look
        self._most_used_bytes = 0  # of the C library's memory
        self._other_bytes = 0  # of the process: what is not the C library's
        self._looking = threading.Lock()

    def count_freed(self, size_bytes: int) -> None:
        """Tells of memory that is freed soon."""
        self._freed_bytes += size_bytes
        if self._freed_bytes >= _LOOK_BYTES:
            self.look()

    def look(self) -> None:
        """Gives freed memory back if the process has too much of it."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._freed_bytes = 0
            self._return_if_more()
        finally:
            self._looking.release()

    def _return_if_more(self) -> None:
        if resident_bytes() <= self._limit_bytes():
            return
        used = _used_bytes()
        self._most_used_bytes = max(self._most_used_bytes, used)
        if resident_bytes() <= self._limit_bytes():
            return
        return_freed()
        _take_huge_pages()
        self._other_bytes = resident_bytes() - used

    def _limit_bytes(self) -> int:
        return self._other_bytes + self._most_used_bytes + RESERVE_BYTES


def _take_huge_pages() -> None:
    """Lets the C library's heap have huge pages where it has none, so that what is taken again costs a fault for
    2 MiB instead of one for 4 KiB. The kernel may refuse, which changes nothing."""
    if is_tuned():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            begin, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
            advise(begin, end - begin, _MADV_HUGEPAGE)


def resident_bytes() -> int:
    """Returns the process's memory without pages of files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * _PAGE


class _MallInfo(ctypes.Structure):
    """As malloc.h has struct mallinfo2: sizes, of which these two are what was given out."""

    _fields_ = [
        ("others", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # in mappings of its own
        ("more", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # in arenas
        ("rest", ctypes.c_size_t * 2),
    ]


@functools.cache
def _mallinfo() -> Any:
    found = getattr(libc(), "mallinfo2", None)  # glibc has it from 2.33 on
    if found is not None:
        found.restype = _MallInfo
    return found


def _used_bytes() -> int:
    """Returns what the C library has given out; 0 where it cannot tell, so that this counts as what is not its own."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return 0
    its: _MallInfo = mallinfo()
    return int(its.uordblks) + int(its.hblkhd)


loose = LooseMemory()  #: of the process, as the C library is
