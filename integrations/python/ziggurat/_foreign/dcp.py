# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of ``torch.distributed.checkpoint`` (DCP): ``.metadata`` and ``*.distcp``.

``.metadata`` and all values that are not tensors are pickles, which PyTorch's own reader loads
without restriction. This module reads ``.metadata`` with an unpickler that knows DCP's own class
names alone. It reads each entry with PyTorch's restricted unpickler, chunk by chunk, where the
metadata says that the entry lies.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from ziggurat._foreign import archive
from ziggurat._foreign.content import Content, Saved, settings_of
from ziggurat._foreign.state_dicts import MODEL_KEYS, OPTIMIZER_KEYS
from ziggurat._library.native import DataLoss, InvalidArgument, Unimplemented

_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    # The folder that the checkpoint was saved to; nothing reads it.
    "pathlib": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
}
_BUILT_IN = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size}


class _Box(NamedTuple):
    """The place of a chunk: where it begins and ends in each dimension."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def meets(self, other: _Box) -> bool:
        pairs = zip(self.begins, self.ends, other.begins, other.ends, strict=True)
        return all(begin < its_end and its < end for begin, end, its, its_end in pairs)


def _are_all_of(chunks: Sequence[Any], size: Sequence[int]) -> bool:
    """Returns whether every element of the whole is in exactly one chunk. The chunks must have as
    many elements together as the whole, stay within the whole, and not overlap."""
    boxes = []
    for chunk in chunks:
        ends = tuple(map(operator.add, chunk.offsets, chunk.sizes))
        if len(ends) != len(size) or any(map(operator.gt, ends, size)):
            return False
        if math.prod(chunk.sizes) > 0:
            boxes.append(_Box(tuple(chunk.offsets), ends))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    if len(boxes) < 2:
        return True
    # Sorts along the dimension in which the chunks are divided most, so that few chunks have to be
    # compared with each other.
    along = max(range(len(size)), key=lambda dim: len({box.begins[dim] for box in boxes}))
    beside: list[_Box] = []
    for box in sorted(boxes, key=lambda box: box.begins[along]):
        beside = [one for one in beside if one.ends[along] > box.begins[along]]
        if any(one.meets(box) for one in beside):
            return False
        beside.append(box)
    return True


class _Made:
    """Stands in for DCP's classes, with attributes and nothing else. A pickle could call methods of
    DCP's own classes, or change the classes for this whole process."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Index(_Made):
    """Names one part of one entry."""

    fqn: str
    offset: Any = None

    def key(self) -> tuple[str, tuple[int, ...] | None]:
        return self.fqn, None if self.offset is None else tuple(self.offset)


class _Unpickler(pickle.Unpickler):
    """Makes only the objects that DCP's metadata consists of."""

    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return type(name, (_Index if name == "MetadataIndex" else _Made,), {})
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise InvalidArgument(
            f"{self._path} holds a {module}.{name}, which is no class of {_DCP}'s metadata, so the "
            "file was not loaded: save the checkpoint without it. If you did not make the file, "
            "do not use it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise InvalidArgument(
            f"{self._path} refers to {pid!r} outside the file, so it was not loaded"
        )


def is_one(folder: Path) -> bool:
    return (folder / _METADATA).is_file()


def content_of(folder: Path) -> Content:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        return _Reader(folder, metadata).content()
    except InvalidArgument:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        raise DataLoss(
            f"{path} cannot be read ({error}): it is damaged, or DCP did not write it. Copy it or "
            "save it again"
        ) from error


