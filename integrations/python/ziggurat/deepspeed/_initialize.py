# SPDX-License-Identifier: Apache-2.0
"""Defines ``initialize()`` and the command-line arguments, as in DeepSpeed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._engine import DeepSpeedEngine
from ziggurat.deepspeed.comm import init_distributed


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Returns the engine that trains `model`, its optimizer, the loader of `training_data`, and the
    scheduler.

    The configuration is `config` (a mapping, the path of a JSON file, or its text in base64), or
    the file that ``args.deepspeed_config`` names. `optimizer` may be a function of the parameters,
    and `lr_scheduler` a function of the optimizer. Errors: InvalidArgument, Unimplemented.
    """
    if model is None:
        raise InvalidArgument("initialize(): model is missing: give the torch.nn.Module to train")
    if mesh_param is not None:
        raise Unimplemented("initialize(): mesh_param (sequence parallelism) is not supported yet")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if args is not None and hasattr(args, "local_rank"):
        args.local_rank = int(os.environ["LOCAL_RANK"])
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise Unimplemented(
            "initialize(): mpu has more than one model-parallel rank, which is not supported yet"
        )
    group = None if mpu is None else mpu.get_data_parallel_group()
    engine = DeepSpeedEngine(
        model,
        Config(
            _given(args, config if config is not None else config_params),
            world_size=torch.distributed.get_world_size(group),
            args=args,
        ),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        group=group,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _given(args: Any, config: Any) -> Any:
    named = getattr(args, "deepspeed_config", None)
    if named is not None and config is not None:
        raise InvalidArgument(
            "initialize(): a configuration was given in config= and one in args.deepspeed_config "
            f"({named}): give one of them"
        )
    if named is None and config is None:
        raise InvalidArgument(
            "initialize(): there is no configuration: give config=, or --deepspeed_config with "
            "the path of a JSON file"
        )
    return named if config is None else config


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to the arguments of `parser`."""
    group = parser.add_argument_group("DeepSpeed", "ziggurat.deepspeed's arguments")
    group.add_argument(
        "--deepspeed", action="store_true", help="a flag for the script; Ziggurat does not read it"
    )
    group.add_argument("--deepspeed_config", type=str, help="path of the JSON configuration")
    return parser
