# SPDX-License-Identifier: Apache-2.0
"""Sixteen PyTorch scripts of small models: what ziggurat.torch.plan() says of each before anything runs, beside what the run
then takes by its own accounts. bench/predictions.py makes a table of it; as a program this prints a line of JSON for each:

    python bench/predicted_scripts.py FOLDER STEPS small|large NAME...

Of each script: bytes of host memory and of the drive as plan() lists them, without activations, and the most that a step
holds, which is that and what plan() of the same module and a batch says of forward and backward.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import ziggurat.torch
from ziggurat._gradients.shared_content import SharedContent
from ziggurat._memory.file_memory import is_in_file
from ziggurat._streaming.streaming import streaming_around, streaming_of
from ziggurat._units.units import divide

BF16, FP32 = torch.bfloat16, torch.float32
IN_FILES = "params=nvme,grads=nvme"
_LOOKED = 9  # steps in which all units are looked at for writes, and afterwards few (_streaming/pins.py)
SOME = 24  # MiB of host memory: without them all of such a small state stays there
VOCABULARY = 512


class Size(NamedTuple):
    """How large models and batches are."""

    width: int
    tokens: int
    rows: int
    texts: int
    channels: int
    pixels: int
    times: int  #: as much of the memory that scripts are given


SMALL = Size(width=256, tokens=64, rows=64, texts=4, channels=96, pixels=12, times=1)
# Whose steps take some tenths of a second.
LARGE = Size(width=1024, tokens=128, rows=512, texts=2, channels=256, pixels=24, times=16)
size = SMALL  #: of all models

Batch = dict[str, torch.Tensor] | torch.Tensor


# -- models, and batches for them


def mlp(dtype: torch.dtype = FP32, depth: int = 6) -> torch.nn.Module:
    torch.manual_seed(1)
    block = [torch.nn.Linear(size.width, 2 * size.width), torch.nn.GELU(), torch.nn.Linear(2 * size.width, size.width)]
    blocks = (torch.nn.Sequential(*(type(one)(*_shape(one)) for one in block)) for _ in range(depth))
    return torch.nn.Sequential(*blocks, torch.nn.Linear(size.width, 10)).to(dtype)


def _shape(layer: torch.nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else ()


class Residual(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def conv() -> torch.nn.Module:
    torch.manual_seed(1)
    blocks = (Residual(size.channels) for _ in range(6))
    ends = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(size.channels, 10)]
    return torch.nn.Sequential(torch.nn.Conv2d(3, size.channels, 3, padding=1), torch.nn.Sequential(*blocks), *ends)


class Tied(torch.nn.Module):
    """Its last layer has the weight of its first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = (torch.nn.Linear(size.width, size.width) for _ in range(2))
        self.blocks = mlp(depth=4)[:-1]
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def gpt2(dtype: torch.dtype = FP32) -> torch.nn.Module:
    """The head is the embedding's table."""
    import transformers

    torch.manual_seed(1)
    shape = {"n_layer": 4, "n_embd": size.width, "n_head": 4, "n_positions": size.tokens, "vocab_size": VOCABULARY}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **silent, **ends)).to(dtype)


def llama(dtype: torch.dtype = BF16) -> torch.nn.Module:
    import transformers

    torch.manual_seed(1)
    shape = {"num_hidden_layers": 6, "hidden_size": size.width, "vocab_size": VOCABULARY, "intermediate_size": 2 * size.width}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **ends)).to(dtype)


def lora() -> torch.nn.Module:
    import peft

    base = llama()
    torch.manual_seed(2)
    return peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear"))


def numbers(dtype: torch.dtype = FP32, rows: int = 0) -> Batch:
    return torch.randn(rows or size.rows, size.width, generator=torch.Generator().manual_seed(3)).to(dtype)


def pictures() -> Batch:
    return torch.randn(8, 3, size.pixels, size.pixels, generator=torch.Generator().manual_seed(3))


def text() -> Batch:
    tokens = torch.randint(VOCABULARY, (size.texts, size.tokens), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "labels": tokens}


def loss_of(output: Any, batch: Batch | None = None) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


# -- scripts


