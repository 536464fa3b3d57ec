# SPDX-License-Identifier: Apache-2.0
"""What `cmake --install` leaves builds and runs a C program, by find_package() and by pkg-config.

installed_test.py BUILD-DIRECTORY SOURCE CMAKE C-COMPILER
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

build, source, cmake, compiler = sys.argv[1:]

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(embedder LANGUAGES C)
find_package(Ziggurat 0.1 REQUIRED)
add_executable(trainer {source})
target_link_libraries(trainer PRIVATE ziggurat::c)
"""


def run(*command: object, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def trained(program: Path, store: Path, **environment: str) -> None:
    said = run(program, store, **environment)
    if said != "y = 2.000 x -1.000\n":
        sys.exit(f"{program}: {said}")


with tempfile.TemporaryDirectory() as folder:
    there = Path(folder)
    prefix = there / "moved" / "away"
    run(cmake, "--install", build, "--prefix", there / "prefix", "--component", "c")
    prefix.parent.mkdir()
    (there / "prefix").rename(prefix)  # nothing in it says where it was installed
    pkgconfig = next(prefix.rglob("ziggurat.pc")).parent

    (there / "project").mkdir()
    (there / "project" / "CMakeLists.txt").write_text(PROJECT.format(source=source))
    run(cmake, "-S", there / "project", "-B", there / "build", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_COMPILER={compiler}")
    run(cmake, "--build", there / "build")
    trained(there / "build" / "trainer", there / "store1")

    flags = run("pkg-config", "--cflags", "--libs", "ziggurat", PKG_CONFIG_PATH=str(pkgconfig)).split()
    run(compiler, "-std=c99", source, "-o", there / "trainer", *flags)
    trained(there / "trainer", there / "store2", LD_LIBRARY_PATH=str(pkgconfig.parent))
