# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed itself makes of configs: `python deepspeed_values.py < JOBS`, a line of JSON each.

A job is {"config": {..}, "world_size": 1, "run": true}. The values are those of DeepSpeedConfig,
and with "run" those of the engine that deepspeed.initialize() makes of a small model on the CPU, one process.
What DeepSpeed refuses is {"refused": "why"}.
"""

import contextlib
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
    from deepspeed.runtime import config as runtime_config

SIZES = (
    "reduce_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
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
        "aio": dict(read.aio_config),
        "tag_validation": read.checkpoint_config["tag_validation"].upper(),
        "tensorboard": fields(monitor.tensorboard, *names),
        "csv_monitor": fields(monitor.csv_monitor, *names),
        "wandb": fields(monitor.wandb, "enabled", "group", "team", "project"),
    }


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
        values = values_of(read(job["config"], job["world_size"]))
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
