#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/patches/run.py: the changes that this folder keeps, made to a copy of the tree: what costs how many files.

run.py --build DIR [NAME...]

NAME.patch is a change that somebody may want to make (a new engine function, say), whole and working. NAME.json says what
it is for: {"about": a sentence, "files": the most files outside tests/ that it may touch, "targets": what is built,
"command": what is run then, in the copy}. In the command {build} is the copy's build and {python} this interpreter.

Applies each patch, or those that are NAMED, to a copy of what git has of the tree, builds the targets there with the
settings of the build in DIR, and runs the command. Ends with 1 if one does not apply, touches too many files, does not
build, or fails. The copies are in DIR/patches, and are removed where all is well.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# What a build is told, as its cache has it.
TOLD = re.compile(
    r"(CMAKE_BUILD_TYPE|CMAKE_C(?:XX)?_COMPILER(?:_LAUNCHER)?|CMAKE_C(?:XX)?_FLAGS\w*|CMAKE_\w+_LINKER_FLAGS|ZIGGURAT_\w+|Python3_EXECUTABLE):(\w+)=(.*)"
)


class Failed(Exception):
    pass


def run(what, *command, **more):
    done = subprocess.run([str(word) for word in command], check=False, **more)
    if done.returncode != 0:
        raise Failed(f"{what} ended with {done.returncode}: {' '.join(str(word) for word in command)}")
    return done


def touched(patch):
    """Returns the files outside tests/ that a patch touches."""
    told = run("reading the patch", "git", "apply", "--numstat", "-z", patch, cwd=ROOT, capture_output=True, text=True).stdout
    names = [line.split("\t")[2] for line in told.split("\0") if line]
    return [name for name in names if not name.startswith("tests/")]


def copy_tree(to):
    """Copies the files that git tracks, as they are now."""
    listed = run("listing the tree", "git", "ls-files", "-z", cwd=ROOT, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if not source.is_file():
            continue  # removed, and not committed yet
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to / name)


def configure(source, build, like):
    told = [found for line in (like / "CMakeCache.txt").read_text().splitlines() if (found := TOLD.fullmatch(line))]
    given = [f"-D{name}:{kind}={value}" for name, kind, value in (found.groups() for found in told) if kind not in ("INTERNAL", "STATIC")]
    run("cmake", "cmake", "-G", "Ninja", "-S", source, "-B", build, *given, stdout=subprocess.DEVNULL)


def check(name, like):
    """Tries one patch. Returns how many files it touches."""
    patch = HERE / f"{name}.patch"
    its = json.loads((HERE / f"{name}.json").read_text())
    files = touched(patch)
    print(f"patches: {name}: {its['about']}: {len(files)} files: {', '.join(files)}", flush=True)
    if len(files) > its["files"]:
        raise Failed(f"it touches {len(files)} files outside tests/, and may touch {its['files']}")
    copy = like / "patches" / name
    shutil.rmtree(copy, ignore_errors=True)
    source = copy / "source"
    build = source / "build" / like.name  # as far from its sources as other builds, for ccache
    copy_tree(source)
    # The copy is no repository: git looks for none above it, and applies to the files as they are.
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy)}
    run("git apply", "git", "apply", "--whitespace=error", patch, cwd=source, env=apart)
    configure(source, build, like)
    run("the build", "ninja", "-C", build, *its["targets"])
    environment = {**os.environ, "PYTHONPATH": str(source / "integrations/python"), "PYTHONDONTWRITEBYTECODE": "1",
                   "ZIGGURAT_LIBRARY": str(build / "lib/libziggurat.so"), "ZIGGURAT_COMMAND": str(build / "bin/ziggurat")}
    command = [word.format(build=build, python=sys.executable) for word in its["command"]]
    run("its command", *command, cwd=source, env=environment)
    shutil.rmtree(copy)
    return len(files)


def main():
    kept = sorted(path.stem for path in HERE.glob("*.patch"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="run.py")
    parser.add_argument("--build", type=Path, required=True, help="a build whose settings the copies get")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(kept))
    given = parser.parse_args()
    unknown = set(given.names) - set(kept)
    if unknown:
        parser.error(f"there is no patch {', '.join(sorted(unknown))}: give {', '.join(kept)}")
    failed = False
    for name in given.names or kept:
        try:
            print(f"patches: {name}: {check(name, given.build.resolve())} files, and it works", flush=True)
        except Failed as error:
            failed = True
            print(f"patches: {name}: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
