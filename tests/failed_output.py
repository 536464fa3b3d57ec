#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/failed_output.py: says at the end of a run why tests failed. scripts/test runs it where ctest fails.

failed_output.py BUILD

Prints the last lines of what each failed test wrote, from ctest's own log, and then the names of the failed tests as
ctest closes with them: thousands of lines of other tests may stand behind a test's own output.
"""

import re
import sys
from pathlib import Path

LINES = 60  # of a test's output: an assertion with its context


def output_of(log: str, name: str) -> str:
    found = re.search(rf"^\d+/\d+ Test: {re.escape(name)}\n.*?^Output:\n-+\n(.*?)^<end of output>", log, re.M | re.S)
    return found.group(1) if found else "(no output)\n"


def main() -> None:
    folder = Path(sys.argv[1]) / "Testing" / "Temporary"
    failed = folder / "LastTestsFailed.log"
    if not failed.exists():
        return
    log = (folder / "LastTest.log").read_text(errors="replace")
    names = [line.partition(":")[2] for line in failed.read_text().splitlines()]
    for name in names:
        lines = output_of(log, name).splitlines()
        print(f"\n{name}: the last {min(LINES, len(lines))} of {len(lines)} lines of its output")
        print("\n".join(lines[-LINES:]))
    print(f"\n{len(names)} tests FAILED: {', '.join(names)}")
    print("Errors while running CTest")


main()
