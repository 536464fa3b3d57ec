# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's interface on this engine.

    import ziggurat.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Scripts written for DeepSpeed 0.19 run with this import in place of theirs. Optimizer state is in
host memory, or on a drive where ``offload_optimizer`` says "nvme". In stage 3 parameters are there too,
as ``offload_param`` says, on several ranks a slice of each on each rank, and are brought unit by unit;
on an accelerator they stay whole for now.
"""

from ziggurat.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from ziggurat.deepspeed._engine import DeepSpeedEngine
from ziggurat.deepspeed._initialize import add_config_arguments, initialize
from ziggurat.deepspeed._log import log_dist, logger
from ziggurat.deepspeed.accelerator import get_accelerator
from ziggurat.deepspeed.comm import init_distributed
from ziggurat.deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

#: The version of DeepSpeed whose interface this is, then whose code it is. Scripts compare the part
#: before the plus, which PEP 440 orders first.
__version__ = "0.19.8+ziggurat"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8

__all__ = [
    "DeepSpeedEngine",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]
