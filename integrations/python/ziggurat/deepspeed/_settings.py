# SPDX-License-Identifier: Apache-2.0
"""Methods that tell a script its engine's configuration, as in DeepSpeed's engine."""

from __future__ import annotations

from typing import Any

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._loss_scale import LossScale


class Settings:
    """The part of an engine that answers for its configuration."""

    _config: Config
    _scale: LossScale
    world_size: int
    dp_world_size: int
    optimizer: Any

    def train_batch_size(self) -> int:
        """Returns the number of samples in one optimizer step, on all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples in one forward on one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Sets the batch by more or fewer micro-steps. Errors: InvalidArgument if no number of them
        gives it."""
        one = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % one:
            raise InvalidArgument(
                f"train_batch_size={train_batch_size}: a micro-step of all ranks has {one} "
                f"samples, so give a multiple of {one}"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // one

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Sets the micro-batch; the number of micro-steps stays."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        steps = self.gradient_accumulation_steps()
        self._config.train_batch_size = micro_batch_size * steps * self.dp_world_size

    def gradient_clipping(self) -> float:
        """Returns the norm to which gradients are clipped, or 0 without clipping."""
        return self._config.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self._config.zero_stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns what the stage says; parameters on an accelerator are whole all the same."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> Any:
        return self._config.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.offload_param

    def fp16_enabled(self) -> bool:
        return self._config.fp16 is not None

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16_enabled

    def fp16_auto_cast(self) -> bool:
        return self._config.fp16 is not None and self._config.fp16.auto_cast

    def loss_scale(self) -> float:
        """Returns the configured scale, or 0 if the scale is dynamic. ``cur_scale`` is the present
        scale."""
        return 0.0 if self._config.fp16 is None else float(self._config.fp16.loss_scale)

    def dynamic_loss_scale(self) -> bool:
        return self._scale.dynamic

    @property
    def cur_scale(self) -> float:
        return self._scale.cur_scale

    def optimizer_name(self) -> str | None:
        return self._config.optimizer_name

    def optimizer_params(self) -> dict[str, Any]:
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        return self._config.scheduler_name

    def scheduler_params(self) -> dict[str, Any]:
        return self._config.scheduler_params

    def steps_per_print(self) -> float | None:
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        return self._config.dump_state

    def dataloader_drop_last(self) -> bool:
        return self._config.dataloader_drop_last

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def get_lr(self) -> list[float]:
        """Returns the learning rate of every group of parameters."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Returns SGD's momentum, or both betas, of every group."""
        return self._of_groups("momentum" if self.optimizer_name() == "SGD" else "betas")
