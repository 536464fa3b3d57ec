# SPDX-License-Identifier: Apache-2.0
"""Reads a config made for DeepSpeed 0.19.8: its effective values, and what they mean to the engine.

The library's tables (integrations/deepspeed) define the keys, their defaults and what is refused.
This module only gives the values their Python types.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat._library.abi import call
from ziggurat._library.native import InvalidArgument

#: Keywords of ziggurat.torch's optimizers that may stand in a config beside DeepSpeed's keys.
OWN_KEYS = (
    "placement",
    "state_format",
    "state_rounding",
    "param_rounding",
    "threads",
    "host_memory",
)

# names that DeepSpeed reads in upper or lower case
_DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lion")
_CLASSES = {
    "adamw": ("AdamW", ("betas", "eps")),
    "adam": ("Adam", ("betas", "eps")),
    "lion": ("Lion", ("betas",)),
    "adagrad": ("Adagrad", ("eps", "lr_decay", "initial_accumulator_value")),
    "sgd": ("SGD", ("momentum", "dampening", "nesterov")),
}


@dataclass(frozen=True)
class Fp16:
    """The settings for the loss scale of a model in fp16."""

    loss_scale: float  #: 0 for a dynamic scale
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: int
    auto_cast: bool


@dataclass(frozen=True)
class Offload:
    """Where the config asks to keep parameters, or the optimizer's state."""

    device: str  #: "none", "cpu" or "nvme"
    nvme_path: str | None
    pin_memory: bool


@dataclass(frozen=True)
class LeafModules:
    """Which modules the config makes leaf modules."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    name_suffixes: tuple[str, ...]


@dataclass(frozen=True)
class ParamLimits:
    """What stage 3 may have of the parameters in memory at once, in elements."""

    max_live: int
    max_reuse_distance: int
    prefetch_bucket_size: int | None  #: None: the config does not say
    persistence_threshold: int  #: of one parameter
    model_persistence_threshold: int  #: of all that persist
    max_in_cpu: int
    buffer_count: int
    buffer_size: int


@dataclass(frozen=True)
class FileMonitor:
    """The settings of TensorBoard's files, or of CSV files."""

    enabled: bool
    output_path: str
    job_name: str


@dataclass(frozen=True)
class Wandb:
    enabled: bool
    group: str | None
    team: str | None
    project: str


@dataclass(frozen=True)
class Monitor:
    tensorboard: FileMonitor
    csv_monitor: FileMonitor
    wandb: Wandb

    @property
    def enabled(self) -> bool:
        return self.tensorboard.enabled or self.csv_monitor.enabled or self.wandb.enabled


