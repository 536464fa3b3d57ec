#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/mutants/run.py: mistakes planted into schedule, pool and store, which the faults of rehearsals must find.

run.py --build DIR [NAME...]

A mutant is a source in which one passage is replaced: a wait is missing, memory is given back too early. planted.py has
them. Each is compiled as the build in DIR compiles its source, and linked into a copy of rehearsal_faults_test in front
of the library with the right one, so nothing in the build changes. A campaign of 100 seeds must find it: a seed must
break what must hold, or end the program by a check. That seed alone must then show the same again.

Prints what each mutant's first seed shows. Ends with 1 if a mutant does not apply, is not found, or does not repeat.
The copies are in DIR/mutants, and are removed where all is well.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE))
from planted import MUTANTS  # noqa: E402

PROGRAM = "rehearsal_faults_test"
CASE = "--gtest_filter=*HoldWhatMustBeTrue"
SEEDS = 100
LIMIT_S = 300  # of a campaign, which takes a few seconds where nothing hangs


class Failed(Exception):
    pass


def run(what, command, **more):
    done = subprocess.run(command, check=False, capture_output=True, text=True, **more)
    if done.returncode != 0:
        raise Failed(f"{what} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


class Build:
    """A finished build: how it compiles each source, and how it links the program."""

    def __init__(self, folder):
        self.folder = folder
        self.compiled = {}
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            source = Path(entry["file"])
            if not entry["output"].startswith(str(folder / "tests")):
                for part in self.parts(source):
                    self.compiled[part] = entry
        told = run("ninja", ["ninja", "-C", str(folder), "-t", "commands", "-s", f"bin/{PROGRAM}"])
        self.link = next(line for line in reversed(told.splitlines()) if f"-o bin/{PROGRAM}" in line)

    @staticmethod
    def parts(source):
        """Returns what is compiled with a source: itself, or those that it includes if it is a unity source."""
        if source.parent.name != "Unity":
            return [source]
        return [Path(found) for found in re.findall(r'#include "(/[^"]+\.cc)"', source.read_text())]

    def compile(self, mutant, folder):
        right = ROOT / mutant.file
        text = right.read_text()
        if text.count(mutant.old) != 1:
            found = text.count(mutant.old)
            raise Failed(f"{mutant.file} has what it replaces {found} times, not once: plant it elsewhere")
        wrong = folder / right.name
        wrong.write_text(text.replace(mutant.old, mutant.new))
        entry = self.compiled[right]
        source = Path(entry["file"])
        if source != right:  # a unity source
            unity = folder / "unity.cxx"
            unity.write_text(source.read_text().replace(f'"{right}"', f'"{wrong}"'))
            wrong = unity
        words = shlex.split(entry["command"])
        words[words.index("-o") + 1] = str(folder / "mutant.o")
        words[words.index("-c") + 1] = str(wrong)
        # Compiling takes longer than playing, and what a mistake leaves unused is no reason to refuse it.
        run("the compiler", [*words, "-O0", "-g0", "-w"], cwd=entry["directory"])
        return folder / "mutant.o"

    def link_with(self, mutant_object, folder):
        command = self.link.replace(f"-o bin/{PROGRAM}", f"{mutant_object} -o {folder / PROGRAM}", 1)
        command = command.split(" && cd ")[0]  # the build also lists the program's cases
        run("the linker", command, shell=True, cwd=self.folder)
        return folder / PROGRAM


def play(program, first, count):
    """Plays seeds. Returns the first that shows something, and what: None if all is well."""
    environment = {**os.environ, "ZIGGURAT_FIRST_SEED": str(first), "ZIGGURAT_SEEDS": str(count)}
    try:
        command = [str(program), CASE]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        ended = re.findall(r"^seed (\d+)$", (late.stdout or b"").decode(), re.MULTILINE)
        return (int(ended[-1]) + 1 if ended else first), [f"the run does not end within {LIMIT_S} s"]
    if done.returncode == 0:
        return None, []
    ended = re.findall(r"^seed (\d+)$", done.stdout, re.MULTILINE)
    broken = re.findall(r"^ *BROKEN: (.*)$", done.stdout, re.MULTILINE)
    if broken:
        return int(ended[-1]), list(dict.fromkeys(broken))
    # The program ended while it played the next one, or the run without faults that comes before all.
    said = [line for line in done.stderr.splitlines() if line]
    return (int(ended[-1]) + 1 if ended else first), said[-1:] or [f"signal {-done.returncode}"]


def check(mutant, build):
    folder = build.folder / "mutants" / mutant.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program = build.link_with(build.compile(mutant, folder), folder)
    seed, shown = play(program, 1, SEEDS)
    if seed is None:
        raise Failed(f"{SEEDS} seeds do not find it")
    again, shown_again = play(program, seed, 1)
    if (again, shown_again) != (seed, shown):
        raise Failed(f"seed {seed} shows {shown}, and then {shown_again}")
    shutil.rmtree(folder)
    return seed, shown[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="run.py")
    parser.add_argument("--build", type=Path, required=True, help="a build that is up to date")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(mutant.name for mutant in MUTANTS))
    given = parser.parse_args()
    unknown = set(given.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    build = Build(given.build.resolve())
    failed = False
    for mutant in MUTANTS:
        if given.names and mutant.name not in given.names:
            continue
        try:
            seed, shown = check(mutant, build)
            print(f"mutants: {mutant.name}: {mutant.about}: seed {seed}: {shown}", flush=True)
        except Failed as error:
            failed = True
            print(f"mutants: {mutant.name}: {mutant.about}: NOT FOUND: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