class _Reader:
    def __init__(self, folder: Path, metadata: Any) -> None:
        self._folder = folder
        self._kinds = metadata.state_dict_metadata
        self._storage = {index.key(): info for index, info in metadata.storage_data.items()}
        paths = metadata.planner_data
        self._paths = {
            name: tuple(paths[name]) if isinstance(paths, Mapping) and name in paths else (name,)
            for name in self._kinds
        }
        self._groups: dict[int, dict[str, Any]] = {}  # the optimizer's groups by number

    def content(self) -> Content:
        content = Content(f"the distributed checkpoint {self._folder}")
        for name, path in self._paths.items():
            if path[0] in OPTIMIZER_KEYS:
                self._add_of_optimizer(content, path[1:], name)
            elif path[0] in ("state", "param_groups") and len(path) > 1:
                self._add_of_optimizer(content, path, name)
            else:
                inner = path[1:] if path[0] in MODEL_KEYS and len(path) > 1 else path
                self._add_value(content, ".".join(map(str, inner)), name)
        groups = [self._groups[index] for index in sorted(self._groups)]
        content.groups = settings_of(groups)
        self._place(content, [param for group in groups for param in group.get("params", [])])
        return content

    def _add_value(self, content: Content, key: str, name: str) -> None:
        if self._is_tensor(name):
            content.values[key] = self._saved(name)

    def _is_tensor(self, name: str) -> bool:
        return hasattr(self._kinds[name], "chunks")

    def _add_of_optimizer(self, content: Content, path: tuple[Any, ...], name: str) -> None:
        if path[:1] == ("param_groups",) and len(path) == 1:
            self._groups = dict(enumerate(self._object(name)))
        elif path[:1] == ("param_groups",) and len(path) == 3:
            self._groups.setdefault(path[1], {})[path[2]] = self._object(name)
        elif path[:1] == ("state",) and len(path) == 3:
            self._add_state(content, str(path[1]), str(path[2]), name)
        elif len(path) == 1 and str(path[0]).startswith("state."):
            # PyTorch has flattened the names (flatten_optimizer_state_dict).
            param, _, key = str(path[0])[len("state.") :].rpartition(".")
            self._add_state(content, param, key, name)

    def _add_state(self, content: Content, param: str, key: str, name: str) -> None:
        state = content.states.setdefault(param, {})
        if self._is_tensor(name):
            state[key] = self._saved(name)
        elif key == "step":
            number = torch.tensor(float(self._object(name)))
            state[key] = Saved((), self._folder / _METADATA, lambda: number)

    def _place(self, content: Content, listed: list[Any]) -> None:
        """Numbers the states if the groups list parameters by number; such states are saved under
        the number's text."""
        states = content.states
        if any(isinstance(param, int) for param in listed):
            content.places = len(listed)
            content.states = {at: states.get(str(param), {}) for at, param in enumerate(listed)}
        else:
            content.states = {**dict.fromkeys(listed, {}), **states}

    def _saved(self, name: str) -> Saved:
        size = tuple(self._kinds[name].size)
        return Saved(size, self._file_of(self._infos(name)[0][1]), lambda: self._tensor(name))

    def _infos(self, name: str) -> list[tuple[Any, Any]]:
        """Returns the chunks of an entry, and where each of them is stored."""
        infos = []
        for chunk in self._kinds[name].chunks:
            index = name, tuple(chunk.offsets)
            if index not in self._storage:
                raise DataLoss(
                    f"{self._folder / _METADATA} does not say where the part of '{name}' from "
                    f"{tuple(chunk.offsets)} on is stored: the file is damaged. Copy it or save it "
                    "again"
                )
            infos.append((chunk, self._storage[index]))
        if not _are_all_of([chunk for chunk, _ in infos], self._kinds[name].size):
            raise DataLoss(
                f"{self._folder / _METADATA}: the parts of '{name}' overlap or leave elements out, "
                "so the file is damaged. Copy it or save it again"
            )
        return infos

    def _tensor(self, name: str) -> torch.Tensor:
        kind, infos = self._kinds[name], self._infos(name)
        whole = None
        for chunk, info in infos:
            values = self._load(info)
            if not isinstance(values, torch.Tensor) or values.shape != chunk.sizes:
                raise DataLoss(
                    f"{self._file_of(info)} has no tensor of shape {tuple(chunk.sizes)} for "
                    f"'{name}' at byte {info.offset}: the file is damaged. Copy it or save it again"
                )
            if len(infos) == 1:
                return values
            if whole is None:
                whole = torch.empty(kind.size, dtype=values.dtype)
            at = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(offset, offset + size) for offset, size in at)] = values
        assert whole is not None
        return whole

    def _object(self, name: str) -> Any:
        if self._is_tensor(name):
            return self._tensor(name)
        return self._load(self._storage[name, None])

    def _load(self, info: Any) -> Any:
        file = self._file_of(info)
        with file.open("rb") as opened:
            opened.seek(info.offset)
            return archive.load_from(io.BytesIO(opened.read(info.length)), file)

    def _file_of(self, info: Any) -> Path:
        relative = PurePosixPath(info.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise InvalidArgument(
                f"{self._folder / _METADATA} names a file outside its folder ({relative}), so the "
                "checkpoint was not loaded"
            )
        if getattr(info, "transform_descriptors", None):
            raise Unimplemented(
                f"{self._folder / relative} is compressed, which is not supported: save the "
                "checkpoint without DCP's extensions"
            )
        return self._folder / relative
