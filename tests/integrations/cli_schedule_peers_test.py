#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_schedule_peers_test.py: `ziggurat schedule` beside DeepSpeed's and PyTorch's own schedulers.
"""    python3 cli_schedule_peers_test.py BINARY [--seed N] [--rounds N] [--steps N]

Every schedule with random parameters, every step of it. Exits with 77, saying why, where neither peer can be imported.
Tolerance 1e-12 of the largest rate: both compute in double, but ours has a logarithm and a cosine of its own, and PyTorch's
cosine goes from step to step, which gathers rounding.
"""
import argparse
import importlib
import json
import logging
import random
import subprocess
import sys
import tempfile

SKIPPED = 77
TOLERANCE = 1e-12


def ours(binary, schedule, parameters, steps, folder):
    """What each step is made with: [(learning rate, betas or None)]."""
    report = f"{folder}/schedule.json"
    command = [binary, "schedule", "--schedule", schedule, "--steps", str(steps), "--json", report]
    for key, value in parameters.items():
        flag = "--" + key.replace("_", "-")
        if key == "lr_range_test_staircase":
            command += [flag] if value else []
        else:
            command += [flag, str(value).lower() if isinstance(value, bool) else str(value)]
    subprocess.run(command, check=True)
    with open(report) as file:
        return [(row["learning_rate"], row.get("betas")) for row in json.load(file)["steps"]]


def deepspeeds(torch, schedulers, schedule, parameters, steps):
    parameters = dict(parameters)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=parameters.pop("lr", 0.5))
    scheduler = getattr(schedulers, schedule)(optimizer, **parameters)
    result = []
    for _ in range(steps):  # as its engine: a step, then the scheduler's
        group = optimizer.param_groups[0]
        result.append((group["lr"], list(group["betas"]) if parameters.get("cycle_momentum") else None))
        scheduler.step()
    return result


def pytorchs(torch, parameters, steps):
    lr, warmup, total = parameters["lr"], parameters["warmup"], parameters["total_num_steps"]
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=parameters["min_lr"])
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    result = []
    for _ in range(min(steps, total)):  # PyTorch's turns up again after its end
        result.append((optimizer.param_groups[0]["lr"], None))
        optimizer.step()
        scheduler.step()
    return result


def draw(schedule, steps):
    """Parameters of DeepSpeed's names."""
    rate = lambda: 10 ** random.uniform(-6, -2)
    warmup = {"warmup_num_steps": random.choice([1, 2, 3, random.randint(2, steps)]),
              "warmup_type": random.choice(["log", "linear"])}
    total = {"total_num_steps": random.choice([random.randint(1, steps), steps, 2 * steps])}
    if schedule == "WarmupLR":
        return {"warmup_min_lr": rate(), "warmup_max_lr": rate(), **warmup}
    if schedule == "WarmupDecayLR":
        return {"warmup_min_lr": rate(), "warmup_max_lr": rate(), **warmup, **total}
    if schedule == "WarmupCosineLR":
        return {"lr": rate(), "warmup_min_ratio": random.random(), "cos_min_ratio": random.random() / 10, **warmup, **total}
    if schedule == "OneCycle":
        first = random.randint(1, steps // 2)
        parameters = {"cycle_min_lr": rate(), "cycle_max_lr": rate(), "cycle_first_step_size": first,
                      "cycle_first_stair_count": random.choice([0, 0, random.randint(1, first)]),
                      "decay_step_size": random.choice([0, random.randint(1, steps)]),
                      "decay_lr_rate": random.choice([0.0, random.random()]),
                      "cycle_momentum": random.random() < 0.7}
        if parameters["cycle_momentum"]:
            parameters |= {"cycle_min_mom": random.uniform(0.5, 0.7), "cycle_max_mom": random.uniform(0.7, 0.9),
                           "decay_mom_rate": random.choice([0.0, 1e-5])}
        if random.random() < 0.7:
            parameters["cycle_second_step_size"] = random.randint(1, steps // 2)
            parameters["cycle_second_stair_count"] = random.choice([0, random.randint(1, first)])
        return parameters
    return {"lr_range_test_min_lr": rate(), "lr_range_test_step_size": random.randint(1, steps),
            "lr_range_test_step_rate": random.random() * 5, "lr_range_test_staircase": random.random() < 0.5}


def compare(schedule, parameters, got, expected):
    """The largest difference, as a share of the largest rate; exits where it is too large."""
    scale = max(rate for rate, _ in expected) or 1.0
    largest = 0.0
    for step, ((rate, betas), (their_rate, their_betas)) in enumerate(zip(got, expected)):
        differences = [abs(rate - their_rate) / scale]
        if their_betas is not None:
            differences += [abs(a - b) for a, b in zip(betas, their_betas)]
        if max(differences) > TOLERANCE:
            sys.exit(f"{schedule} {parameters}: step {step} has {rate!r} {betas}, the peer {their_rate!r} {their_betas}")
        largest = max([largest, *differences])
    return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--rounds", type=int, default=5, help="of each schedule")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    try:
        schedulers = importlib.import_module("deepspeed.runtime.lr_schedules")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        names = schedulers.VALID_LR_SCHEDULES
    except Exception as error:  # whatever importing it runs into is a reason to do without
        print(f"without DeepSpeed, PyTorch's cosine only: {error}")
        names = []
    print(f"seed {options.seed}", flush=True)
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for schedule in [*names, "cosine"]:
            largest = 0.0
            for _ in range(options.rounds):
                if schedule == "cosine":
                    warmup = random.randint(2, options.steps // 2)
                    parameters = {"lr": 10 ** random.uniform(-5, -2), "min_lr": 1e-6, "warmup": warmup,
                                  "total_num_steps": random.randint(warmup + 1, options.steps)}
                    expected = pytorchs(torch, parameters, options.steps)
                else:
                    parameters = draw(schedule, options.steps)
                    expected = deepspeeds(torch, schedulers, schedule, parameters, options.steps)
                got = ours(options.binary, schedule, parameters, options.steps, folder)
                largest = max(largest, compare(schedule, parameters, got, expected))
            print(f"{schedule}: {options.rounds} draws of {options.steps} steps, largest difference {largest:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
