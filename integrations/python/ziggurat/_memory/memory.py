# SPDX-License-Identifier: Apache-2.0
"""Finds how much memory this process may still take, reads and writes sizes, and gives back what was
freed."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re

from ziggurat._library.abi import InvalidArgument, call


def free_bytes() -> int:
    """Returns what the machine has left, or less where the limits of this process's control groups
    leave less. Pages of files count as free."""
    return int(call("ziggurat_free_memory"))


def return_freed() -> None:
    """Gives freed memory back to the system, where the C library has a call for it. Pieces of some MiB
    otherwise stay with the process."""
    trim = getattr(libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_MOST = 32 << 20  # of glibc on 64 bits, which it also comes to by itself
_INT_MAX = (1 << 31) - 1
_kept_freed_bytes = 2 * _MMAP_THRESHOLD_MOST  # as much as it comes to by itself too


def keep_freed(size_bytes: int) -> None:
    """Lets the C library keep `size_bytes` of freed memory for its next use, or more. By itself it gives back what
    lies at the end of its memory, as the gradients of a step do, and each page costs a fault in the next
    step. Does nothing where the environment has settings of the user's, or another C library is used."""
    mallopt = getattr(libc(), "mallopt", None)
    if mallopt is None or is_tuned():
        return
    global _kept_freed_bytes
    _kept_freed_bytes = max(_kept_freed_bytes, min(size_bytes, _INT_MAX))
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MOST)
    mallopt(_M_TRIM_THRESHOLD, _kept_freed_bytes)


def is_tuned() -> bool:
    """Returns whether the environment has settings of the user's for when the C library gives memory back."""
    its_own = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return bool(its_own) or any(f"glibc.malloc.{name}" in tunables for name in ("trim", "mmap", "top_pad", "hugetlb"))


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Tells the kernel how pages of this process are used (madvise). Returns 0, or the number of the error
    with which it refuses."""
    failed = libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)
    return ctypes.get_errno() if failed else 0


@functools.cache
def libc() -> ctypes.CDLL:
    """Returns the C library."""
    return ctypes.CDLL(None, use_errno=True)


_RETURNED_BYTES = 64 << 20
_freed_bytes = 0


def count_freed(size_bytes: int) -> None:
    """Tells of memory that is freed between what stays, which the C library would keep until it finds a
    use for it. Gives it back from time to time."""
    global _freed_bytes
    _freed_bytes += size_bytes
    if _freed_bytes >= _RETURNED_BYTES:
        _freed_bytes = 0
        return_freed()


def size_text(size_bytes: float) -> str:
    """ "46.1 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def size_of(size: int | str) -> float:
    """Returns the bytes of a size as settings give it: 67108864, "64MiB" or "0.1GB"; NaN if it is
    none, about which the engine complains."""
    text = str(size).lower().replace(" ", "")
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([kmgt]?)(ib|b|)", text)
    if found is None:
        return math.nan
    number, prefix, unit = found.groups()
    return float(number) * (1000 if unit == "b" else 1024) ** " kmgt".index(prefix or " ")


def bytes_of(name: str, size: int | str) -> int:
    """Returns the bytes of the size that argument `name` has. Errors: InvalidArgument if it is none."""
    found = size_of(size)
    if math.isnan(found):
        raise InvalidArgument(f'{name}="{size}": give bytes, or a text like "4GiB"')
    return int(found)
