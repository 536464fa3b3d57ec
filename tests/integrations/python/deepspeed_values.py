# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed itself makes of configs: `python deepspeed_values.py < JOBS`, a line of JSON each.

A job is {"config": {..}, "world_size": 1, "run": true, "rates": 100}. The values are those of
DeepSpeedConfig, and with "run" those of the engine that deepspeed.initialize() makes of a small model
on the CPU, one process. With "rates" they are also what its optimizer's class is made with, and the
learning rates of so many steps. What DeepSpeed refuses is {"refused": "why"}.
"""

import contextlib
import inspect
import json
import logging
import os
import sys
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
    import torch
    from deepspeed.ops import adagrad, adam, lion
    from deepspeed.runtime import config as runtime_config
    from deepspeed.runtime import lr_schedules

SIZES = (
    "reduce_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")
SCALE = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "auto_cast",
)
TYPES = {None: None, torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def fields(section: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def offload(section: Any) -> dict[str, Any] | None:
    if section is None:
        return None
    path = section.nvme_path
    return {
        "device": str(getattr(section.device, "value", section.device)),
        "nvme_path": None if path is None else str(path),
        "pin_memory": section.pin_memory,
    }


def values_of(read: Any) -> dict[str, Any]:
    """The values of a DeepSpeedConfig, by the names of ours."""
    zero, monitor = read.zero_config, read.monitor_config
    names = ("enabled", "output_path", "job_name")
    scale = fields(read.float16_config, *SCALE) if read.float16_config.enabled else None
    return {
        **fields(
            read,
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "optimizer_name",
            "scheduler_name",
            "steps_per_print",
            "wall_clock_breakdown",
            "memory_breakdown",
            "dump_state",
            "dataloader_drop_last",
            "use_node_local_storage",
        ),
        "optimizer_params": read.optimizer_params or {},
        "scheduler_params": read.scheduler_params or {},
        "zero_stage": int(zero.stage),
        "bf16_enabled": read.bfloat16_config.enabled,
        "torch_autocast": TYPES[read.torch_autocast_dtype if read.torch_autocast_enabled else None],
        "check_grad_overflow": read.bfloat16_config.check_grad_overflow,
        "communication_data_type": TYPES[read.communication_data_type],
        "fp16": scale,
        "offload_optimizer": offload(zero.offload_optimizer),
        "offload_param": offload(zero.offload_param),
        "zero_sizes": fields(zero, *SIZES),
        "quantized": fields(zero, *QUANTIZED),
        "aio": dict(read.aio_config),
        "tag_validation": read.checkpoint_config["tag_validation"].upper(),
        "tensorboard": fields(monitor.tensorboard, *names),
        "csv_monitor": fields(monitor.csv_monitor, *names),
        "wandb": fields(monitor.wandb, "enabled", "group", "team", "project"),
    }


def made_with(read: Any) -> dict[str, Any]:
    """What its engine would construct the optimizer with: what is not given is its class's default.
    Nothing of a class that it would only look for then."""
    name, params = read.optimizer_name, dict(read.optimizer_params or {})
    offload = read.zero_config.offload_optimizer
    offloaded = offload is not None and offload.device != "none"
    if name in ("adam", "adamw") and not params.get("torch_adam"):
        cls = adam.DeepSpeedCPUAdam if offloaded else adam.FusedAdam
    elif name == "lion":
        cls = lion.DeepSpeedCPULion if offloaded else lion.FusedLion
    elif name == "adagrad":
        cls = adagrad.DeepSpeedCPUAdagrad if offloaded else torch.optim.Adagrad
    else:
        cls = torch.optim.AdamW if name in ("adam", "adamw") else getattr(torch.optim, name, None)
    if cls is None:
        return {}
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {key: its.default for key, its in parameters.items()} | params
    wanted = ("lr", "weight_decay", "eps", "betas", "momentum")
    return {key: defaults[key] for key in wanted if key in defaults}


def rates_of(read: Any, steps: int) -> list[float]:
    """Of each step, as its engine moves a scheduler: after the step."""
    params = dict(read.scheduler_params or {})
    model = [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(model, lr=made_with(read)["lr"], momentum=0.5)
    if read.scheduler_name is None:
        return [optimizer.param_groups[0]["lr"]] * steps
    if read.scheduler_name == "OneCycle":
        params["cycle_momentum"] = False  # SGD has no betas; the rate is the same
    scheduler = getattr(lr_schedules, read.scheduler_name)(optimizer, **params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def optimizer_of(engine: Any) -> dict[str, Any]:
    """The class, and its settings before a schedule moved the rate."""
    its = engine.basic_optimizer
    wanted = ("lr", "betas", "eps", "weight_decay")
    defaults = {name: its.defaults[name] for name in wanted if name in its.defaults}
    return {"class": type(its).__name__, **defaults}


def scheduler_of(engine: Any) -> dict[str, Any]:
    its = engine.lr_scheduler
    wanted = ("min_lrs", "max_lrs", "warmup_num_steps", "total_num_steps", "warmup_type")
    return {"class": type(its).__name__, **{k: getattr(its, k) for k in wanted if hasattr(its, k)}}


def run(config: dict[str, Any]) -> dict[str, Any]:
    """The engine's own answers, where they may differ from the config's."""
    model = torch.nn.Linear(8, 8)
    zero = config.get("zero_optimization", {})
    client = None
    if "optimizer" not in config:
        if "offload_optimizer" in zero and zero["offload_optimizer"]["device"] != "none":
            client = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters())
        else:
            client = torch.optim.AdamW(model.parameters())
    # For a drive DeepSpeed compiles its I/O, for minutes; none of the answers below depends on it.
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["device"] = "cpu"
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if client else model.parameters(),
        optimizer=client,
        config=config,
    )
    answers: dict[str, Any] = {
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "zero_stage": engine.zero_optimization_stage(),
        "bf16_enabled": engine.bfloat16_enabled(),
        "steps_per_print": engine.steps_per_print(),
        "wall_clock_breakdown": engine.wall_clock_breakdown(),
        "dump_state": engine.dump_state(),
    }
    if client is None:
        answers["optimizer"] = optimizer_of(engine)
    if engine.lr_scheduler is not None:
        answers["scheduler"] = scheduler_of(engine)
    return answers


def read(config: dict[str, Any], world_size: int) -> Any:
    """As one of so many ranks, of which there is this one."""
    with mock.patch.object(runtime_config, "dist") as ranks:
        ranks.get_rank.return_value = 0
        ranks.get_world_size.return_value = world_size
        return runtime_config.DeepSpeedConfig(json.loads(json.dumps(config)))


def answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        its = read(job["config"], job["world_size"])
        values = values_of(its)
        made = made_with(its) if job.get("rates") and its.optimizer_name is not None else {}
        if made:
            values["made_with"] = made
            try:
                values["rates"] = rates_of(its, job["rates"])
            except (AttributeError, TypeError, ValueError) as error:  # what its scheduler's constructor refuses
                values["no_rates"] = f"{type(error).__name__}: {error}"
        if job.get("run"):
            values |= run(job["config"])
    except Exception as error:  # assertions, validation errors, its own
        return {"refused": f"{type(error).__name__}: {error}"}
    return values


def main() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(job) for job in json.load(sys.stdin)]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
