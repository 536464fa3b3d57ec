# SPDX-License-Identifier: Apache-2.0
"""The engine that ``initialize()`` returns: forward, backward and step as DeepSpeed's has them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ziggurat._native import InvalidArgument
from ziggurat.deepspeed import _gradients, _optimizers
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._log import say
from ziggurat.deepspeed._loss_scale import loss_scale_of
from ziggurat.deepspeed._settings import Settings
from ziggurat.deepspeed.accelerator import get_accelerator

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class DeepSpeedEngine(Settings, torch.nn.Module):
    """Trains `module`, whose attributes it has too.

    ``backward(loss)`` divides the loss by the number of micro-steps; ``step()`` changes parameters
    at each last of them, and leaves out a step whose gradients are not finite.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        *,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        model_parameters: Iterable[Any] | None = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._group = group
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.dp_world_size = torch.distributed.get_world_size(group)
        self.device = get_accelerator().device(self.local_rank)
        self.global_steps = 0  #: optimizer steps, with those that were left out
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0  #: those that were left out
        self._step_applied = False
        self._norm: float | None = None
        self._boundary: bool | None = None  # as the script says, if it does
        self._inside_no_sync = False
        self._scale = loss_scale_of(config)
        self.module = model
        self._prepare_module()
        self.client_optimizer: torch.optim.Optimizer | None = None
        self.optimizer = self._made_optimizer(optimizer, model_parameters)
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        for note in config.notes:
            say(note)

    def _prepare_module(self) -> None:
        """Parameters of the configuration's type, on this rank's device, with rank 0's values."""
        dtype = torch.bfloat16 if self.bfloat16_enabled() else None
        dtype = torch.float16 if self.fp16_enabled() else dtype
        if dtype is not None:
            for param in self.module.parameters():
                if param.dtype in _FLOATS:
                    param.data = param.data.to(dtype)
        self.module.to(self.device)
        if self.dp_world_size > 1:
            source = 0 if self._group is None else torch.distributed.get_global_rank(self._group, 0)
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                torch.distributed.broadcast(tensor.data, source, group=self._group)

    def _made_optimizer(
        self,
        given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
        params: Iterable[Any] | None,
    ) -> Any:
        where = dict(self._config.engine_arguments)
        if self.dp_world_size > 1:
            where["group"] = self._group or torch.distributed.group.WORLD
        trained = list(self.module.parameters() if params is None else params)
        if given is None:
            name = self.optimizer_name()
            if name is None:
                return None
            made = _optimizers.named(name, self.optimizer_params(), trained, where)
        else:
            client = given if isinstance(given, torch.optim.Optimizer) else given(trained)
            made = _optimizers.in_place_of(client, where)
            self.client_optimizer = client
        made._scale = self._scale
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulates the gradients of `loss`, and returns it divided by the micro-steps.

        Errors: InvalidArgument for what is not a scalar with a graph.
        """
        self._need_optimizer("backward()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(
                "backward(): loss must be a scalar tensor that has a graph: call output.backward() "
                "for gradients of other outputs"
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss if self.cur_scale == 1.0 else loss.float() * self.cur_scale
        with self._reduced_at_boundary():
            scaled.backward(retain_graph=retain_graph)
        return loss

    def _reduced_at_boundary(self) -> contextlib.AbstractContextManager[Any]:
        alone = self.dp_world_size == 1
        if alone or (self.is_gradient_accumulation_boundary() and not self._inside_no_sync):
            return contextlib.nullcontext()
        return self.optimizer.no_sync()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank alone; ``step()`` is refused inside."""
        if self._inside_no_sync:
            raise InvalidArgument("no_sync() inside no_sync(): leave the first one before")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-step is the last before parameters change."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on: whether a micro-step is the last. Said before its forward."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-step; the last one changes parameters, and steps the scheduler."""
        self._need_optimizer("step()")
        if self._inside_no_sync:
            raise InvalidArgument("step() inside no_sync(): leave it before the step")
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs)
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        norm = _gradients.norm_of(params) / self.cur_scale
        overflow = not math.isfinite(norm)
        self._norm = math.inf if overflow else norm
        if overflow:
            self.skipped_steps += 1
        else:
            factor = _gradients.factor_of(norm, self.gradient_clipping(), self.cur_scale)
            _gradients.multiply(params, factor)
            self.optimizer.step()
        self.optimizer.overflow = overflow
        self.optimizer.zero_grad(set_to_none=True)
        self._scale.update(overflow)
        self._step_applied = not overflow
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def was_step_applied(self) -> bool:
        """Whether the newest ``step()`` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the newest step's gradients before clipping, on all ranks together."""
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.module.parameters():
            param.grad = None

    def _need_optimizer(self, who: str) -> None:
        if self.optimizer is None:
            raise InvalidArgument(
                f"{who}: the engine has no optimizer: give one to initialize(), or name one in the "
                "configuration"
            )
