# SPDX-License-Identifier: Apache-2.0
"""Fills in what a config leaves to its trainer: "auto" from Transformers' arguments, or from
Accelerate's own settings, with the values that Transformers 5.23 and Accelerate 1.15 would give
it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ziggurat._library.native import InvalidArgument

_BUCKETS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
# Where each of Accelerate's settings stands in a config.
_INLINE = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_INLINE_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_param_nvme_path": "none",
    "offload_optimizer_nvme_path": "none",
    "zero3_save_16bit_model": False,
}


class _Filled:
    """A copy of a config, and a list of what in it contradicts the trainer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self._mismatches: list[str] = []

    def _section(self, path: str) -> tuple[dict[str, Any] | None, str]:
        *sections, key = path.split(".")
        inner: Any = self.config
        for section in sections:
            inner = inner.get(section)
            if inner is None:
                return None, key
        return inner, key

    def value(self, path: str) -> Any:
        section, key = self._section(path)
        return None if section is None else section.get(key)

    def fill(self, path: str, value: Any) -> None:
        """Replaces "auto" by `value`; a key that is absent stays absent."""
        section, key = self._section(path)
        if section is not None and section.get(key) == "auto":
            section[key] = value

    def match(self, path: str, value: Any, name: str) -> None:
        """Replaces "auto" by `value`, and notes it if the config has another value than the
        trainer."""
        self.fill(path, value)
        given = self.value(path)
        if given is not None and given != value:
            self._mismatches.append(f'"{path}" is {given}, but {name} is {value}')

    def agreed(self) -> dict[str, Any]:
        """Returns the config. Errors: InvalidArgument, which lists all that contradicts the
        trainer."""
        if self._mismatches:
            raise InvalidArgument(
                f"config and trainer disagree: {'; '.join(self._mismatches)}. Give both the same "
                "value, or "
                'say "auto" in the config'
            )
        return self.config

    def fill_buckets(self, hidden_size: int | None, always: bool) -> None:
        """Fills in the sizes that follow from the model's width. Without `always`, two of them are
        filled in for stage 3 alone.

        Errors: InvalidArgument if a size is "auto" but the width is not known.
        """
        autos = [path for path in _BUCKETS if self.value(path) == "auto"]
        if not autos:
            return
        if hidden_size is None:
            raise InvalidArgument(
                f'config: the "auto" of {", ".join(autos)} follows from the model\'s hidden_size, '
                "which is not known: give numbers, or a model whose config has hidden_size"
            )
        values = (hidden_size**2, int(0.9 * hidden_size * hidden_size), 10 * hidden_size)
        third = always or self.value("zero_optimization.stage") == 3
        for path, value in zip(_BUCKETS, values, strict=True):
            if third or path == _BUCKETS[0]:
                self.fill(path, value)


def _hidden_size(config: Any, inner: bool) -> int | None:
    """Returns a model's width, the largest if it has several, or None if it is not known."""
    for at in (config, getattr(config, "text_config", None) if inner else None):
        if at is not None and hasattr(at, "hidden_size"):
            return int(at.hidden_size)
        if at is not None and hasattr(at, "hidden_sizes"):
            return int(max(at.hidden_sizes))
    return None


