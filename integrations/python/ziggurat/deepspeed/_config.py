# SPDX-License-Identifier: Apache-2.0
"""What a DeepSpeed configuration asks for, with DeepSpeed's defaults: the part the engine uses."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ziggurat._native import InvalidArgument


@dataclass
class Fp16:
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    auto_cast: bool = False


@dataclass
class Offload:
    device: str = "none"
    nvme_path: str | None = None
    pin_memory: bool = True


@dataclass
class File:
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass
class Wandb:
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass
class Monitor:
    tensorboard: File = field(default_factory=File)
    csv_monitor: File = field(default_factory=File)
    wandb: Wandb = field(default_factory=Wandb)

    @property
    def enabled(self) -> bool:
        return self.tensorboard.enabled or self.csv_monitor.enabled or self.wandb.enabled


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}


def _optimizer(name: str | None, params: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    if name is None:
        return None, {}
    given = dict(params)
    decoupled = bool(given.pop("adam_w_mode", True))
    given.pop("torch_adam", False)
    lower = name.lower()
    if lower in ("adam", "adamw"):
        return "AdamW" if decoupled or lower == "adamw" else "Adam", _ADAM | given
    if lower == "lion":
        return "Lion", _LION | given
    if lower in ("adagrad", "sgd"):
        return {"adagrad": "Adagrad", "sgd": "SGD"}[lower], given
    raise InvalidArgument(f'optimizer.type="{name}" has no counterpart: AdamW, Adam, Lion, ...')


def _known(kind: Any, given: dict[str, Any] | None) -> Any:
    return kind(**{k: v for k, v in (given or {}).items() if k in kind.__dataclass_fields__})


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if Path(config).is_file():
        return json.loads(Path(config).read_text())
    return json.loads(base64.urlsafe_b64decode(config))


class Config:
    def __init__(
        self, config: dict[str, Any] | str | os.PathLike[str], *, world_size: int, args: Any = None
    ) -> None:
        given = _read(config)
        total = given.get("train_batch_size")
        micro = given.get("train_micro_batch_size_per_gpu")
        steps = given.get("gradient_accumulation_steps")
        if total is None:
            total = micro * (steps or 1) * world_size
        if micro is None:
            micro = total // (steps or 1) // world_size
        if steps is None:
            steps = total // micro // world_size
        self.train_batch_size, self.train_micro_batch_size_per_gpu = total, micro
        self.gradient_accumulation_steps = steps
        self.gradient_clipping = float(given.get("gradient_clipping", 1.0))
        zero = given.get("zero_optimization", {})
        self.zero_stage = int(zero.get("stage", 0))
        optimizer, scheduler = given.get("optimizer"), given.get("scheduler")
        self.optimizer_name = optimizer["type"] if optimizer else None
        self.optimizer_params = dict(optimizer.get("params", {})) if optimizer else {}
        self.optimizer_class, self.optimizer_arguments = _optimizer(
            self.optimizer_name, self.optimizer_params
        )
        self.given = given
        self.world_size = world_size
        self.check_grad_overflow = True
        self.tag_validation = given.get("checkpoint", {}).get("tag_validation", "Warn").upper()
        self.use_node_local_storage = False
        self.scheduler_name = scheduler["type"] if scheduler else None
        self.scheduler_params = dict(scheduler.get("params", {})) if scheduler else {}
        self.bf16_enabled = bool(given.get("bf16", {}).get("enabled", False))
        fp16 = given.get("fp16", {})
        self.fp16 = _known(Fp16, fp16) if fp16.get("enabled") else None
        self.offload_optimizer = (
            _known(Offload, zero["offload_optimizer"]) if "offload_optimizer" in zero else None
        )
        self.offload_param = (
            _known(Offload, zero["offload_param"]) if "offload_param" in zero else None
        )
        self.steps_per_print = given.get("steps_per_print")
        self.wall_clock_breakdown = bool(given.get("wall_clock_breakdown", False))
        self.memory_breakdown = bool(given.get("memory_breakdown", False))
        self.dump_state = bool(given.get("dump_state", False))
        self.communication_data_type = given.get("communication_data_type")
        self.dataloader_drop_last = bool(given.get("dataloader_drop_last", False))
        self.monitor = Monitor(
            _known(File, given.get("tensorboard")),
            _known(File, given.get("csv_monitor")),
            _known(Wandb, given.get("wandb")),
        )
        self.aio = given.get("aio", {})
        self.engine_arguments: dict[str, Any] = {}
        if self.offload_optimizer is not None and self.offload_optimizer.device == "nvme":
            self.engine_arguments["placement"] = f"nvme:{self.offload_optimizer.nvme_path}"
        self.notes: list[str] = []
