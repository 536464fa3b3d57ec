#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/oracles.py: holds the planner to runs that others measured: prediction beside measurement, row by row.

    python3 bench/oracles.py FILE.csv [--rows] [--regression]

A file's columns say what it is. With "peak_gib" they are those of prime-rl's benchmarks: memory is compared. With
"iteration_ms" they are those of vTrain's validation: the time of a step is. Nothing here is fitted to a row: what the
trainers of those files do beside the formulas is in PRIME_RL and MEGATRON below, each number with its source, and the
shares that kernels reach are in core/plan/machines/machine.h.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ziggurat._library.abi import InvalidArgument, call

Row = dict[str, str]

# prime-rl's trainer (PrimeIntellect-ai/prime-rl, commit 559b4477, benchmarks/scripts and src/prime_rl/trainer): FSDP2 over
# all GPUs, parameters and gradients in fp32, computed in 16 bits, AdamW without a master (4 + 4 + 0 + 8); RMSNorm in fp32;
# outputs of experts weighed in fp32; four adapters at once (MAX_LORAS), on experts too, over a frozen base in fp32.
# Supervised runs make all logits, and shift them by a copy (16 + 2 B an entry and token); RL runs never have them whole.
# A peak is PyTorch's, so that contexts and NCCL are not in it.
PRIME_RL = {
    "flash": True,
    "norms_in_fp32": True,
    "experts_in_fp32": True,
    "loss_bytes": 18,
    "gathered_units": 1,
    "unreduced_bytes": 6,
    "unreduced_head_bytes": 4,
    "in_flight_layers": 2,
}
PRIME_RL_RECIPE = {"param": 4, "gradient": 4, "master": 0, "moments": 8}
PRIME_RL_ADAPTERS = 4
# Times are printed without a bar: neither these machines nor this software gave a constant. Rows of B200 ran with an
# attention that does not suit it.
PRIME_RL_MACHINES = {"1xa6000": "a6000", "1xh100": "h100", "8xh100": "h100x8", "8xh200": "h200x8"}
# GiB that the drivers of those GPUs report.
DEVICE_GIB = {"a6000": 48, "h100": 79.6, "h200": 140.4, "b200": 179}
# What a verdict adds to the prediction, for the allocator's blocks: the least by which no row of the file was under (4.9 %),
# rounded up.
MARGIN = 1.06
# Rows of times that are off by more are printed with their parts: bench/results names causes.
NAMED = 0.25

# Megatron-DeepSpeed as vTrain measured it (VIA-Research/vTrain, commit f8dda84): fp16, no flash attention, dropout, sums of
# tensor-parallel ranks and of gradients after compute, head and embedding apart, GPT-2's 50,257 words. Host times and the
# start of a sum are from the 720 rows of one node, where small layers take 3.0 ms however small they are.
MEGATRON = {
    "flash": False,
    "dropout": True,
    "overlaps": False,
    "host_forward_layer_s": 1.70e-3,
    "host_backward_layer_s": 1.30e-3,
    "host_micro_batch_s": 1.5e-3,
    "collective_start_s": 90e-6,
    "last_stage_recomputes": False,  # so does vTrain's own model of the schedule (src/predictor.py)
}
MEGATRON_WORDS = 50257


def prime_rl_request(row: Row) -> dict:
    adapts = row["lora_rank"] != "full"
    software = dict(PRIME_RL)
    if row["kind"] == "rl":
        software["loss_bytes"] = 0
    request = {
        "model": row["model"],
        "layout": {"dp": int(row["gpus"]), "stage": 3},
        "recipe": PRIME_RL_RECIPE,
        "sequence": int(row["sequence"]),
        "micro_batches": int(row["micro_batches"]),
        "recompute": "nothing" if row["activations"] == "None" else "full",
        "offloads_activations": row["activations"] == "Offload",
        "software": software,
    }
    if adapts:
        request["lora"] = {
            "rank": int(row["lora_rank"]),
            "copies": PRIME_RL_ADAPTERS,
            "experts": True,
            "frozen_param_bytes": 4,
        }
    return request


