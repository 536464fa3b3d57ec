# SPDX-License-Identifier: Apache-2.0
"""The programs of integrations/python/README.md run: placement changes no digit of the first one's
losses, and the one that saves a checkpoint ends alike where it goes on from it. The main page's runs too, and leaves
each of its steps in its store. That of micro-batches in MODELS_LARGER_THAN_MEMORY.md prints what a loop prints.

readme_test.py README MAIN_README LARGER_PAGE; exits with 77 where PyTorch is missing. The package is the one that Python finds.
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

import torch

page = Path(sys.argv[1]).read_text()


def program_of(section: str) -> str:
    return program_in(sys.argv[1], page, rf"## {section}\n.*?")


def program_in(path: str, text: str, before: str = "") -> str:
    found = re.search(rf"{before}```python\n(.*?)```", text, re.DOTALL)
    if found is None:
        sys.exit(f"{path}: '{before}' has no program")
    return found[1]


def run(folder: str, script: str, *arguments: str) -> list[str]:
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{script} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if "loss" in line]


with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "first.py").write_text(program_of("The first run"))
    in_memory = run(folder, "first.py")
    on_drive = run(folder, "first.py", "nvme:state")
    (Path(folder) / "train.py").write_text(program_of("Checkpoints"))
    saved = run(folder, "train.py")
    resumed = run(folder, "train.py", "saved")
    (Path(folder) / "main.py").write_text(
        program_in(sys.argv[2], Path(sys.argv[2]).read_text()).replace(
            "optimizer.close()", "print(optimizer.engine.generation)\noptimizer.close()"
        ).replace("nvme:state", "nvme:main")
    )
    main = run(folder, "main.py")
    program = program_in(sys.argv[3], Path(sys.argv[3]).read_text(), "## Micro-batches of an offloaded model\n.*?")
    loop = "losses = []\n    for batch in batches:\n        found = loss(model(batch), batch)\n        losses.append(found.detach())\n        found.backward()"
    (Path(folder) / "batches.py").write_text(program)
    (Path(folder) / "loop.py").write_text(
        program.replace("losses = ziggurat.torch.micro_batches(model, batches, loss)", loop)
    )
    offloads = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # PyTorch is older otherwise
    unit_by_unit, in_a_loop = (run(folder, name) if offloads else [] for name in ("batches.py", "loop.py"))
print("\n".join(in_memory))

problems = [] if main == ["20"] else [f"the main page's program ends after {main} steps"]
if in_memory != on_drive:
    problems.append("with nvme: it prints otherwise:\n" + "\n".join(on_drive))
if len(losses(in_memory)) != 5 or losses(in_memory)[-1] > losses(in_memory)[0] / 2:
    problems.append("the loss does not halve")
if in_memory[-1] != "finished steps: 50":
    problems.append(f"the last line is {in_memory[-1]}")
if len(saved) != 2 or not saved[0].endswith("saved/step-000000010") or resumed != saved[1:]:
    problems.append(f"the run that saves prints {saved}, and the one that goes on {resumed}")
if unit_by_unit != in_a_loop:
    problems.append(f"micro_batches() prints {unit_by_unit}, and the loop {in_a_loop}")
sys.exit("\n".join(problems) or 0)
