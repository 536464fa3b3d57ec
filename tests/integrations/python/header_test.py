# SPDX-License-Identifier: Apache-2.0
"""ziggurat.h as Python reads it: the constants and layouts that a C compiler sees, and nothing left out.

Run by pytest; as a script it exits with 77 where pytest is missing.
"""

import array
import ctypes
import os
import shutil
import subprocess
import sys

try:
    import pytest
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
from ziggurat._library import header as c_header
from ziggurat._library.abi import call

HEADER = c_header.read(c_header.path())
COMPILER = shutil.which(os.environ.get("CC", "cc"))


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_constants_and_layouts_are_those_of_a_c_compiler(tmp_path):
    expected = []
    printed = []
    for name, value in HEADER.constants.items():
        expected.append(f"{name} {value}")
        printed.append(f'printf("{name} %llu\\n", (unsigned long long){name});')
    for name, its in HEADER.structs.items():
        expected.append(f"{name} {ctypes.sizeof(its)}")
        printed.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in its._fields_:
            place = getattr(its, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
            printed.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stdio.h>\n#include "{c_header.path()}"\nint main(void) {{\n' + "\n".join(printed) + "\nreturn 0;\n}\n"
    )
    subprocess.run([COMPILER, "-o", tmp_path / "layout", source], check=True)
    said = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == expected


@pytest.mark.parametrize(
    "line",
    [
        "typedef struct ziggurat_odd { uint32_t bits : 3; } ziggurat_odd;",
        "typedef struct ziggurat_odd { uint32_t some[4]; } ziggurat_odd;",
        "typedef union { int32_t one; float other; } ziggurat_odd;",
        "ZIGGURAT_API ziggurat_status ziggurat_odd(ziggurat_engine engine, size_t count);",
        "ZIGGURAT_API ziggurat_status ziggurat_odd(ziggurat_engine engine, uint64_t** counts);",
        "ZIGGURAT_API ziggurat_status ziggurat_odd(void (*called)(int32_t));",
        "ziggurat_status ziggurat_odd(ziggurat_engine engine);",
        "enum { ZIGGURAT_ODD };",
        "#define ZIGGURAT_ODD (1 << 3)",
        "#define ZIGGURAT_ODD(its) its",
        "#ifdef ZIGGURAT_ODD",
        "#pragma once",
    ],
)
def test_what_the_reader_does_not_know_is_an_error(line, tmp_path):
    header = tmp_path / "ziggurat.h"
    text = c_header.path().read_text()
    header.write_text(text.replace("#ifdef __cplusplus\n}", f"{line}\n#ifdef __cplusplus\n}}"))
    with pytest.raises(ImportError, match="cannot read the C interface in .*ziggurat.h: "):
        c_header.read(header)


def test_a_header_that_is_missing_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ImportError, match=f"{tmp_path}.*No such file.*Install the wheel"):
        c_header.read(tmp_path / "ziggurat.h")


def test_a_call_returns_what_its_last_parameters_are_given():
    weight = array.array("f", [1.0] * 8)
    gradient = array.array("f", [3.0, 4.0] + [0.0] * 6)
    runtime = ziggurat.Runtime(threads=1)
    param = ziggurat.Param("weight", (8,), "fp32", weight.buffer_info()[0])
    engine = ziggurat.Engine(runtime, [param], {"placement": "optimizer=host"})
    engine.lend_gradients([], [], [], [])
    engine.lend_gradients([0], ["fp32"], [gradient.buffer_info()[0]], [2.0])
    assert engine.call("gradient_norm") == 10.0
    assert engine.call("engine_state").generation == 0
    assert engine.call("state_names").split()[0] == "master"
    assert engine.call("discard_gradients") is None
    with pytest.raises(TypeError, match="needs name, values, too"):
        engine.call("read_state", 0)
    with pytest.raises(KeyError, match="ziggurat_odd"):
        call("ziggurat_odd")
    engine.close()
    runtime.close()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
