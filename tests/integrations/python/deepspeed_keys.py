# SPDX-License-Identifier: Apache-2.0
"""Every key that DeepSpeed's config reads, found out from DeepSpeed, each with a value to ask about.

Printed as JSON, {"zero_optimization.stage": 3, ..}: the value is not its default.
"""

import contextlib
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
    import torch
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import config as runtime_config
    from deepspeed.runtime import lr_schedules, precision_config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

# Sections that are plain dicts there, with what they need to be read through.
READ_BY_NAME: dict[str, dict[str, Any]] = {
    "activation_checkpointing": {},
    "aio": {},
    "checkpoint": {"parallel_write": {}},
    "data_types": {},
    "flops_profiler": {},
    "optimizer": {"type": "AdamW", "params": {}},
    "scheduler": {"type": "WarmupLR"},
    "torch_autocast": {},
    "zero_optimization": {},
}
MODELS = {
    "zero_optimization": zero.DeepSpeedZeroConfig,
    "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
    "tensorboard": monitor.TensorBoardConfig,
    "csv_monitor": monitor.CSVConfig,
    "wandb": monitor.WandbConfig,
    "tensor_parallel": TPTrainingConfig,
}
# Only read where another key has a value, or by another name.
ALSO = ("allgather_size", "bfloat16", "sequence_parallel_size")
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# Values where a plain one of the type would not do.
VALUES: dict[str, Any] = {
    "optimizer.type": "AdamW",
    "optimizer.params.betas": [0.8, 0.9],
    "optimizer.params.lr": 1e-4,
    "optimizer.params.eps": 1e-6,
    "optimizer.params.max_grad_norm": 1.0,
    "scheduler.type": "WarmupLR",
    "scheduler.params.warmup_type": "linear",
    "communication_data_type": "bf16",
    "seq_parallel_communication_data_type": "bf16",
    "gradient_allreduce_op": "sum",
    "gradient_predivide_factor": 2.0,
    "gradient_clipping": 0.5,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "log_level": "warning",
    "vocabulary_size": 1000,
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "checkpoint.tag_validation": "Fail",
    "checkpoint.load_universal": True,
    "checkpoint.writer": {"type": "FAST"},
    "data_types.grad_accum_dtype": "bf16",
    "data_types.param_dtype": "fp32",
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["norm"],
    "torch_autocast.dtype": "bfloat16",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
    "allgather_size": 1000,
    "zero_optimization.stage": 3,
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_use_pin_memory": True,
    "zero_optimization.overlap_comm": True,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.5,
    "optimizer.params.momentum": 0.9,
    "zero_optimization.leaf_module": {"names": ["experts"]},
    "zero_optimization.zenflow": {"topk_ratio": 0.2},
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.zero_hpz_partition_size": 2,
    "tensor_parallel.autotp_size": 2,
    "aio.overlap_events": False,
    "aio.block_size": 65536,
    "aio.queue_depth": 32,
    "aio.intra_op_parallelism": 4,
    "fp16.min_loss_scale": 2,
}
TURNED_ON = {"enabled": True}
# Sections with one answer for all that is in them.
WHOLE = (
    "autotuning",
    "bfloat16",
    "comet",
    "comms_logger",
    "compile",
    "data_efficiency",
    "datastates_ckpt",
    "expert_parallel",
    "hybrid_engine",
    "pipeline",
    "timers",
    "weight_quantization",
)


class Recorded(dict):
    """A dict that writes down what is asked of it."""

    def __init__(self, prefix: str, seen: set[str], content: dict[str, Any]) -> None:
        inner = {
            key: Recorded(f"{prefix}{key}.", seen, value) if isinstance(value, dict) else value
            for key, value in content.items()
        }
        super().__init__(inner)
        self._prefix, self._seen = prefix, seen

    def __copy__(self) -> "Recorded":
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.add(self._prefix + key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._seen.add(f"{self._prefix}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._seen.add(self._prefix + key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self  # "in" is asked of it


def read_by_name() -> set[str]:
    """What DeepSpeedConfig looks up, but for sections themselves."""
    seen: set[str] = set()
    content = {"train_batch_size": 4, **READ_BY_NAME}
    runtime_config.DeepSpeedConfig(Recorded("", seen, content))
    sections = (*READ_BY_NAME, *MODELS, "checkpoint.parallel_write", "optimizer.params")
    return seen - set(sections) - {"scheduler.params"} | set(ALSO)


def shown(name: str, field: Any) -> str:
    return field.alias if isinstance(field.alias, str) else name


def by_models() -> dict[str, Any]:
    """The fields of its models, with their defaults."""
    return {
        f"{section}.{shown(name, field)}": field.get_default(call_default_factory=True)
        for section, model in MODELS.items()
        for name, field in model.model_fields.items()
        if f"{section}.{name}" not in MODELS
    }


def arguments(prefix: str, *classes: Any) -> dict[str, Any]:
    """What constructors take, with their defaults."""
    found = {}
    for one in classes:
        for name, parameter in inspect.signature(one.__init__).parameters.items():
            if name not in ("self", "params", "model_params", "optimizer", "verbose"):
                found[f"{prefix}.{name}"] = parameter.default
    return found


def value_for(path: str, default: Any) -> Any:
    """Another one than the default."""
    if path in VALUES:
        return VALUES[path]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if path.startswith("scheduler.params."):
        return 100
    return str(Path("/tmp/x")) if "path" in path else "x"


def all_keys() -> dict[str, Any]:
    optimizers = (
        deepspeed.ops.adam.DeepSpeedCPUAdam,
        deepspeed.ops.lion.DeepSpeedCPULion,
        deepspeed.ops.adagrad.DeepSpeedCPUAdagrad,
        torch.optim.SGD,
        torch.optim.Adagrad,
    )
    schedules = [getattr(lr_schedules, name) for name in SCHEDULES]
    found = {
        path: VALUES.get(path, TURNED_ON if path in WHOLE else True) for path in read_by_name()
    }
    switches = [f"optimizer.params.{name}" for name in ("torch_adam", "adam_w_mode")]
    defaults = by_models() | arguments("optimizer.params", *optimizers)
    defaults |= arguments("scheduler.params", *schedules) | dict.fromkeys(switches, False)
    return found | {path: value_for(path, default) for path, default in defaults.items()}


def main() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        found = all_keys()
    print(json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    main()
