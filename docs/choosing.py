#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.py: makes the tables of choosing.md with the planner, so that none is typed.

    python3 docs/choosing.py           compares them with the page, and prints those that differ
    python3 docs/choosing.py --write   puts them into the page

A table stands between `<!-- made: NAME -->` and `<!-- end -->`; NAME is one of MAKERS.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ziggurat._library.abi import call

PAGE = Path(__file__).with_name("choosing.md")
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
EFFORTS = {"nothing": "-", "selective": "selective", "full": "full"}


def asked(**request) -> dict:
    return json.loads(call("ziggurat_plan", json.dumps(request).encode()))


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [heads, ["---"] * len(list(heads)), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.{1 if size_bytes < 99.95e9 else 0}f}"


def about(count: float) -> str:
    """Returns two digits that matter."""
    return f"{int(float(f'{count:.2g}')):,}"


def states() -> str:
    models = ["gpt2-xl", "llama-3-8b", "llama-3-70b"]
    recipes = {
        "16 bits, with an fp32 master and fp32 moments": (2, 2, 4, 8),
        "16 bits, fp32 moments, no master": (2, 2, 0, 8),
        "fp32, computed in 16 bits": (4, 4, 0, 8),
    }

    def held(model: str, **more) -> float:
        return asked(model=model, **more)["memory"]["instants"][-1]["bytes"]

    rows = []
    for name, parts in recipes.items():
        recipe = dict(zip(("param", "gradient", "master", "moments"), parts, strict=True))
        said = " + ".join(str(part) for part in (parts[0], parts[1], parts[2] + parts[3]))
        sizes = [gb(held(model, recipe=recipe)) for model in models]
        rows.append([name, f"{said} = {sum(parts)}", *sizes])
    lora = [gb(held(model, lora={"rank": 16})) for model in models]
    rows.append(["LoRA of rank 16 over a frozen base in 16 bits", "2, and 16 of an adapter's", *lora])
    return table(["what is kept of a parameter", "bytes", *models], rows)


def divided() -> str:
    layouts = {
        "DDP": {"stage": 0},
        "ZeRO-1": {"stage": 1},
        "ZeRO-2": {"stage": 2},
        "FSDP2, ZeRO-3": {"stage": 3},
        "FSDP's SHARD_GRAD_OP": {"stage": 3, "keeps_gathered": True},
    }
    rows = []
    for name, layout in layouts.items():
        answer = asked(model="llama-3-8b", machine="h100x8", layout=layout | {"dp": 8}, recompute="full")
        memory = answer["memory"]
        busy = {line["what"]: line["seconds"] for line in answer["time"]["busy"]}
        rows.append(
            [
                name,
                gb(memory["instants"][-1]["bytes"]),
                gb(memory["device_bytes"]),
                f"{busy['exchanges of gradients and parameters']:.3f}",
            ]
        )
    return table(["on 8 GPUs", "GB of state, at rest", "GB at the worst instant", "s of exchanges a step"], rows)


QUESTIONS = [
    ("gpt2-xl", "4090", 1, {}),
    ("llama-3-8b", "4090", 1, {}),
    ("llama-3-8b", "4090", 1, {"lora": {"rank": 16}}),
    ("llama-3-8b", "h100", 1, {}),
    ("gpt2-xl", "h100x8", 8, {}),
    ("llama-3-8b", "h100x8", 8, {}),
    ("mixtral-8x7b", "h100x8", 8, {}),
    ("llama-3-70b", "h100x8", 8, {}),
    ("llama-3-70b", "h100x8", 64, {}),
    ("deepseek-v3", "h100x8", 512, {}),
]


