# SPDX-License-Identifier: Apache-2.0
"""Lets Trainer take a config for DeepSpeed, or Accelerate's with a DeepSpeed plugin, without
DeepSpeed."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ziggurat.torch
from ziggurat._library.native import InvalidArgument
from ziggurat._library.standard_error import stderr
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._streaming.streaming import Streaming
from ziggurat.deepspeed import _streamed
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._swap import RunDirectory
from ziggurat.deepspeed.auto import fill_auto, plugin_config

# Sections and keys of DeepSpeed's configs; no setting of ziggurat.torch's optimizers has these
# names.
_DEEPSPEEDS = {
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
}
# Trainer's names for DeepSpeed's schedules.
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}


def config_of(given: Mapping[str, Any] | str | Path, args: Any) -> dict[str, Any] | None:
    """Returns `given` as a config for DeepSpeed, or None if `given` is something else."""
    read: Any = given
    if isinstance(given, str | Path):
        if Path(given).suffix in (".yaml", ".yml"):
            return plugin_config(given)  # Trainer's arguments fill in what the config leaves open
        read = json.loads(Path(given).read_text(encoding="utf-8"))
    return dict(read) if _DEEPSPEEDS & read.keys() else None


def names_optimizer(config: Mapping[str, Any]) -> bool:
    return (config.get("optimizer") or {}).get("type") is not None


def optimizer_of(
    config: Mapping[str, Any], args: Any, model: torch.nn.Module
) -> tuple[type[EngineOptimizer] | None, dict[str, Any]]:
    """Returns the optimizer class that the config names, or None, and the optimizer's arguments.

    If the config enables bf16, the model becomes bf16, as with DeepSpeed; the engine keeps the
    fp32 masters. Errors: InvalidArgument, which names both settings, if the config contradicts
    Trainer's arguments.
    """
    filled = fill_auto(config, args, model)
    _check_schedule(filled.pop("scheduler", None), args)
    read = Config(filled, world_size=args.world_size)
    if read.bf16_enabled:
        model.bfloat16()
    where = dict(read.engine_arguments)
    placement = str(where.get("placement", "host"))
    if placement.startswith("nvme:"):
        # Each run has a directory of its own, so that runs can share a drive and a resumed run
        # finds its own.
        run = Path(os.fspath(args.output_dir)).resolve().name
        where["placement"] = f"{placement}/ziggurat-{run}"
    streaming = None
    if not args.auto_find_batch_size:  # which begins again with the parameters of the model
        streaming = _stream(read, args, model, placement)
    where |= _streamed.exchange_of(read, streaming, args.world_size)
    if args.process_index == 0:
        for note in read.notes:
            print(f"ziggurat: {note}", file=stderr())
    if read.optimizer_class is None:
        return None, where
    kind: type[EngineOptimizer] = getattr(ziggurat.torch, read.optimizer_class)
    own = {k: v for k, v in read.optimizer_arguments.items() if k != "weight_decay"}
    return kind, own | where


def _stream(read: Config, args: Any, model: torch.nn.Module, placement: str) -> Streaming | None:
    """Lets the optimizer that is made next keep the parameters, if the config asks for that."""
    streaming = _streamed.stream(model, read, args.world_size)
    if streaming is None or not streaming.needs_directory or placement != "host":
        return streaming
    path = _streamed.nvme_path_of(read)
    if path is not None:  # else the script has called offload() itself
        directory = RunDirectory(path, args.process_index, "offload_param")
        _streamed.keep_on_drive(streaming, directory.path / "params")
        weakref.finalize(model, _remove, directory)  # which goes with its last reference
    return streaming


def _remove(directory: RunDirectory) -> None:
    directory.remove()


def _check_schedule(scheduler: Any, args: Any) -> None:
    """Checks that the config's scheduler is the one that Trainer makes."""
    kind = (scheduler or {}).get("type")
    if kind is None:
        return
    wanted = _SCHEDULES.get(kind)
    has = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if wanted is None:
        raise InvalidArgument(
            f"scheduler.type={kind}: Trainer makes the schedule, but has no schedule of this type: "
            "leave the section out, and choose a schedule with lr_scheduler_type"
        )
    if kind == "WarmupLR" and (scheduler.get("params") or {}).get("warmup_type") != "linear":
        raise InvalidArgument(
            "scheduler.type=WarmupLR warms up logarithmically unless warmup_type is linear, but "
            'Trainer warms up linearly: give "warmup_type": "linear", or leave the section out'
        )
    if has != wanted:
        raise InvalidArgument(
            f'scheduler.type={kind} and lr_scheduler_type="{has}" differ, and Trainer makes the '
            f'schedule: give lr_scheduler_type="{wanted}", or leave the section out'
        )
