# SPDX-License-Identifier: Apache-2.0
"""The reports' scripts with DeepSpeed's engine on two ranks, and with its optimizer for the CPU.

They use ZeRO stages 2 and 3 with the optimizer's state on the CPU, in fp32 unless a report is
about 16 bits.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from field.jobs import BETAS, DECAY, EPSILON, GROUPS, LAYOUTS, Bag, Wrong, check, job_of
from field.models import (
    Net,
    Pair,
    check_decayed,
    check_fives,
    check_loaded,
    check_moments,
    check_tied,
    compiled,
    files_end_at,
    gradients_of_pair,
    loss_of,
    said_of,
)
from field.scripts import DTYPES, Script, every_size


def engine_of(
    model: torch.nn.Module, stage: int, params: Any = None, decay: float = DECAY, **config: Any
) -> Any:
    adamw = {"lr": 1e-2, "betas": BETAS, "eps": EPSILON, "weight_decay": decay}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if params is None else params,
        config=settings | config,
        dist_init_required=True,
    )
    return engine


def step_of(engine: Any, step: int = 0) -> None:
    engine.backward(loss_of(engine, step))
    engine.step()


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns whole values on every rank, which stage 3 has to gather."""
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def trained(report: str, stage: int, what: str = "") -> Any:
    job = job_of(report, what)
    bag = Bag(job)
    more = {"gradient_accumulation_steps": job.micro, "gradient_clipping": job.clip or 0.0}
    engine = engine_of(bag, stage, bag.groups(job), **more)
    for step in range(1, job.steps + 1):
        for batch in range(job.micro):
            # the engine divides by `micro` itself
            engine.backward(engine(job.gradients(step, batch)))
            engine.step()
    check(job, values_of(engine.module))
    return engine


def by_formula(report: str, stage: int, folder: Path, what: str = "") -> None:
    trained(report, stage, what)


def cpu_adam(params: Any) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=DECAY)


def compiled_names(what: str, folder: Path, strict: bool = True) -> None:
    model = compiled(Net(1), what)
    engine = engine_of(model, 2)
    step_of(engine)
    engine.save_checkpoint(str(folder))
    saved = values_of(model)
    other = engine_of(Net(2), 2)
    other.load_checkpoint(str(folder), load_module_strict=strict)
    check_loaded(values_of(other.module), saved)


def loaded_late(when: int, by_engine: bool, folder: Path) -> None:
    torch.manual_seed(6)
    layer = torch.nn.Linear(4, 4)
    engine = engine_of(layer, 2, bf16={"enabled": True})
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    for step in range(3):
        if step == when:
            fives = {k: torch.full_like(v, 5) for k, v in layer.state_dict().items()}
            if by_engine:
                engine.load_module_state_dict({"module": fives})
            else:
                layer.load_state_dict(fives)
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
    check_fives(values_of(layer))


