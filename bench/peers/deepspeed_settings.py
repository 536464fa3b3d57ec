# SPDX-License-Identifier: Apache-2.0
"""The settings with which DeepSpeed is measured: the fastest of those that run on a CPU."""

from __future__ import annotations

import argparse
from typing import Any


def configuration(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Returns DeepSpeed's config. `arguments` has optimizer ("cpu" or "nvme"), nvme_path, dtype and
    clip."""
    offload: dict[str, Any] = {"device": arguments.optimizer, "pin_memory": False}
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": offload}
    if arguments.optimizer == "nvme":
        offload.update(
            {
                "nvme_path": arguments.nvme_path,
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,
            }
        )
        zero = {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": {"device": "cpu"},
            "sub_group_size": 10_000_000,
        }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": arguments.dtype == "bf16"},
        "gradient_clipping": arguments.clip,
        "zero_optimization": zero,
        "aio": {
            "block_size": 1048576,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
    }
