# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed beside DeepSpeed 0.19.8 itself: training, schedules, the loss scale.

DeepSpeed runs on the CPU, in a process of its own. Run by pytest; as a script it exits with 77
where PyTorch, pytest or DeepSpeed is missing.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys

try:
    import deepspeed_runs
    import pytest
    import torch  # noqa: F401
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

if importlib.util.find_spec("deepspeed") is None:
    print("skipped: DeepSpeed is not installed")
    sys.exit(77)

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
BASE = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_allow_untested_optimizer": True,
    "optimizer": ADAMW,
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_max_lr": 1e-2},
}
CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
}


def zero(stage: int) -> dict:
    return {"zero_optimization": {"stage": stage}}


# fp16 has no DeepSpeed on the CPU to stand beside.
TRAINED = {
    "fp32, stage 0": BASE | {"gradient_accumulation_steps": 2},
    "fp32, stage 2": BASE | zero(2) | {"gradient_accumulation_steps": 3},
    "fp32, no clipping": BASE | zero(1) | {"gradient_clipping": 0.0},
    "fp32, tight clipping": BASE | zero(2) | {"gradient_clipping": 0.1},
    "Adam": BASE | {"optimizer": {"type": "Adam", "params": ADAMW["params"] | {"lr": 1e-3}}},
    "SGD": BASE | zero(1) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "warmup and decay": BASE | zero(2) | {"scheduler": DECAY, "gradient_accumulation_steps": 2},
    "one cycle": BASE | zero(1) | {"scheduler": CYCLE},
    "bf16": BASE | zero(2) | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    "bf16, decay": BASE | zero(2) | {"bf16": {"enabled": True}, "scheduler": DECAY},
}
MICRO_STEPS = 12
INFINITE = [4, 7]  # micro-steps whose gradients are not finite


def training_cases() -> dict[str, dict]:
    cases = {
        name: {"kind": "train", "config": config, "micro_steps": MICRO_STEPS}
        for name, config in TRAINED.items()
    }
    for name in ("warmup and decay", "bf16, decay"):
        cases[f"{name}, infinite"] = cases[name] | {"infinite": INFINITE}
    return cases


def scheduler_cases(draws: random.Random) -> list[dict]:
    def rate() -> float:
        return 10 ** draws.uniform(-6, -2)

    steps, cases = 400, []
    for _ in range(8):
        warmup = {
            "warmup_num_steps": draws.choice([1, 2, draws.randint(2, steps)]),
            "warmup_type": draws.choice(["log", "linear"]),
        }
        total = {"total_num_steps": draws.choice([draws.randint(1, steps), 2 * steps])}
        bounds = {"warmup_min_lr": rate(), "warmup_max_lr": rate()}
        ratios = {"warmup_min_ratio": draws.random(), "cos_min_ratio": draws.random() / 10}
        drawn = {
            "WarmupLR": warmup | bounds,
            "WarmupDecayLR": warmup | bounds | total,
            "WarmupCosineLR": warmup | total | ratios,
            "OneCycle": one_cycle(draws, steps, rate),
            "LRRangeTest": {
                "lr_range_test_min_lr": rate(),
                "lr_range_test_step_size": draws.randint(1, steps),
                "lr_range_test_step_rate": draws.random() * 5,
                "lr_range_test_staircase": draws.random() < 0.5,
            },
        }
        for name, params in drawn.items():
            cases.append(
                {"kind": "schedule", "name": name, "params": params, "steps": steps, "lr": rate()}
            )
    return cases


