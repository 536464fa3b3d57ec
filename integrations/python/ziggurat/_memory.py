# SPDX-License-Identifier: Apache-2.0
"""Finds how much memory this process may still take: what the machine has left, or less where a
control group limits it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

# The files of a group's limits, the file of its use, and the lines of memory.stat that count pages
# of files, for cgroup versions 1 and 2. The kernel gives such pages up before it refuses memory.
_FILES = {
    1: (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


def free_bytes(root: str | Path = "/") -> int:
    """Returns MemAvailable, or what is left of the tightest limit of this process's control group
    and its parents. `root` is put before /proc and before the groups' folders."""
    free = [_named(Path(root, "proc/meminfo"), "MemAvailable:") * 1024]
    for version, folder in _groups(Path(root)):
        limits, used, given_up = _FILES[version]
        found = [limit for name in limits if (limit := _number(folder / name)) is not None]
        if found:
            kept = _number(folder / used) or 0
            kept -= sum(_named(folder / "memory.stat", name) for name in given_up)
            free.append(max(min(found) - max(kept, 0), 0))
    return min(free)


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


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the version and the folder of this process's own group and of its parents, as far as
    they are visible: a container sees only its own."""
    found = _own_group(_lines(root / "proc/self/cgroup"))
    if found is None:
        return
    version, group = found
    for line in _lines(root / "proc/self/mountinfo"):
        # "36 35 0:32 /mounted /point rw,noatime shared:1 - cgroup cgroup rw,memory"
        of_mount, _, of_filesystem = line.partition(" - ")
        mounted, point = (_unescaped(field) for field in of_mount.split()[3:5])
        kind, _, options = of_filesystem.split(maxsplit=2)
        if version == 2 and kind == "cgroup2":
            break
        if version == 1 and kind == "cgroup" and "memory" in options.split(","):
            break
    else:
        return
    if mounted != "/" and (group + "/").startswith(mounted + "/"):
        group = group[len(mounted) :]
    if group.startswith("/.."):  # the group is outside the root of the process's namespace
        group = "/"
    top = root / point.lstrip("/")
    folder = top / group.lstrip("/")
    while True:
        yield version, folder
        if folder == top:
            return
        folder = folder.parent


def _own_group(lines: list[str]) -> tuple[int, str] | None:
    """Returns version and path: version 1 if its line has the memory controller ("4:memory:/path"),
    else version 2 ("0::/path")."""
    unified = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return 1, path
        if not controllers:
            unified = 2, path
    return unified


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Returns the file's number, or None if there is no limit, which version 2 writes as "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _named(path: Path, name: str) -> int:
    for line in _lines(path):
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def _unescaped(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