class Config:
    """The effective values: what the config gives, and DeepSpeed's defaults for the rest."""

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None,
        *,
        world_size: int,
        args: Any = None,
    ) -> None:
        """Reads `config`: a dict, the path of a file, the text of such a file, or the text in
        base64. None takes the file that ``args.deepspeed_config`` names. Errors:
        InvalidArgument, which names the key by its path."""
        if config is None:
            config = getattr(args, "deepspeed_config", None)
        if config is None:
            raise InvalidArgument(
                "there is no config: give config=, or name a file with --deepspeed_config"
            )
        text, name = _text_of(config)
        read = _read(text, name, world_size)
        self.given: dict[str, Any] = read["given"]  #: the config as it was written
        self.notes: list[str] = read["notes"]  #: a line for each key that has no effect here
        self._settings: dict[str, dict[str, Any]] = read["settings"]
        self._handed: dict[str, dict[str, Any]] = read["handed"]
        self._take_batches(world_size)
        self._take_types()
        self._take_optimizer()
        self._take_places()
        self._take_reports()

    def _of(self, setting: str) -> Any:
        """Returns an engine's setting, or None if the config does not decide it."""
        return self._settings.get(setting, {"value": None})["value"]

    def value(self, path: str) -> Any:
        """Returns a key that the script's side uses, by DeepSpeed's path. Errors: KeyError for
        other keys."""
        return self._handed[path]["value"]

    def _take_batches(self, world_size: int) -> None:
        self.world_size = world_size
        self.train_micro_batch_size_per_gpu: int = self._of("batch")
        self.gradient_accumulation_steps: int = self._of("accumulate")
        self.train_batch_size: int = (
            self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps * world_size
        )
        self.gradient_clipping = float(self._of("clip"))
        self.dataloader_drop_last: bool = self.value("dataloader_drop_last")

    def _take_types(self) -> None:
        self.zero_stage: int = self._of("zero_stage")
        self.bf16_enabled: bool = self._of("dtype") == "bf16"
        section = "bf16" if self.given.get("bf16") is not None else "bfloat16"
        #: Whether a model in bf16 leaves out steps whose gradients are not finite.
        self.check_grad_overflow: bool = self.value(f"{section}.check_grad_overflow")
        #: The type of the forward's autocast, or None without autocast.
        self.torch_autocast: str | None = "bf16" if self.value("torch_autocast.enabled") else None
        self.communication_data_type: str | None = self._of("reduce_dtype")  #: "fp32", "bf16", ..
        self.fp16: Fp16 | None = None
        if self._of("dtype") == "fp16":
            self.fp16 = Fp16(
                loss_scale=float(self._of("loss_scale")),
                initial_scale_power=self._of("initial_scale_power"),
                loss_scale_window=self._of("loss_scale_window"),
                hysteresis=self._of("hysteresis"),
                consecutive_hysteresis=self._of("consecutive_hysteresis"),
                min_loss_scale=self._of("min_loss_scale"),
                auto_cast=self.value("fp16.auto_cast"),
            )

    def _take_optimizer(self) -> None:
        self.optimizer_name, self.optimizer_params = self._section("optimizer")
        self.scheduler_name, self.scheduler_params = self._section("scheduler")
        if (self.optimizer_name or "").lower() in _DEEPSPEED_OPTIMIZERS:
            self.optimizer_name = (self.optimizer_name or "").lower()
        #: The class in ziggurat.torch for the config's optimizer, and its arguments with
        #: DeepSpeed's defaults.
        self.optimizer_class: str | None = None
        self.optimizer_arguments: dict[str, Any] = {}
        if self.optimizer_name is None:
            return
        self.optimizer_class, own = _CLASSES[self._of("optimizer")]
        for name in ("lr", "weight_decay", "maximize", *own):
            value = self._argument(name)
            self.optimizer_arguments[name] = tuple(value) if name == "betas" else value

    def _section(self, name: str) -> tuple[str | None, dict[str, Any]]:
        section = self.given.get(name) or {}
        kind = section.get("type")
        return kind, dict(section.get("params") or {}) if kind is not None else {}

    def _argument(self, name: str) -> Any:
        if name == "momentum":
            return self._of("betas")[0]
        setting = self._of(name)
        return self.value(f"optimizer.params.{name}") if setting is None else setting

    def _take_places(self) -> None:
        self.offload_optimizer = self._offload("offload_optimizer")
        self.offload_param = self._offload("offload_param")
        self.aio = {key: self.value(f"aio.{key}") for key in _AIO}
        #: Numbers of elements; reduce_bucket_size has no effect, since gradients are divided in another
        #: way.
        self.zero_sizes: dict[str, int] = {key: self._of(key) for key in _SIZES}
        self.param_limits = self._param_limits()
        self.leaf_modules = self._leaf_modules()
        self.hpz_partition_size: int = self.value("zero_optimization.zero_hpz_partition_size")
        #: Whether zero_quantized_KEY is true.
        self.quantized: dict[str, bool] = {
            key: self.value(f"zero_optimization.zero_quantized_{key}")
            for key in ("weights", "nontrainable_weights", "gradients")
        }
        #: Keyword arguments of ziggurat.torch's optimizers.
        self.engine_arguments: dict[str, Any] = {
            name: self._of(name) for name in OWN_KEYS if self._of(name) is not None
        }
        #: Those that the config names, each with the key that names it.
        self.named_arguments: dict[str, tuple[Any, str]] = {
            name: (value, self._settings[name]["path"])
            for name, value in self.engine_arguments.items()
            if not self._settings[name]["assumed"]
        }

    def _offload(self, section: str) -> Offload | None:
        path = f"zero_optimization.{section}"
        device = self.value(f"{path}.device")
        if device is None:
            return None
        nvme_path = self.value(f"{path}.nvme_path")
        return Offload(device, nvme_path, self.value(f"{path}.pin_memory"))

    def _param_limits(self) -> ParamLimits:
        path = "zero_optimization"
        prefetch = self._settings["prefetch_bucket_size"]
        return ParamLimits(
            max_live=int(self._of("max_live_parameters")),
            max_reuse_distance=int(self._of("max_reuse_distance")),
            prefetch_bucket_size=None if prefetch["assumed"] else int(prefetch["value"]),
            persistence_threshold=int(self._of("param_persistence_threshold")),
            model_persistence_threshold=int(self.value(f"{path}.model_persistence_threshold")),
            max_in_cpu=self.value(f"{path}.offload_param.max_in_cpu"),
            buffer_count=self.value(f"{path}.offload_param.buffer_count"),
            buffer_size=self.value(f"{path}.offload_param.buffer_size"),
        )

    def _leaf_modules(self) -> LeafModules:
        path = "zero_optimization.leaf_module"
        given = (self.given.get("zero_optimization") or {}).get("leaf_module")
        given = {} if given in (None, "auto") else given
        known = tuple(LeafModules.__dataclass_fields__)
        if not isinstance(given, dict) or not given.keys() <= set(known):
            raise InvalidArgument(f'"{path}" is {given!r}: give an object with {", ".join(known)}')
        lists = {key: [its] if isinstance(its, str) else its for key, its in given.items()}
        for key, its in lists.items():
            if not isinstance(its, list) or not all(isinstance(one, str) for one in its):
                raise InvalidArgument(f'"{path}.{key}" is {its!r}: give a list of names')
        return LeafModules(**{key: tuple(lists.get(key, ())) for key in known})

    def _take_reports(self) -> None:
        self.steps_per_print: float | None = self.value("steps_per_print")  #: None for never
        counted: bool = self.value("flops_profiler.enabled")
        self.wall_clock_breakdown: bool = self.value("wall_clock_breakdown") or counted
        self.memory_breakdown: bool = self.value("memory_breakdown")
        self.dump_state: bool = self.value("dump_state")
        self.tag_validation: str = self.value("checkpoint.tag_validation").upper()
        self.use_node_local_storage: bool = self.value("checkpoint.use_node_local_storage")
        files = {
            name: FileMonitor(**self._all_of(name, "enabled", "output_path", "job_name"))
            for name in ("tensorboard", "csv_monitor")
        }
        wandb = Wandb(**self._all_of("wandb", "enabled", "group", "team", "project"))
        self.monitor = Monitor(**files, wandb=wandb)

    def _all_of(self, section: str, *keys: str) -> dict[str, Any]:
        return {key: self.value(f"{section}.{key}") for key in keys}


_SIZES = (
    "reduce_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
_AIO = (
    "block_size",
    "queue_depth",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
)


def _text_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the config's text, and its name in messages."""
    if isinstance(config, Mapping):
        try:
            return json.dumps(config, default=os.fspath), "config"
        except TypeError as error:
            raise InvalidArgument(f"config has a value that JSON cannot hold: {error}") from error
    where = os.fspath(config)
    if os.path.exists(where):
        return Path(where).read_text(encoding="utf-8"), where
    if where.lstrip().startswith("{"):
        return where, "config"
    try:
        return base64.urlsafe_b64decode(where).decode("utf-8"), "config"
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise InvalidArgument(
            f'config="{where[:200]}" is neither a file that exists, nor JSON, nor JSON in base64'
        ) from error


def _read(text: str, name: str, world_size: int) -> dict[str, Any]:
    context = json.dumps({"world_size": world_size, "settings": OWN_KEYS})
    given = [part.encode() for part in (text, name, context)]
    read: dict[str, Any] = json.loads(call("ziggurat_deepspeed_config", *given, words=str))
    return read
