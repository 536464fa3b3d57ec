# SPDX-License-Identifier: Apache-2.0
"""Reads ziggurat.h: constants, and structs and functions for ctypes.

The header is the only declaration of the C interface. It is plain and regular; what this reader does
not know is an error that names the line, and never left out.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, NamedTuple


class Parameter(NamedTuple):
    name: str
    type: Any  #: for ctypes
    gives: Any  #: what a function writes there, for ctypes; None if it writes nothing or a run


class Function(NamedTuple):
    result: Any
    parameters: tuple[Parameter, ...]

    @property
    def gives_text(self) -> bool:
        """Whether the last three parameters take a text of any length."""
        return [one.name for one in self.parameters[-2:]] == ["capacity_bytes", "needed_bytes"]


class Header(NamedTuple):
    constants: dict[str, int]
    structs: dict[str, type[ctypes.Structure]]
    functions: dict[str, Function]


_NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_CONDITIONS = {
    "#ifndef ZIGGURAT_H": True,
    "#ifdef __cplusplus": False,
    "#ifndef __cplusplus": True,
    "#if defined(__GNUC__)": True,
}
_MACROS = {"ZIGGURAT_H", "ZIGGURAT_API", "ZIGGURAT_INIT"}  # those that are no constants
_DEFINED = re.compile(r"#define (\w+)(?: (\w+))?$")
_DECLARED = re.compile(
    r"\s*(?:typedef struct (?P<struct>\w+) \{(?P<fields>[^{}]*)\} (?P=struct)"
    r"|typedef (?P<old>\w+) (?P<new>\w+)"
    r"|enum \{(?P<values>[^{}]*)\}"
    r"|ZIGGURAT_API (?P<result>[\w ]+\*?)\s+(?P<function>\w+)\((?P<parameters>[^()]*)\))\s*;\s*"
)
_PARAMETER = re.compile(r"(const )?(\w+) ?(\* const\*|\*\*|\*)? ?(\w+)")
_RESULT_NAME = " its"  # a result is declared as a parameter is, but for the name


class _Reader:
    def __init__(self) -> None:
        self.header = Header({}, {}, {})
        self._types = {**_NUMBERS}

    def read(self, text: str) -> Header:
        source = self._without_directives(text)
        at = 0
        while at < len(source):
            declared = _DECLARED.match(source, at)
            if declared is None:
                raise ValueError(source[at : at + 80].strip())
            self._declare(declared)
            at = declared.end()
        return self.header

    def _without_directives(self, text: str) -> str:
        """Returns what a C compiler sees, with single spaces. Notes the constants."""
        kept: list[str] = []
        seen = [True]  # whether the lines of each condition, the outer ones first, are read
        for line in re.sub(r"\\\n|//[^\n]*", "", text).splitlines():
            line = " ".join(line.split())
            if line.startswith("#if"):
                if line not in _CONDITIONS:
                    raise ValueError(line)
                seen.append(_CONDITIONS[line])
            elif line == "#else":
                seen[-1] = not seen[-1]
            elif line.startswith("#endif"):
                seen.pop()
            elif not all(seen) or line.startswith("#include "):
                continue
            elif line.startswith("#"):
                self._define(line)
            else:
                kept.append(line)
        return " ".join(kept).strip()

    def _define(self, line: str) -> None:
        defined = _DEFINED.match(line)
        if defined is not None and defined[2] is not None and defined[1] not in _MACROS:
            self.header.constants[defined[1]] = _number(defined[2])
        elif re.split(r"\W", line.removeprefix("#define "))[0] not in _MACROS:
            raise ValueError(line)

    def _declare(self, its: re.Match[str]) -> None:
        if its["struct"]:
            fields = [self._parameter(one) for one in its["fields"].split(";") if one.strip()]
            body = {"_fields_": [(field.name, field.type) for field in fields]}
            made = type(its["struct"], (ctypes.Structure,), body)
            self.header.structs[its["struct"]] = self._types[its["struct"]] = made
        elif its["new"]:
            self._types[its["new"]] = self._type_of(its["old"])
        elif its["values"]:
            for one in its["values"].split(","):
                name, value = one.split("=")
                self.header.constants[name.strip()] = _number(value.strip())
        else:
            given = [] if its["parameters"] == "void" else its["parameters"].split(",")
            self.header.functions[its["function"]] = Function(
                self._parameter(its["result"] + _RESULT_NAME).type,
                tuple(self._parameter(one) for one in given),
            )

    def _parameter(self, declared: str) -> Parameter:
        read = _PARAMETER.fullmatch(declared.strip())
        if read is None:
            raise ValueError(declared)
        const, base, stars, name = read.groups()
        if stars is None:
            return Parameter(name, self._type_of(base), None)
        if base in ("void", "char"):
            plain = ctypes.c_void_p if base == "void" else ctypes.c_char_p
            return Parameter(name, plain if stars == "*" else ctypes.POINTER(plain), None)
        if stars != "*":
            raise ValueError(declared)
        its = self._type_of(base)
        return Parameter(name, ctypes.POINTER(its), None if const else its)

    def _type_of(self, name: str) -> Any:
        if name not in self._types:
            raise ValueError(f"the type {name}")
        return self._types[name]


def _number(text: str) -> int:
    return 2**64 - 1 if text == "UINT64_MAX" else int(text.removesuffix("u"))


def read(path: Path) -> Header:
    """Returns what the header declares. Errors: ImportError, naming what is not understood."""
    try:
        return _Reader().read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ImportError(
            f"cannot read the C interface in {path}: {error}. Install the wheel, which "
            "scripts/build-wheel makes, or use the package where it lies in the tree of its sources"
        ) from error


def path() -> Path:
    """Returns where the header is: in the wheel, or in the tree of the sources."""
    here = Path(__file__).resolve().parents[1]
    own = here / "include" / "ziggurat.h"
    return own if own.exists() else here.parents[1] / "c" / "ziggurat.h"