@dataclasses.dataclass(frozen=True)
class Script:
    model: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]
    optimizer: str = "AdamW"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  #: of the optimizer
    host_mib: int = 0  #: for its state, in the small size; 0: as it likes
    on_drive: bool = False  #: its state
    units: float | None = None  #: memory for so many of the largest; None: for all
    placement: str = "host"
    accumulation: int = 1
    together: bool = False  #: micro-batches, unit by unit
    clips: bool = False
    activation_mib: int = 0  #: in the small size
    ranks: int = 1

    @property
    def given(self) -> dict[str, Any]:
        """Returns the settings with the host memory."""
        return self.settings | ({"host_memory": f"{self.host_mib * size.times}MiB"} if self.host_mib else {})

    @property
    def activation_memory(self) -> str | None:
        return f"{self.activation_mib * size.times // 4}MiB" if self.activation_mib else None

    @property
    def has_peak(self) -> bool:
        """Returns whether the most that a step holds is said and measured. Micro-batches run in threads of their own, of
        which PyTorch's profiler tells nothing; and nobody says what of a forward is in PyTorch's memory while the rest
        is on its way to the drive and back."""
        return not self.together and self.activation_memory is None

    def memory(self, model: torch.nn.Module) -> int:
        division = divide(model, "auto")
        division.set_ranks(self.ranks)
        least, sizes = division.smallest()[0], [unit.size_bytes for unit in division.units]
        return max(least, sum(sizes) if self.units is None else int(self.units * max(sizes)))


SCRIPTS = {
    "MLP": Script(mlp, numbers),
    "MLP, state on NVMe": Script(mlp, numbers, host_mib=SOME, on_drive=True),
    "MLP in bf16, 3 units": Script(lambda: mlp(BF16), lambda: numbers(BF16), on_drive=True, units=3),
    "MLP, Adam, moments in bf16": Script(
        mlp, numbers, optimizer="Adam", settings={"state_format": "bf16-moments"}, host_mib=SOME, on_drive=True, units=3
    ),
    "MLP, SGD, activations on NVMe": Script(
        mlp, lambda: numbers(rows=2048), optimizer="SGD", host_mib=SOME, on_drive=True, activation_mib=8
    ),
    "convolution": Script(conv, pictures, on_drive=True),
    "tied, Lion": Script(Tied, numbers, optimizer="Lion", units=3),
    "GPT-2": Script(gpt2, text),
    "GPT-2 in bf16, all on NVMe": Script(
        lambda: gpt2(BF16), text, host_mib=SOME, on_drive=True, units=3, placement=IN_FILES
    ),
    "GPT-2, 4 backwards, clipped": Script(
        gpt2, text, host_mib=SOME, on_drive=True, units=4, placement="nvme", accumulation=4, clips=True
    ),
    "GPT-2, 4 micro-batches": Script(gpt2, text, units=3, accumulation=4, together=True),
    "Llama, 8-bit moments": Script(llama, text, settings={"state_format": "8bit"}, host_mib=6, on_drive=True),
    "Llama, split": Script(
        llama, text, settings={"state_format": "split"}, host_mib=SOME, on_drive=True, units=3, placement="nvme"
    ),
    "Llama, LoRA": Script(lora, text, host_mib=SOME, on_drive=True, units=4, placement="nvme"),
    "GPT-2, 2 ranks": Script(gpt2, text, units=3, ranks=2),
    "MLP, 2 ranks, on NVMe": Script(mlp, numbers, on_drive=True, units=3, placement="nvme", ranks=2),
}


# -- what is said


class Said(NamedTuple):
    bytes: dict[str, float]
    seconds: float  #: of a step, as it is played; where none is, what it takes at least
    rows: dict[str, int]  #: of host memory


def said_of(script: Script, model: torch.nn.Module, batch: Batch, folder: Path) -> Said:
    """Returns what plan() says."""
    live = ziggurat.torch.plan(model, batch, loss=loss_of, accumulation=script.accumulation).held
    plan = ziggurat.torch.plan(
        model,
        batch,
        loss=loss_of,
        tokens=len(batch) if isinstance(batch, torch.Tensor) else batch["input_ids"].numel(),
        memory=script.memory(model),
        placement=script.placement,
        optimizer=script.optimizer.lower(),
        optimizer_placement=f"nvme:{folder}/state" if script.on_drive else "host",
        accumulation=script.accumulation,
        clips=script.clips,
        ranks=script.ranks,
        activation_memory=script.activation_memory,
        **script.given,
    )
    host = dict(plan.in_host_memory)
    held = sum(host.values())
    said = {"host": held, "nvme": sum(plan.on_drive.values())}
    if script.has_peak:
        said["peak"] = live.with_offload(plan)
    least = plan.compute_s if plan.bound is None else plan.bound.seconds
    return Said(said, least if plan.played is None else plan.played.seconds, host)


