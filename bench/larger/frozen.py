# SPDX-License-Identifier: Apache-2.0
"""Trains adapters of a frozen model that is larger than the machine's memory.

    python bench/larger/frozen.py --folder /fast/dir [--blocks 45] [--steps 3]

The model has the shape of Qwen2.5-14B with so many of its blocks: 28 GB in bf16 with 45, a vocabulary of 151,936. It is built by
streamed_init(), and then, in another process, loaded from safetensors with values that mean nothing; each time offload() gets
--memory, LoRA adapters are trained with --tokens a step, and the steps' medians are printed beside the larger of two limits that
are measured here: the model read twice at the rate at which fio reads from the drive, and forward and backward of the model, as
one and two blocks that are in memory take them. The drive needs room for the model once. Exits with 77 if PyTorch,
transformers or ziggurat is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import libraries
import processes

GB = 1e9


def config(blocks: int) -> Any:
    import transformers

    return transformers.Qwen2Config(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=blocks,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=151936,
        tie_word_embeddings=False,
        use_cache=False,
    )


def adapted(model: Any) -> Any:
    import peft

    model = model.requires_grad_(False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    return model.train()


def train(given: argparse.Namespace) -> None:
    """The process that trains; prints a line of JSON for each thing that it has done."""
    import ziggurat.torch
    from models import forget_peak, of_process

    import torch
    import transformers

    torch.set_num_threads(given.threads)
    before = of_process("VmRSS")
    forget_peak()
    begin = time.perf_counter()

    def say(**what: Any) -> None:
        nonlocal begin
        took = time.perf_counter() - begin
        most = {"peak": of_process("VmHWM") - before, "anonymous": of_process("RssAnon")}
        print(json.dumps({**what, "seconds": took, **most}), flush=True)
        begin = time.perf_counter()

    torch.manual_seed(1)
    if given.run == "built":
        with ziggurat.torch.streamed_init(given.folder, dtype=torch.bfloat16):
            model = transformers.Qwen2ForCausalLM(config(given.blocks)).to(torch.bfloat16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(given.folder / "model", dtype=torch.bfloat16)
    say(did=given.run, parameters=sum(p.numel() for p in model.parameters()), bytes=sum(p.nbytes for p in model.parameters()))
    model = adapted(model)
    ziggurat.torch.offload(model, memory=given.memory)
    optimizer = ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(given.steps + 1):
        tokens = torch.randint(151936, (1, given.tokens), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        forward = time.perf_counter() - begin
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(did="step", loss=loss.item(), forward=forward)
    optimizer.close()


def compute(given: argparse.Namespace) -> None:
    """Prints how long a forward and backward of all blocks would take, from one and two that are in memory."""
    import torch
    import transformers

    torch.set_num_threads(given.threads)
    found = []
    for blocks in (1, 2):
        model = adapted(transformers.Qwen2ForCausalLM(config(blocks)).to(torch.bfloat16))
        took = []
        for step in range(4):
            tokens = torch.randint(151936, (1, given.tokens), generator=torch.Generator().manual_seed(step))
            begin = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            took.append(time.perf_counter() - begin)
        found.append(statistics.median(took[1:]))
    print(json.dumps({"seconds": found[0] + (given.blocks - 1) * (found[1] - found[0])}))


def write_safetensors(folder: Path, blocks: int) -> None:
    """Writes a model as transformers saves it, a file for each block and one for the rest."""
    import safetensors.torch
    import transformers

    import torch

    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.Qwen2ForCausalLM(config(blocks)).state_dict().items()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        files.setdefault(f"model-{parts[2] if parts[1] == 'layers' else name}.safetensors", []).append(name)
    folder.mkdir()
    for file, names in files.items():
        values = {name: torch.empty(shapes[name], dtype=torch.bfloat16).uniform_(-0.02, 0.02) for name in names}
        safetensors.torch.save_file(values, folder / file, metadata={"format": "pt"})
    where = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    its = config(blocks)
    its.architectures, its.dtype = ["Qwen2ForCausalLM"], "bfloat16"
    its.save_pretrained(folder)


def child(given: argparse.Namespace, run: str) -> list[dict[str, Any]]:
    """Returns what a process says, line by line."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", run, "--folder", str(given.folder)]
    for name in ("blocks", "memory", "tokens", "steps", "threads"):
        command += [f"--{name}", str(getattr(given, name))]
    return list(processes.said_by(command, run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--blocks", type=int, default=45)
    parser.add_argument("--memory", default="3GiB", help="of offload()")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="after the first, which is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["built", "loaded"])
    parser.add_argument("--run", choices=["built", "loaded", "compute"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    libraries.require()
    if given.run is not None:
        (compute if given.run == "compute" else train)(given)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    given.folder = Path(tempfile.mkdtemp(prefix="frozen-", dir=given.folder))
    try:
        compute_s = child(given, "compute")[0]["seconds"]
        for run in [given.only] if given.only else ["built", "loaded"]:
            if run == "loaded":
                write_safetensors(given.folder / "model", given.blocks)
                os.sync()
            report(child(given, run), processes.drive_rate(given.folder, "4g", 8, "--rw=read"), compute_s)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)


def report(said: list[dict[str, Any]], rate: float, compute_s: float) -> None:
    made, _, *steps = said
    drive_s = 2 * made["bytes"] / rate
    step_s = statistics.median(one["seconds"] for one in steps)
    print(f"{made['did']} in {made['seconds']:.0f} s: {made['parameters'] / 1e9:.2f} billion parameters, {made['bytes'] / GB:.1f} GB")
    print(f"a step takes {step_s:.1f} s (median of {len(steps)}), {step_s / max(drive_s, compute_s):.2f} of the larger limit: the drive "
          f"{drive_s:.1f} s at {rate / GB:.2f} GB a second, compute {compute_s:.1f} s")
    peak, anonymous = (max(one[name] for one in said) / GB for name in ("peak", "anonymous"))
    print(f"at most {peak:.2f} GB were resident beyond the start, {anonymous:.2f} GB of them in no file", flush=True)


if __name__ == "__main__":
    main()