def fill_auto(
    config: Mapping[str, Any], args: Any, model: Any = None, num_training_steps: int | None = None
) -> dict[str, Any]:
    """Returns `config` with every "auto" filled in as Transformers' Trainer does it from its
    TrainingArguments.

    `num_training_steps` is the number that the Trainer counts, by default ``args.max_steps``.
    Errors: InvalidArgument if the config contradicts the arguments, or if a width is not known.
    """
    filled = _Filled(config)
    micro, accumulate = args.per_device_train_batch_size, args.gradient_accumulation_steps
    filled.match("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
    filled.match("gradient_accumulation_steps", accumulate, "gradient_accumulation_steps")
    total = args.world_size * micro * accumulate
    product = "the product of the micro-batch, the accumulation steps and the number of ranks"
    filled.match("train_batch_size", total, product)
    filled.match("gradient_clipping", args.max_grad_norm, "max_grad_norm")
    filled.match("optimizer.params.lr", args.learning_rate, "learning_rate")
    betas = [args.adam_beta1, args.adam_beta2]
    filled.match("optimizer.params.betas", betas, "adam_beta1 and adam_beta2")
    filled.match("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
    filled.match("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
    filled.fill("scheduler.params.warmup_min_lr", 0)
    filled.match("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
    if args.save_on_each_node:
        filled.config.setdefault("checkpoint", {})["use_node_local_storage"] = True
    filled.match("fp16.enabled", args.fp16 or args.fp16_full_eval, "fp16")
    filled.match("bf16.enabled", args.bf16 or args.bf16_full_eval, "bf16")
    filled.fill_buckets(_hidden_size(getattr(model, "config", None), inner=True), always=False)
    steps = num_training_steps or (args.max_steps if args.max_steps > 0 else None)
    if steps is not None:
        filled.match("scheduler.params.total_num_steps", steps, "the number of steps")
        warmup = max(1, args.get_warmup_steps(steps))  # DeepSpeed takes no warm-up of 0 steps
        filled.match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
    # The Trainer's Accelerate fills in this key.
    filled.fill("zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    return filled.agreed()


def from_accelerate(
    settings: Mapping[str, Any] | str | os.PathLike[str],
    *,
    micro_batch_size: int,
    world_size: int,
    gradient_accumulation_steps: int = 1,
    model: Any = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    warmup_num_steps: int = 0,
    total_num_steps: int | None = None,
) -> dict[str, Any]:
    """Returns the config that Accelerate would give DeepSpeed, from its YAML file or that file's
    content.

    The arguments are what Accelerate finds in a script: the training loader's batch size, the
    Accelerator's accumulation, and the arguments of its stand-ins for optimizer and schedule.
    Errors: InvalidArgument where Accelerate would refuse.
    """
    read = _yaml(settings) if isinstance(settings, str | os.PathLike) else settings
    filled = _Filled(plugin_config(read))
    filled.fill("fp16.enabled", read.get("mixed_precision") == "fp16")
    filled.fill("bf16.enabled", read.get("mixed_precision") in ("bf16", "fp8"))
    filled.fill("gradient_accumulation_steps", gradient_accumulation_steps)
    filled.fill("gradient_clipping", 1.0)
    filled.fill("zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    filled.fill("train_micro_batch_size_per_gpu", micro_batch_size)
    micro = filled.value("train_micro_batch_size_per_gpu")
    if micro is not None:
        accumulate = filled.value("gradient_accumulation_steps")
        filled.fill("train_batch_size", micro * accumulate * world_size)
    filled.fill_buckets(_hidden_size(getattr(model, "config", None), inner=False), always=True)
    if lr is not None:
        filled.fill("optimizer.params.lr", lr)
        filled.fill("optimizer.params.weight_decay", weight_decay or 0.0)
        filled.fill("scheduler.params.warmup_min_lr", 0)
        filled.fill("scheduler.params.warmup_max_lr", lr)
        filled.fill("scheduler.params.warmup_num_steps", max(1, warmup_num_steps))
    if total_num_steps is not None:
        # Accelerate's schedules step once for every rank.
        filled.fill("scheduler.params.total_num_steps", -(-total_num_steps // world_size))
    return filled.config


def plugin_config(settings: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the config in Accelerate's YAML file, or in that file's content, with its types;
    "auto" stays."""
    read = _yaml(settings) if isinstance(settings, str | os.PathLike) else settings
    config = _plugin_config(read)
    _set_precision(config, str(read.get("mixed_precision") or "no"))
    return config


def _plugin_config(read: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Accelerate's inline settings as a config, or the config file that they name."""
    inline = dict(read.get("deepspeed_config") or {})
    file = inline.pop("deepspeed_config_file", None)
    given = {**_INLINE_DEFAULTS, **{k: v for k, v in inline.items() if k in _INLINE}}
    if file is None:
        return _inline_config(given)
    also = [key for key in (*inline, *read) if key in _INLINE or key == "mixed_precision"]
    if also:
        raise InvalidArgument(
            f'deepspeed_config_file="{file}" cannot be given together with {", ".join(also)}: '
            "set these in that file"
        )
    config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    if "zero_optimization" not in config:
        raise InvalidArgument(f'{file} has no "zero_optimization", which Accelerate needs: add it')
    config.setdefault("gradient_accumulation_steps", 1)
    filled = _Filled(config)
    for name, path in _INLINE.items():
        filled.fill(path, given[name])
    return {**filled.config, "steps_per_print": float("inf")}


def _inline_config(given: Mapping[str, Any]) -> dict[str, Any]:
    def offload(what: str) -> dict[str, Any]:
        device = given[f"offload_{what}_device"]
        path = given[f"offload_{what}_nvme_path"] if device == "nvme" else None
        return {"device": device, "nvme_path": path}

    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": given["gradient_accumulation_steps"],
        "zero_optimization": {
            "stage": given["zero_stage"],
            "offload_optimizer": offload("optimizer"),
            "offload_param": offload("param"),
            "stage3_gather_16bit_weights_on_model_save": given["zero3_save_16bit_model"],
        },
    }
    if given["gradient_clipping"]:
        config["gradient_clipping"] = given["gradient_clipping"]
    return {**config, "steps_per_print": float("inf")}


def _set_precision(config: dict[str, Any], precision: str) -> None:
    """Sets the precision in the config. Errors: InvalidArgument if the config enables the other
    type."""
    if precision == "fp16":
        config.setdefault("fp16", {"enabled": True, "auto_cast": True})
    elif precision in ("bf16", "fp8"):
        config.setdefault("bf16", {"enabled": True})
    other = "bf16" if precision == "fp16" else "fp16"
    if precision != "no" and config.get(other, {}).get("enabled") is True:
        raise InvalidArgument(
            f"mixed_precision is {precision}, but the config enables {other}: choose one of "
            'the two, or say "auto" in the config'
        )
    for name in ("fp16", "bf16"):
        config.setdefault(name, {"enabled": False})


def _yaml(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidArgument(
            f"reading {os.fspath(path)} needs PyYAML: run pip install pyyaml, or give the settings "
            "as a dict"
        ) from error
    read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(read, Mapping):
        raise InvalidArgument(f"{os.fspath(path)} has no settings: give Accelerate's YAML file")
    return read
