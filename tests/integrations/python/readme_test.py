# SPDX-License-Identifier: Apache-2.0
"""The program of integrations/python/README.md runs, and placement changes no digit of its losses.

readme_test.py README; exits with 77 where PyTorch is missing. The package is the one that Python finds.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("torch") is None:
    print("skipped: no PyTorch here")
    sys.exit(77)

page = Path(sys.argv[1]).read_text()
program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
if program is None:
    sys.exit(f"{sys.argv[1]}: has no program")


def run(folder: str, *arguments: str) -> list[str]:
    command = [sys.executable, "first.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"first.py {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if "loss" in line]


with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "first.py").write_text(program[1])
    in_memory = run(folder)
    on_drive = run(folder, "nvme:state")
print("\n".join(in_memory))

problems = []
if in_memory != on_drive:
    problems.append("with nvme: it prints otherwise:\n" + "\n".join(on_drive))
if len(losses(in_memory)) != 5 or losses(in_memory)[-1] > losses(in_memory)[0] / 2:
    problems.append("the loss does not halve")
if in_memory[-1] != "finished steps: 50":
    problems.append(f"the last line is {in_memory[-1]}")
sys.exit("\n".join(problems) or 0)
