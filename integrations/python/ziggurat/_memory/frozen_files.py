# SPDX-License-Identifier: Apache-2.0
"""Leaves frozen parameters in the files that their memory is a mapping of.

So the base of a LoRA model is read where its safetensors lie, through the page cache: nothing copies
it, and nothing writes it. The pages of a unit are mapped while it is pinned, those of the next one
are read meanwhile, and what nobody needs leaves this process's memory.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ziggurat._library.native import DataLoss
from ziggurat._library.standard_error import stderr
from ziggurat._memory.memory import advise, size_text
from ziggurat._pytorch.torch_private import in_backward

LEAST_BYTES = 1 << 16  #: what is smaller is no use on its own
_PAGE = mmap.PAGESIZE
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python does not name; before Linux 5.14 there is none
_EHWPOISON = 133  # which Python names from 3.14 on
_DELETED = " (deleted)"  # what the kernel says behind the name that a file had
_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")  # what looks like a file and is on no drive
# With these it refuses to map a page of which the first use would end the process by SIGBUS.
_LOST = {
    errno.EFAULT: "the drive did not give it",
    _EHWPOISON: "the machine's memory is damaged where its pages are",
}


class _Mapping(NamedTuple):
    begin: int
    end: int
    offset: int  #: in the file
    inode: int
    device: str
    private: bool
    path: str

    def goes_on(self, before: _Mapping) -> bool:
        ends = before._replace(begin=before.end, end=self.end, offset=before.offset + before.end - before.begin)
        return self == ends


class _File(NamedTuple):
    """What is known of the file that a parameter is mapped from."""

    path: str
    end: int  #: of the parameter
    identity: tuple[int, int] | None  #: device and inode, if there is a file of the path

    @classmethod
    def of(cls, mapping: _Mapping, address: int) -> _File:
        end = mapping.offset + address - mapping.begin
        found = _status_of(mapping.path)
        # Some file systems show other numbers in one of the two places.
        known = found is not None and found.st_ino == mapping.inode and found.st_size >= end
        return cls(mapping.path, end, (found.st_dev, found.st_ino) if found is not None and known else None)

    def cut(self) -> str | None:
        """Returns words that say so if the file has become shorter than where the parameter ends."""
        found = None if self.identity is None else _status_of(self.path)
        if found is None or (found.st_dev, found.st_ino) != self.identity or found.st_size >= self.end:
            return None
        return f"the file has {found.st_size} bytes now, and the parameter ends at byte {self.end}"


def _status_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


class FileMappings:
    """The mappings of files that this process has now."""

    def __init__(self) -> None:
        self._all: list[_Mapping] = []
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            range_, kind, offset, device, inode, *path = line.split(maxsplit=5)
            if inode == "0" or not path or path[0].startswith(_IN_MEMORY) or kind[0] != "r":
                continue
            begin, end = (int(text, 16) for text in range_.split("-"))
            its = _Mapping(begin, end, int(offset, 16), int(inode), device, kind[3] == "p", path[0])
            if self._all and its.goes_on(self._all[-1]):
                self._all[-1] = self._all[-1]._replace(end=end)
            else:
                self._all.append(its)

    def of(self, tensor: torch.Tensor) -> FileRange | None:
        """Returns the tensor's place in a file, or None if its memory is not a mapping of one, or was
        written and is no longer."""
        mapping = self._around(tensor)
        if mapping is None:
            return None
        its = FileRange(tensor, mapping.private, _File.of(mapping, tensor.data_ptr() + tensor.nbytes))
        return None if its.was_written() else its

    def named(self, tensor: torch.Tensor) -> str | None:
        """Returns the file that has the tensor's values, as long as nobody writes the file. None if there
        is none, or it has no name any more, or a byte of memory near was written."""
        mapping = self._around(tensor)
        if mapping is None or not mapping.private or mapping.path.endswith(_DELETED):
            return None
        its = FileRange(tensor, private=True)
        return None if its.was_written(with_edges=True) else mapping.path

    def _around(self, tensor: torch.Tensor) -> _Mapping | None:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        return next((one for one in self._all if one.begin <= begin and end <= one.end), None)


class FileRange:
    """A parameter's memory, which is a mapping of a file: of one without a name if `file` is None."""

    def __init__(self, tensor: torch.Tensor, private: bool, file: _File | None = None) -> None:
        # It keeps the mapping: the parameter may be given other memory.
        self._storage = tensor.untyped_storage()
        self._address, self.size_bytes = tensor.data_ptr(), tensor.nbytes
        self._first_byte = 0  # in the storage
        self._private, self._file = private, file
        self._is_read = False  # and has not been let go since

    def part(self, first_byte: int, size_bytes: int) -> FileRange:
        """Returns a part of it, which is read and let go by itself."""
        its = copy.copy(self)
        its._first_byte = first_byte
        its._address, its.size_bytes, its._is_read = self._address + first_byte, size_bytes, False
        return its

    def is_in_place(self) -> bool:
        return self._storage.data_ptr() + self._first_byte == self._address

    def expect(self) -> None:
        """Lets the kernel read it into the page cache meanwhile."""
        if self.is_in_place():
            begin = self._address // _PAGE * _PAGE
            advise(begin, self._address + self.size_bytes - begin, mmap.MADV_WILLNEED)

    def read(self, name: str) -> int:
        """Reads all of it and maps it. Returns the bytes that were not there. Errors: DataLoss, with the
        parameter's `name`, where a use would end the process."""
        if not self.is_in_place():
            return 0
        begin = self._address // _PAGE * _PAGE
        size_bytes = self._address + self.size_bytes - begin
        advise(begin, size_bytes, mmap.MADV_WILLNEED)
        self._map(name, [(begin, size_bytes)])
        was_read, self._is_read = self._is_read, True
        return 0 if was_read else self.size_bytes

    def read_rows(self, name: str, rows: torch.Tensor, row_bytes: int) -> None:
        """Reads these rows of a table, and not one after the other, and maps them. Errors: as read()."""
        if not self.is_in_place():
            return
        rows = rows.unique().long()
        # PyTorch says which are none.
        rows = rows[(rows >= 0) & (rows < self.size_bytes // row_bytes)]
        begins = rows * row_bytes + self._address
        ends = (begins + row_bytes + _PAGE - 1) // _PAGE
        begins //= _PAGE
        # Neighbours are read together.
        first = torch.ones_like(begins, dtype=torch.bool)
        first[1:] = begins[1:] > ends[:-1]
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        found = zip(begins[first].tolist(), ends[last].tolist(), strict=True)
        ranges = [(begin * _PAGE, (end - begin) * _PAGE) for begin, end in found]
        for begin, size_bytes in ranges:
            advise(begin, size_bytes, mmap.MADV_WILLNEED)
        self._map(name, ranges)

    def _map(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        # The end of a page of which the file has the beginning is zeros, and no error.
        why = None if self._file is None else self._file.cut()
        if why is None:
            codes = (advise(*one, _POPULATE_READ) for one in ranges)
            # Other errors are those of a kernel that has no such call, or no memory now.
            why = next((_LOST[code] for code in codes if code in _LOST), None)
        if why is None:
            return
        if self._file is None:
            where = "a file without a name in the state's directory"
            fix = "start the run again"
        else:
            where = self._file.path
            fix = "give the file the bytes that it had, and start the run again"
        raise DataLoss(f"parameter '{name}' cannot be read from {where}, because {why}: {fix}")

    def was_written(self, with_edges: bool = False) -> bool:
        """Returns whether it has values that are in no file, or nobody knows: what was written into a
        private mapping is memory's own. `with_edges`: the pages that it shares with its neighbours count
        too."""
        begin, size = self._whole_pages()
        if with_edges:
            begin = self._address // _PAGE * _PAGE
            size = -(-(self._address + self.size_bytes) // _PAGE) * _PAGE - begin
        return self._private and _has_own_pages(begin, size)

    def let_go(self) -> bool:
        """Lets its pages leave this process's memory, and returns whether they may."""
        if not self.is_in_place() or self.was_written():
            return False
        advise(*self._whole_pages(), mmap.MADV_DONTNEED)
        self._is_read = False
        return True

    def _whole_pages(self) -> tuple[int, int]:
        begin = -(-self._address // _PAGE) * _PAGE
        return begin, (self._address + self.size_bytes) // _PAGE * _PAGE - begin


def _has_own_pages(begin: int, size: int) -> bool:
    """Returns whether a private mapping has pages that are no longer the file's, or nobody knows."""
    count = size // _PAGE
    if count < 1:  # it shares its pages with others
        return True
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(begin // _PAGE * 8)
            told = bytearray(pagemap.read(count * 8))
    except OSError:
        return True
    if len(told) != count * 8:
        return True
    pages = torch.frombuffer(told, dtype=torch.int64)
    there, swapped, of_file = (pages >> 63) & 1, (pages >> 62) & 1, (pages >> 61) & 1
    return bool(((there | swapped) & (1 - of_file)).any())


class SameStays(TorchFunctionMode):
    """Leaves parameters that stay in files as they are where a copy would write what they have."""

    def __init__(self, params: set[torch.Tensor]) -> None:
        super().__init__()
        self._params = params

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and args[0] in self._params and _has_bits_of(*args[:2]):
            return args[0]
        return func(*args, **(kwargs or {}))


def copy_if_differs(one: torch.Tensor, other: torch.Tensor) -> None:
    """Copies `other` to `one`, which may be a mapping of a file: what is not written needs no memory."""
    if not _has_bits_of(one, other):
        one.copy_(other)


def _has_bits_of(one: torch.Tensor, other: Any) -> bool:
    """Returns whether both are on the CPU, and a copy of `other` to `one` would change nothing."""
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.device.type != "cpu" or other.device.type != "cpu":
        return False
    ours, theirs = (some.detach().reshape(-1).view(torch.uint8) for some in (one, other))
    return torch.equal(ours, theirs)


class FrozenFiles:
    """The frozen parameters of a model's units that stay in files, by the unit's index."""

    def __init__(self) -> None:
        self._units: dict[int, list[tuple[str, FileRange]]] = {}
        self._in_no_order: Container[int] = ()
        self._keeps_all = False
        self._reader: ThreadPoolExecutor | None = None
        self._reading: tuple[int, Future[int]] | None = None
        # The unit that came after these two: one order in forward, another in backward.
        self._after: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)
        self._last_in_backward = False
        self._told = False
        self.read_bytes = 0  #: so far

    def __contains__(self, unit: int) -> bool:
        return unit in self._units

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for unit in self._units.values() for _, one in unit)

    def set(
        self,
        units: dict[int, list[tuple[str, FileRange]]],
        in_no_order: Container[int],
        keeps_all: bool,
    ) -> None:
        """Begins with `units`: the parameters' names, and where they are. Those `in_no_order` are not read
        ahead, and come while others are. `keeps_all`: there is room for all of them."""
        self._settle(-1)
        self._units, self._in_no_order, self._keeps_all = units, in_no_order, keeps_all
        self._after.clear()

    def bring(self, unit: int) -> None:
        """Reads what is not there. The next unit, if it was seen before, is read meanwhile. Errors: DataLoss."""
        if unit in self._in_no_order:
            self.read_bytes += _read(self._units[unit])
            return
        backward = in_backward()
        # Reentrant checkpointing lets a unit go between its second forward and its backward.
        again = backward and self._last_in_backward and self._last[1] == unit
        self._after[self._last] = unit
        self._last, self._last_in_backward = (self._last[1], unit), backward
        self._settle(unit)
        read_bytes = _read(self._units[unit])
        self.read_bytes += 0 if again else read_bytes  # the page cache still has it
        following = self._after.get(self._last)
        if following is not None and following != unit and not self._keeps_all:
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, "zig-frozen")
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._reading = (following, self._reader.submit(_read_ahead, self._units[following]))

    def let_go(self, unit: int) -> None:
        """Lets the unit's pages leave this process's memory, if there is no room for all units."""
        if self._keeps_all:
            return
        for name, one in self._units[unit]:
            if not one.let_go() and one.is_in_place() and not self._told:
                self._told = True
                print(
                    f"ziggurat: frozen parameter '{name}' was written, so it stays in memory, "
                    f"beyond what offload() was given ({size_text(one.size_bytes)}), and so does each "
                    "that is",
                    file=stderr(),
                )

    def _settle(self, unit: int) -> None:
        """Waits for what is being read. If it is not `unit`, it goes again."""
        if self._reading is None:
            return
        (read, done), self._reading = self._reading, None
        self.read_bytes += done.result()
        if read != unit:
            self.let_go(read)


def _read(ranges: Iterable[tuple[str, FileRange]]) -> int:
    """Returns the bytes that were not there."""
    return sum(one.read(name) for name, one in ranges)


def _read_ahead(ranges: Iterable[tuple[str, FileRange]]) -> int:
    """Reads what may not be needed. If it is, its errors come then."""
    with contextlib.suppress(DataLoss):
        return _read(ranges)
    return 0