def moments(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the moments of a and b after one more step without gradients, which connects them to
    the loaded state."""
    engine.backward(engine({name: torch.zeros(6, 4) for name in "ab"}))
    engine.step()
    named = dict(engine.module.named_parameters())
    return {name: safe_get_full_optimizer_state(named[name], "exp_avg").clone() for name in "ab"}


def other_order(stage: int, folder: Path) -> None:
    model = Pair(1)
    engine = engine_of(model, stage, [model.a, model.b])
    for step in range(3):
        engine.backward(engine(gradients_of_pair(step)))
        engine.step()
    engine.save_checkpoint(str(folder))
    saved = values_of(model)
    other = Pair(2)
    resumed = engine_of(other, stage, [other.b, other.a])
    resumed.load_checkpoint(str(folder))
    loaded = values_of(other)
    check_moments(moments(resumed), moments(engine))
    check_loaded(loaded, saved)


def tied(stage: int, folder: Path) -> None:
    model = Net(1, tied=True)
    engine = engine_of(model, stage)
    step_of(engine)
    engine.save_checkpoint(str(folder))
    saved = values_of(model)
    other = Net(2, tied=True)
    engine_of(other, stage).load_checkpoint(str(folder))
    check_tied(other, saved, values_of(other))


def tied_to_safetensors(stage: int, folder: Path) -> None:
    engine = engine_of(Net(1, tied=True), stage)
    step_of(engine)
    engine.save_checkpoint(str(folder / "saved"))
    if engine.global_rank == 0:
        whole = str(folder / "whole")
        convert_zero_checkpoint_to_fp32_state_dict(
            str(folder / "saved"), whole, safe_serialization=True
        )
    torch.distributed.barrier()


def full_disk(stage: int, folder: Path) -> str:
    model = Net(1, width=200)
    engine = engine_of(model, stage)
    failed, saved = None, []
    for step in range(1, 4):
        step_of(engine, step)
        if step == 1:
            saved = values_of(model)
            engine.save_checkpoint(str(folder), tag="step-1")
        if step == 2:
            try:
                with files_end_at(100_000):
                    engine.save_checkpoint(str(folder), tag="step-2")
            except Exception as error:
                failed = error
    said = said_of(failed)
    other = Net(2, width=200)
    path, _ = engine_of(other, stage).load_checkpoint(str(folder))
    if path is None:
        raise Wrong(f"a load of the newest checkpoint loads nothing{said}")
    check_loaded(values_of(other), saved)
    return said


def small_decays(masters: dict[str, bool], folder: Path) -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(layer.weight)
    engine = engine_of(layer, 2, decay=0.1, bf16={"enabled": True, **masters})
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(400):
        engine.backward(0 * engine(torch.zeros(1, 64, dtype=torch.bfloat16)).float().sum())
        engine.step()
    check_decayed(values_of(layer)[0])


def other_layouts(what: str, stage: int, folder: Path) -> None:
    engine = trained("13", stage, what)
    engine.save_checkpoint(str(folder))
    saved = values_of(engine.module)
    other = Bag(job_of("13", what))
    engine_of(other, stage).load_checkpoint(str(folder))
    check_loaded(values_of(other), saved)


STAGES = {"stage 2": 2, "stage 3": 3}
IN_BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
CELLS: dict[str, dict[str, Script]] = {
    "1": {name: partial(by_formula, "1", stage) for name, stage in STAGES.items()},
    "2": {
        f"{what} ({name})": partial(by_formula, "2", stage, what=what)
        for name, stage in STAGES.items()
        for what in GROUPS
    },
    "4": {kind: partial(every_size, cpu_adam, kind) for kind in DTYPES},
    "5": {
        f"{what}{'' if strict else ' (strict=False)'}": partial(compiled_names, what, strict=strict)
        for what in ("whole", "blocks")
        for strict in (True, False)
    },
    "6": {
        f"by {how} after {n} steps": partial(loaded_late, n, by_engine)
        for how, by_engine in {"the module": False, "the engine": True}.items()
        for n in (0, 1)
    },
    "7": {name: partial(other_order, stage) for name, stage in STAGES.items()},
    "8": {
        **{name: partial(tied, stage) for name, stage in STAGES.items()},
        "zero_to_fp32 with safetensors": partial(tied_to_safetensors, 2),
    },
    "9": {name: partial(full_disk, stage) for name, stage in STAGES.items()},
    "11": {name: partial(by_formula, "11", stage) for name, stage in STAGES.items()},
    "12": {
        "fp32 masters": partial(small_decays, {}),
        "bf16 masters and state": partial(small_decays, IN_BF16),
    },
    "13": {
        f"{what} ({name})": partial(other_layouts, what, stage)
        for name, stage in STAGES.items()
        for what in LAYOUTS
    },
    "14": {name: partial(by_formula, "14", stage) for name, stage in STAGES.items()},
}
NOT_RUN = {
    "10": "DeepSpeed's data sampler was not tried",
    "sparse": "DeepSpeed's `sparse_gradients` was not tried",
    "compiled": "DeepSpeed's engine makes the step",
}