def vtrain_request(row: Row) -> dict:
    tp, dp, pp = (int(row[name]) for name in ("tensor_parallel", "data_parallel", "pipeline_parallel"))
    batch = int(row["micro_batch"])
    hidden, sequence = int(row["hidden"]), int(row["sequence"])
    return {
        "model": {
            "layers": int(row["layers"]),
            "hidden": hidden,
            "heads": int(row["heads"]),
            "ffn": 4 * hidden,
            "vocabulary": MEGATRON_WORDS,
            "positions": sequence,
            "gated": False,
            "layer_norms": True,
            "biases": True,
        },
        "machine": "a100x8",
        "layout": {"dp": dp, "tp": tp, "pp": pp},
        "sequence": sequence,
        "micro_batch": batch,
        "micro_batches": int(row["global_batch"]) // dp // batch,
        # The large models recompute; the times of the small ones have no room for it.
        "recompute": "full" if "parameters_billion" in row else "nothing",
        "software": MEGATRON,
    }


def answers(requests: list[dict]) -> list[dict]:
    return json.loads(call("ziggurat_plan", json.dumps(requests).encode()))


def known(rows: list[Row]) -> list[Row]:
    """Leaves out rows of models that the planner does not know, and says so."""
    strange = set()
    for name in {row["model"] for row in rows}:
        try:
            answers([{"model": name}])
        except InvalidArgument:
            strange.add(name)
    if strange:
        count = sum(row["model"] in strange for row in rows)
        print(f"left out: {count} rows of {', '.join(sorted(strange))}, which are not known")
    return [row for row in rows if row["model"] not in strange]


def measured(rows: list[Row], column: str) -> list[Row]:
    """Leaves out rows without a measured number, such as those of runs that failed, and says so."""
    def is_number(text: str | None) -> bool:
        try:
            return 0 < float(text or "") < math.inf
        except ValueError:
            return False

    kept = [row for row in rows if is_number(row[column])]
    if len(kept) < len(rows):
        print(f"left out: {len(rows) - len(kept)} rows without a number in {column}")
    return kept