def one_cycle(draws: random.Random, steps: int, rate) -> dict:
    first = draws.randint(1, steps // 3)
    params = {
        "cycle_min_lr": rate(),
        "cycle_max_lr": rate(),
        "cycle_first_step_size": first,
        "cycle_first_stair_count": draws.choice([0, draws.randint(1, first)]),
        "decay_step_size": draws.choice([0, draws.randint(1, steps)]),
        "decay_lr_rate": draws.choice([0.0, draws.random()]),
        "cycle_momentum": draws.random() < 0.7,
        "decay_mom_rate": draws.choice([0.0, 1e-5]),
    }
    if draws.random() < 0.7:
        params["cycle_second_step_size"] = draws.randint(1, steps // 3)
        params["cycle_second_stair_count"] = draws.choice([0, draws.randint(1, first)])
    return params


def scale_cases(draws: random.Random) -> list[dict]:
    cases = []
    for _ in range(20):
        share = draws.choice([0.02, 0.2, 0.7])
        settings = {
            "init_scale": 2.0 ** draws.randint(0, 20),
            "scale_window": draws.choice([1, 3, 20]),
            "min_scale": draws.choice([1, 0.25]),
            "delayed_shift": draws.choice([1, 2, 4]),
            "consecutive_hysteresis": draws.random() < 0.5,
        }
        overflows = [draws.random() < share for _ in range(200)]
        cases.append({"kind": "scale", "settings": settings, "overflows": overflows})
    return cases


@pytest.fixture(scope="module")
def beside() -> dict[str, list[tuple]]:
    """Of each kind of case: (case, ours, theirs)."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draws = random.Random(seed)
    named = training_cases()
    cases = [*named.values(), *scheduler_cases(draws), *scale_cases(draws)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(random.randint(20000, 50000)), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, deepspeed_runs.__file__, "deepspeed"],
        input=json.dumps(cases),
        env=os.environ | alone,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    ours = json.loads(json.dumps(deepspeed_runs.results("ziggurat.deepspeed", cases)))
    found: dict[str, list[tuple]] = {}
    for case, one, other in zip(cases, ours, json.loads(done.stdout), strict=True):
        found.setdefault(case["kind"], []).append((case, one, other))
    found["named"] = dict(zip(named, found["train"], strict=True))
    return found


# fp32: both round the last bit or two in each of up to 12 steps. bf16: a master that lies between
# two bf16 numbers is rounded by us to the nearest with ties away from zero, by DeepSpeed to even,
# and micro-steps are summed by us in fp32: weights differ by 2^-9 of their size here and there.
@pytest.mark.parametrize("name", training_cases())
def test_training_is_deepspeeds(beside, name):
    case, ours, theirs = beside["named"][name]
    tolerance = 1e-2 if "bf16" in case["config"] else 2e-4
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{name}, micro-step {step}"
        assert one["loss"] == pytest.approx(other["loss"], rel=tolerance), where
        assert one["lr"] == pytest.approx(other["lr"], rel=1e-12, abs=1e-15), where
        for key in ("applied", "counts", "boundary"):
            assert one[key] == other[key], f"{where}: {key}"
        if step not in case.get("infinite", ()):
            assert one["share"] == pytest.approx(other["share"], rel=tolerance), where
        if other["norm"] is not None:  # at stage 0 in fp32 DeepSpeed does not know it
            assert one["norm"] == pytest.approx(other["norm"], rel=tolerance), where
        for mine, peers in zip(one["betas"], other["betas"], strict=True):
            assert mine == pytest.approx(peers, rel=1e-12), where


def test_the_curves_could_tell_a_difference(beside):
    """Clipping, decay and accumulation each change the losses by more than is tolerated."""
    losses = {name: [row["loss"] for row in run[1]] for name, run in beside["named"].items()}
    for one, other in (
        ("fp32, no clipping", "fp32, tight clipping"),
        ("fp32, stage 0", "fp32, stage 2"),
        ("warmup and decay", "fp32, stage 0"),
    ):
        most = max(abs(a / b - 1) for a, b in zip(losses[one], losses[other], strict=True))
        assert most > 2e-3, f"{one} and {other}"


def test_schedules_are_deepspeeds(beside):
    # Both compute in double, in another order here and there.
    for case, ours, theirs in beside["schedule"]:
        largest = max(rate for rate, _ in theirs)
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{case['name']} {case['params']}, step {step}"
            assert abs(one[0] - other[0]) <= 1e-13 * largest, where
            assert one[1] == (None if other[1] is None else pytest.approx(other[1], rel=1e-13)), (
                where
            )


def test_the_loss_scale_is_deepspeeds(beside):
    for case, ours, theirs in beside["scale"]:
        assert ours == theirs, case["settings"]


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