def recommended() -> str:
    rows = []
    for model, machine, gpus, more in QUESTIONS:
        sequence = 1024 if model.startswith("gpt2") else 4096
        answer = asked(model=model, machine=machine, gpus=gpus, sequence=sequence, micro_batches=4, **more)
        first = answer["strategies"][0]
        best = next((one for one in answer["strategies"] if one["strategy"] == answer["recommended"]), None)
        name = f"{model}, LoRA" if more else model
        plain = f"{gb(first['device_bytes'])} of {gb(answer['machine_device_bytes'])}"
        if best is None:
            rows.append([name, f"{gpus} of {machine}", "nothing fits", "", "", "", plain])
            continue
        effort = EFFORTS[best["recompute"]] + (", chunks" if best["loss_tokens"] else "")
        effort += ", host" if best["offloads_activations"] else ""
        rows.append(
            [name, f"{gpus} of {machine}", best["strategy"], gb(best["device_bytes"]), effort, f"{best['step_s']:.3g}", plain]
        )
    heads = ["model", "GPUs", "begin with", "GB of a GPU", "recomputes", "s a step", "GB undivided, of a GPU's"]
    step = "A step is four micro-batches of one sequence of 4,096 tokens for each GPU (of 1,024 for gpt2-xl).\n"
    return f"{table(heads, rows)}\n{step}"


def hidden() -> str:
    machines = [("4090", 1), ("h100", 1), ("h100x8", 8), ("h100x8", 64)]
    found: dict[str, list[str]] = {}
    for at, (machine, gpus) in enumerate(machines):
        answer = asked(model="llama-3-8b", machine=machine, gpus=gpus)
        for flow in answer["hidden_at"]:
            cells = found.setdefault(flow["flow"], ["-"] * len(machines))
            cells[at] = about(flow["tokens"])
    heads = ["flow", *(f"{gpus} of {machine}" for machine, gpus in machines)]
    return table(heads, [[flow, *cells] for flow, cells in found.items()])


def layers() -> str:
    """What dividing layers costs, in and across nodes, and what a pipeline's bubble does."""
    layouts = {
        "TP 8, in the node": ({"tp": 8, "dp": 2}, 4),
        "TP 16, across two nodes": ({"tp": 16}, 8),
        "TP 8 and PP 2, 2 micro-batches": ({"tp": 8, "pp": 2}, 2),
        "TP 8 and PP 2, 8 micro-batches": ({"tp": 8, "pp": 2}, 8),
        "TP 8 and PP 2, 32 micro-batches": ({"tp": 8, "pp": 2}, 32),
    }
    names = {"sums of tensor-parallel ranks": 0, "pipeline bubble": 1}
    rows = []
    for name, (layout, micro) in layouts.items():
        request = {"layout": layout | {"stage": 1, "sequence_parallel": True}, "micro_batches": micro}
        time = asked(model="llama-3-70b", machine="h100x8", sequence=4096, recompute="full", **request)["time"]
        shares = ["-", "-"]
        for line in time["lines"]:
            if line["what"] in names:
                shares[names[line["what"]]] = f"{100 * line['seconds'] / time['seconds']:.0f} %"
        rows.append([name, *shares])
    return table(["llama-3-70b on 16 of h100x8", "sums of tensor ranks", "pipeline bubble"], rows)


def activations() -> str:
    rows = []
    for sequence in (2048, 8192, 32768):
        request = {"model": "llama-3-8b", "layout": {"dp": 8, "stage": 3}, "sequence": sequence}
        peaks = [asked(**request, recompute=how)["memory"] for how in ("nothing", "selective", "full")]
        rows.append([f"{sequence:,}", gb(peaks[0]["instants"][-1]["bytes"]), *(gb(peak["device_bytes"]) for peak in peaks)])
    return table(["tokens of a micro-batch", "GB of state", "GB at the worst instant", "selective", "full"], rows)


def one_unit() -> str:
    answer = asked(model="llama-3-8b", layout={"dp": 8, "stage": 3}, recompute="full")
    lines = {line["what"]: line["bytes"] for instant in answer["memory"]["instants"] for line in instant["lines"]}
    whole = 2 * answer["parameters"]
    return (
        f"llama-3-8b gathers {gb(lines['gathered layers'])} GB of layers at a time if each layer is a unit, and "
        f"{gb(whole)} GB if the model is one.\n"
    )


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker for maker in (states, divided, recommended, hidden, layers, activations, one_unit)
}


def remade(text: str) -> str:
    return BLOCK.sub(lambda found: found[1] + MAKERS[found[2]]() + found[3], text)


def main() -> int:
    text = PAGE.read_text()
    made = remade(text)
    if "--write" in sys.argv:
        PAGE.write_text(made)
        return 0
    for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(made), strict=True):
        if old[0] != new[0]:
            print(f"{PAGE.name}: the table {old[2]} is not what the planner says; --write puts in:\n{new[0]}")
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main())