def facts(rows: list[Row]) -> list[list[Row]]:
    """Groups the rows of one model, kind, sequence and activations on as many GPUs: one fact on several machines."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "kind", "lora_rank", "sequence", "activations", "gpus"))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def device_gib(row: Row) -> float | None:
    return DEVICE_GIB.get(row.get("machine", "").split("x", 1)[-1])


def memory(rows: list[Row], shows_rows: bool) -> None:
    rows = known(rows)
    ran = measured([row for row in rows if row["fits"] == "yes"], "peak_gib")
    groups = facts(ran)
    found = answers([prime_rl_request(group[0]) for group in groups])
    errors, verdicts = [], {0.95: [], 1.10: [], 1.20: []}
    for group, answer in zip(groups, found, strict=True):
        peaks = [float(row["peak_gib"]) for row in group]
        predicted = answer["memory"]["device_bytes"] / 2**30
        errors.append(predicted / statistics.mean(peaks) - 1)
        for share, verdict in verdicts.items():
            verdict += [predicted * MARGIN <= share * peak for peak in peaks]
        if shows_rows:
            row = group[0]
            name = f"{row['model'].split('/')[-1]} {row['kind']} {row['lora_rank']} {row['sequence']} {row['activations']}"
            print(f"{name:58} x{row['gpus']}  measured {statistics.mean(peaks):7.2f} GiB  predicted {predicted:7.2f}"
                  f"  {errors[-1]:+6.1%}  at {answer['memory']['worst']}")
    timed = [row for row in ran if row.get("step_s_mean") and row.get("machine") in PRIME_RL_MACHINES]
    timed_answers = answers([prime_rl_request(row) | {"machine": PRIME_RL_MACHINES[row["machine"]]} for row in timed])
    over = [(1 + error) * MARGIN - 1 for error in errors]
    summary("memory", errors)
    if over:
        print(f"with a margin of {MARGIN - 1:.1%}: {sum(one < 0 for one in over)} under, median over {statistics.median(over):.1%}")
    print(f"a device of 0.95 of the peak: {sum(verdicts[0.95])} of {len(verdicts[0.95])} accepted")
    for share in (1.10, 1.20):
        print(f"a device of {share:.2f} of the peak: {sum(verdicts[share])} of {len(verdicts[share])} accepted")
    full = [row for row in rows if row["fits"] == "out of memory" and device_gib(row)]
    if full:
        found = answers([prime_rl_request(row) for row in full])
        peaks = [answer["memory"]["device_bytes"] / 2**30 * MARGIN for answer in found]
        refused = sum(peak > device_gib(row) for row, peak in zip(full, peaks, strict=True))
        print(f"out of memory: {refused} of {len(full)} refused")
    summary("time, without a bar", [answer["time"]["seconds"] / float(row["step_s_mean"]) - 1
                                    for row, answer in zip(timed, timed_answers, strict=True)])


def time(rows: list[Row], shows_rows: bool) -> None:
    rows = measured(rows, "iteration_ms")
    found = answers([vtrain_request(row) for row in rows])
    errors = []
    for row, answer in zip(rows, found, strict=True):
        predicted, its = answer["time"]["seconds"] * 1e3, float(row["iteration_ms"])
        errors.append(predicted / its - 1)
        if shows_rows or abs(errors[-1]) > NAMED:
            parts = "  ".join(f"{line['what']} {line['seconds'] * 1e3:.0f}" for line in answer["time"]["lines"])
            name = " ".join(f"{key} {value}" for key, value in row.items() if key != "iteration_ms")
            print(f"{name}\n    measured {its:.0f} ms, predicted {predicted:.0f}, {errors[-1]:+.1%}: {parts}")
    summary("time", errors)


def summary(what: str, errors: list[float]) -> None:
    if not errors:
        print(f"{what}: no facts")
        return
    sizes = sorted(map(abs, errors))
    print(f"{what}: {len(errors)} facts, mean |error| {statistics.mean(sizes):.2%}, median {statistics.median(sizes):.2%}, "
          f"worst {sizes[-1]:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")


def regression(rows: list[Row], folds: int = 5) -> None:
    """The comparison: a regression of nine terms in logarithms, which is fitted to four fifths and judged on the rest."""
    def terms(row: Row) -> list[float]:
        names = ("hidden", "micro_batch", "sequence", "tensor_parallel", "pipeline_parallel", "data_parallel", "layers")
        micro = float(row["global_batch"]) / float(row["data_parallel"]) / float(row["micro_batch"])
        return [1.0, *(math.log(float(row[name])) for name in names), math.log(micro)]

    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    errors = []
    for fold in range(folds):
        judged = set(order[fold::folds])
        weights = least_squares([(terms(row), math.log(float(row["iteration_ms"])))
                                 for i, row in enumerate(rows) if i not in judged])
        for i in judged:
            predicted = math.exp(sum(w * x for w, x in zip(weights, terms(rows[i]), strict=True)))
            errors.append(predicted / float(rows[i]["iteration_ms"]) - 1)
    summary("regression of nine terms, five-fold", errors)


def least_squares(points: Iterable[tuple[list[float], float]]) -> list[float]:
    """Solves the normal equations by elimination, with a little added to the diagonal: a term may be constant."""
    points = list(points)
    size = len(points[0][0])
    matrix = [[sum(x[i] * x[j] for x, _ in points) + (1e-6 if i == j else 0) for j in range(size)]
              + [sum(x[i] * y for x, y in points)] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k == i:
                continue
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


KINDS: dict[str, Callable[[list[Row], bool], None]] = {"peak_gib": memory, "iteration_ms": time}
# What a prediction needs of a row. Without "machine" or "step_s_mean" no time is printed beside memory.
NEEDED = {
    "peak_gib": ["gpus", "model", "kind", "lora_rank", "sequence", "micro_batches", "activations", "fits"],
    "iteration_ms": ["global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tensor_parallel",
                     "data_parallel", "pipeline_parallel"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--regression", action="store_true", help="print the regression's errors beside it, of times")
    arguments = parser.parse_args()
    with arguments.file.open() as file:
        rows = list(csv.DictReader(file))
    column = next((name for name in KINDS if rows and name in rows[0]), None)
    if column is None:
        print(f"{arguments.file} has no rows, or neither column of {', '.join(KINDS)}", file=sys.stderr)
        return 1
    missing = [name for name in NEEDED[column] if name not in rows[0]]
    if missing:
        print(f"{arguments.file} has {column}, but no {', '.join(missing)}, without which nothing is predicted", file=sys.stderr)
        return 1
    KINDS[column](rows, arguments.rows)
    if arguments.regression and column == "iteration_ms":
        regression(measured(rows, column))
    return 0


if __name__ == "__main__":
    sys.exit(main())