def called(model: torch.nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


# -- what is taken


def taken_by(script: Script, model: torch.nn.Module, optimizer: Any, batch: Batch, folder: Path) -> dict[str, float]:
    """Returns the bytes of the accounts after some steps, and the most of another one."""
    gradients = 0

    def before_update() -> None:
        nonlocal gradients
        gradients = sum(gradient_bytes(param.grad) for param in model.parameters() if param.grad is not None)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(script, model, optimizer, batch, before_update)
    figures = [opened.figures() for opened in optimizer.engines()]
    streaming = streaming_around(list(model.parameters()))
    kept = None if streaming is None else streaming.activations
    stash = 0 if kept is None else int(kept.figures()["memory_peak_bytes"])
    beside = [one for one in (*model.buffers(), *model.parameters()) if streaming_of(one) is None and not one.is_meta]
    rest = sum({one.untyped_storage().data_ptr(): one.nbytes for one in beside}.values())
    engine = sum(its["host_budget_bytes"] + its["units_budget_bytes"] for its in figures)
    exchanged = int(optimizer.figures()["exchange_bytes"])
    host = engine + rest + exchanged + stash
    taken = {"nvme": drive_bytes(folder, script)}
    if script.ranks == 1:  # else gradients are on their way, and are in the peak alone
        taken["host"] = host + gradients
    if script.has_peak:
        given = {id(one): one for one in (batch.values() if isinstance(batch, dict) else [batch])}
        taken["peak"] = host + sum(one.nbytes for one in given.values()) + most_of(recorded)
    return taken


def gradient_bytes(grad: torch.Tensor) -> int:
    """Returns what a gradient takes of PyTorch's memory: of one that is exchanged or in a file nothing."""
    content = getattr(grad, "_content", None)
    if isinstance(content, SharedContent) or getattr(content, "at_engine", False):
        return 0
    part = grad if content is None else content.part
    return 0 if part is None or is_in_file(part) else part.nbytes


def most_of(recorded: Any) -> int:
    """Returns the most that PyTorch's allocator has given beyond what was there before."""
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for _, size_bytes in sorted(((one.start_ns(), one.nbytes()) for one in events), key=lambda one: one[0]):
        held += size_bytes
        most = max(most, held)
    return most


def drive_bytes(folder: Path, script: Script) -> int:
    """Returns what one rank has there: its file, and those without names that this process has open. plan() tells no
    part of what activations take."""
    named = sum(file.stat().st_size for file in folder.rglob("rank*.ziggurat"))
    return named // script.ranks + (0 if script.activation_memory else sum(dict(_unnamed(str(folder))).values()))


def _unnamed(folder: str) -> Iterator[tuple[int, int]]:
    for one in Path("/proc/self/fd").iterdir():
        try:
            if str(one.readlink()).startswith(folder) and str(one.readlink()).endswith(" (deleted)"):
                its = os.stat(one)
                yield its.st_ino, its.st_size
        except OSError:  # the folder's own
            continue


def step(
    script: Script, model: torch.nn.Module, optimizer: Any, batch: Batch, before_update: Callable[[], Any] = lambda: None
) -> None:
    batches = [batch] * script.accumulation
    if script.together:
        ziggurat.torch.micro_batches(model, batches, loss_of)
    else:
        for one in batches:
            loss_of(called(model, one)).backward()
    if script.clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before_update()
    optimizer.step()
    optimizer.zero_grad()


def measured(name: str, folder: Path, steps: int = 3) -> dict[str, Any]:
    """Runs a script for so many steps: returns what is said, what is taken, and the seconds of a step."""
    script = SCRIPTS[name]
    torch.set_num_threads(1)
    model, batch = script.model().train(), script.batch()
    said = said_of(script, model, batch, folder)
    kept = {"activations": "nvme", "activation_memory": script.activation_memory} if script.activation_memory else {}
    ziggurat.torch.offload(model, memory=script.memory(model), placement=script.placement, **kept)
    trained = [param for param in model.parameters() if param.requires_grad]
    kind = getattr(ziggurat.torch, script.optimizer)
    optimizer = kind(
        trained,
        lr=1e-3,
        placement=f"nvme:{folder}/state" if script.on_drive else "host",
        **({"model": model} if script.ranks > 1 else {}),
        **script.given,
    )
    took = []
    for _ in range(steps):
        begun = time.perf_counter()
        step(script, model, optimizer, batch)
        took.append(time.perf_counter() - begun)
    optimizer.synchronize()
    taken = taken_by(script, model, optimizer, batch, folder)
    optimizer.close()
    seconds = statistics.median(took[_LOOKED if steps > _LOOKED else 2 :]) if steps > 2 else 0.0
    return {"said": said.bytes, "rows": said.rows, "predicted": said.seconds, "taken": taken, "seconds": seconds}


def main() -> None:
    global size
    folder, steps, chosen, *names = sys.argv[1:]
    size = {"small": SMALL, "large": LARGE}[chosen]
    ranks = "RANK" in os.environ
    if ranks:
        torch.distributed.init_process_group("gloo")
    for number, name in enumerate(names):
        found = measured(name, Path(folder) / str(number), int(steps))
        if not ranks or torch.distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
    if ranks:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
