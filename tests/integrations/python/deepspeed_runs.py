# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed, or ziggurat.deepspeed, makes of a case: the same code runs with either.

    python deepspeed_runs.py MODULE < cases.json > results.json

Each case is {"kind": "train" | "schedule" | "scale", ...} and gives a list.
"""

import importlib
import json
import os
import sys
from typing import Any

import torch
from small_models import small_model


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randint(61, (8, 9))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])


def train(deepspeed: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every micro-step: what the engine says behind it."""
    model = small_model()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=case["config"]
    )
    rows = []
    for step in range(case["micro_steps"]):
        loss = loss_of(engine, batch(step))
        factor = float("inf") if step in case.get("infinite", ()) else 1.0
        scaled = engine.backward(loss * factor)
        engine.step()
        norm = engine.get_global_grad_norm()
        rows.append(
            {
                "loss": loss.item(),
                "share": scaled.item(),
                "norm": None if norm is None else float(norm),
                "lr": engine.get_lr(),
                "betas": engine.get_mom(),
                "applied": engine.was_step_applied(),
                "counts": [
                    engine.global_steps,
                    engine.global_samples,
                    engine.micro_steps,
                    engine.skipped_steps,
                ],
                "boundary": engine.is_gradient_accumulation_boundary(),
            }
        )
    return rows


def schedule(deepspeed: Any, case: dict[str, Any]) -> list[tuple[float, list[float] | None]]:
    """Rate and betas of each step; the scheduler is given up and made anew in the middle."""
    schedules = importlib.import_module(f"{deepspeed.__name__}.runtime.lr_schedules")
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=case["lr"])
    made = getattr(schedules, case["name"])
    scheduler = made(optimizer, **case["params"])
    rows = []
    for step in range(case["steps"]):
        if step == case["steps"] // 2:
            state, group = scheduler.state_dict(), dict(optimizer.param_groups[0])
            optimizer.param_groups[0]["lr"] = case["lr"]
            scheduler = made(optimizer, **case["params"])
            scheduler.load_state_dict(state)
            optimizer.param_groups[0].update(group)
        group = optimizer.param_groups[0]
        cycles = case["params"].get("cycle_momentum")
        rows.append((group["lr"], list(group["betas"]) if cycles else None))
        scheduler.step()
    return rows


def scale(deepspeed: Any, case: dict[str, Any]) -> list[float]:
    """The loss scale in each step; -1: training ends."""
    names = ("init_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    settings = [case["settings"][name] for name in names]
    if deepspeed.__name__ == "deepspeed":
        module = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
        scaler = module.DynamicLossScaler(*settings)
        update = scaler.update_scale
    else:
        module = importlib.import_module("ziggurat.deepspeed._loss_scale")
        scaler = module.DynamicLossScale(*settings)
        update = scaler.update
    scales = []
    for overflow in case["overflows"]:
        scales.append(scaler.cur_scale)
        try:
            update(overflow)
        except Exception:  # DeepSpeed raises no narrower one
            return [*scales, -1.0]
    return scales


def results(module: str, cases: list[dict[str, Any]]) -> list[Any]:
    deepspeed = importlib.import_module(module)
    kinds = {"train": train, "schedule": schedule, "scale": scale}
    return [kinds[case["kind"]](deepspeed, case) for case in cases]


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed, and what it compiles with, write to standard output
    made = results(sys.argv[1], json.load(sys.stdin))
    with os.fdopen(answer, "w") as file:
        json.dump(made, file)
