# SPDX-License-Identifier: Apache-2.0
"""What `cmake --install` leaves builds and runs a C program, by find_package() and by pkg-config, and the
programs of the page for authors of trainers.

installed_test.py BUILD-DIRECTORY SOURCE PAGE CMAKE C-COMPILER C++-COMPILER
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

build, source, page, cmake, c_compiler, cxx_compiler = sys.argv[1:]

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(embedder LANGUAGES C CXX)
find_package(Ziggurat 0.1 REQUIRED)
add_executable(trainer {source})
add_executable(of_page of_page.cc)
target_compile_features(of_page PRIVATE cxx_std_17)
foreach(program trainer of_page)
  target_link_libraries(${{program}} PRIVATE ziggurat::c)
endforeach()
"""


def run(*command: object, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def says(expected: str, *command: object, **environment: str) -> None:
    said = run(*command, **environment)
    if said != expected + "\n":
        sys.exit(f"{' '.join(str(word) for word in command)}: {said}")


def program_of_page(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", Path(page).read_text(), re.DOTALL)
    if found is None:
        sys.exit(f"{page}: has no program in {language}")
    return found[1]


with tempfile.TemporaryDirectory() as folder:
    there = Path(folder)
    prefix = there / "moved" / "away"
    run(cmake, "--install", build, "--prefix", there / "prefix", "--component", "c")
    prefix.parent.mkdir()
    (there / "prefix").rename(prefix)  # nothing in it says where it was installed
    pkgconfig = next(prefix.rglob("ziggurat.pc")).parent

    project = there / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(PROJECT.format(source=source))
    (project / "of_page.cc").write_text(program_of_page("cpp"))
    run(cmake, "-S", project, "-B", there / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_C_COMPILER={c_compiler}", f"-DCMAKE_CXX_COMPILER={cxx_compiler}")
    run(cmake, "--build", there / "build")
    says("y = 2.000 x -1.000", there / "build" / "trainer", there / "store1")
    says("3.0 7.0 after 300 steps", there / "build" / "of_page", there / "store2")

    flags = run("pkg-config", "--cflags", "--libs", "ziggurat", PKG_CONFIG_PATH=str(pkgconfig)).split()
    run(c_compiler, "-std=c99", source, "-o", there / "trainer", *flags)
    says("y = 2.000 x -1.000", there / "trainer", there / "store3", LD_LIBRARY_PATH=str(pkgconfig.parent))

    package = Path(page).parent.parent / "python"
    says("3.0 7.0 after 300 steps", sys.executable, "-c", program_of_page("python"), PYTHONPATH=str(package),
         ZIGGURAT_LIBRARY=str(next(prefix.rglob("libziggurat.so"))), PYTHONDONTWRITEBYTECODE="1")
