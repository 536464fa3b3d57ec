# SPDX-License-Identifier: Apache-2.0
"""COMING_FROM_DEEPSPEED.md has every key of DeepSpeed's, with the verdict that the reader of configs
gives it, and every call in it is there.

deepspeed_page_test.py PAGE [--write]: with --write the page's table of keys is made anew. Exits with
77 where PyTorch or DeepSpeed is missing.
"""

import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

for needed in ("torch", "deepspeed"):
    if importlib.util.find_spec(needed) is None:
        print(f"skipped: no {needed} here")
        sys.exit(77)

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._config import Config

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- keys begin -->\n", "<!-- keys end -->\n"
# What has to stand beside a key for it to have a meaning, by how its path begins.
BESIDE = [
    ("fp16.", {"fp16": {"enabled": True}}),
    (
        "bf16.bf16_m",
        {
            "bf16": {"enabled": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    ),
    (
        "bf16.bf16_o",
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    ),
    ("bf16.", {"bf16": {"enabled": True}}),
    ("optimizer.params.momentum", {"optimizer": {"type": "SGD"}}),
    ("optimizer.params.dampening", {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}),
    ("optimizer.params.nesterov", {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}),
    ("optimizer.params.lr_decay", {"optimizer": {"type": "Adagrad"}}),
    ("optimizer.params.initial_acc", {"optimizer": {"type": "Adagrad"}}),
    ("optimizer.", {"optimizer": {"type": "AdamW"}}),
    ("scheduler.params.lr_range_test", {"scheduler": {"type": "LRRangeTest"}}),
    (
        "scheduler.params.c",
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}},
    ),
    ("scheduler.", {"scheduler": {"type": "WarmupLR"}}),
    (
        "zero_optimization.offload_optimizer.",
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/x"}}},
    ),
    (
        "zero_optimization.offload_param.",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp/x"}}},
    ),
    ("zero_optimization.cpu_offload_param", {"zero_optimization": {"stage": 3}}),
    ("torch_autocast.enabled", {"torch_autocast": {"dtype": "bfloat16"}}),
    # What is said where state is in host memory is no news of another key.
    ("", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
]
# The order of the page, by how paths begin; "" is the top of the file.
SECTIONS = [
    "",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "aio",
    "activation_checkpointing",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "tensor_parallel",
    "torch_autocast",
]


def asked(path, value):
    """A config with this key, and what it cannot do without."""
    beside = next(config for begin, config in BESIDE if path.startswith(begin))
    config = {"train_batch_size": 4, **copy.deepcopy(beside)}
    if path in ("zero_optimization.cpu_offload",):
        config.pop("zero_optimization")
    *sections, key = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return config


def answer(path, value):
    """The verdict, and why."""
    try:
        notes = Config(asked(path, value), world_size=1).notes
    except InvalidArgument as refusal:
        return "refused", re.sub(r'^config: "[^"]*" ', "", str(refusal))
    own = [note for note in notes if note.startswith(f'config: "{path}" ')]
    if not own:
        return "same", ""
    why = re.sub(r'^config: "[^"]*" ', "", own[0])
    nothing = re.match(r"changes nothing(?:, here or in DeepSpeed)?: ", why)
    return ("other", why) if nothing is None else ("not needed", why[nothing.end() :])


def section_of(path):
    fitting = [section for section in SECTIONS if path.startswith(f"{section}.")]
    return max(fitting, key=len, default="")


def table(keys):
    """The page's table: keys with one answer in a row, section by section."""
    lines = ["| key | here | why |", "|---|---|---|"]
    for section in SECTIONS:
        rows = {}
        for path, value in keys.items():
            if section_of(path) == section:
                whole = isinstance(value, dict) and value == {"enabled": True}
                rows.setdefault(answer(path, value), []).append(f"`{path}{'.*' * whole}`")
        for (verdict, why), paths in rows.items():
            lines.append(f"| {', '.join(paths)} | {verdict} | {why} |")
    return "\n".join(lines) + "\n"


def their_keys():
    command = [sys.executable, str(HERE / "deepspeed_keys.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"deepspeed_keys.py: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def is_there(name):
    """Whether ziggurat.deepspeed has what a script calls `name`."""
    place, *parts = name.split(".")
    found = importlib.import_module("ziggurat.deepspeed")
    if place == "engine":
        found = found.DeepSpeedEngine
        if re.search(rf"self\.{parts[0]}\b", inspect.getsource(found)):
            return True
    for part in parts:
        if not hasattr(found, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def wrong_calls(page):
    """Rows of the table of calls that are not so."""
    for called, verdict in re.findall(r"^\| (`[^|]*) \| ([a-z ]+) \|", page, re.MULTILINE):
        for name in re.findall(r"`((?:deepspeed|engine)\.[\w.]+)`", called):
            if is_there(name) != (verdict != "not there"):
                yield f"{name}: the page says {verdict}, and ziggurat.deepspeed does otherwise"


def main():
    page = Path(sys.argv[1])
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    keys = their_keys()
    made = table(keys)
    if "--write" in sys.argv:
        page.write_text(before + BEGIN + made + END + after)
        return
    problems = []
    for line in sorted(set(made.splitlines()) ^ set(shown.splitlines())):
        problems.append(f"{'missing' if line in made else 'too much'}: {line}")
    if problems:
        problems.append(f"deepspeed_page_test.py {page} --write makes the table anew")
    problems += wrong_calls(after)
    print(f"{len(keys)} keys of DeepSpeed's are on the page")
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
