# SPDX-License-Identifier: Apache-2.0
"""The engine that ``initialize()`` returns, with DeepSpeed's forward, backward and step."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed import (
    _checkpoint,
    _gradients,
    _loading,
    _optimizers,
    _owners,
    _stage3_params,
    _state_access,
    _streamed,
)
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._data import DeepSpeedDataLoader, loader_of
from ziggurat.deepspeed._loss_scale import loss_scale_of
from ziggurat.deepspeed._model_dtype import DTYPES, cast, dtype_of
from ziggurat.deepspeed._report import Report
from ziggurat.deepspeed._schedulers import scheduler_of
from ziggurat.deepspeed._settings import Settings
from ziggurat.deepspeed._swap import RunDirectory
from ziggurat.deepspeed.accelerator import get_accelerator


_numbers = itertools.count()


class DeepSpeedEngine(Settings, torch.nn.Module):
    """Trains `module`, and has the module's attributes too.

    ``backward(loss)`` divides the loss by the number of micro-steps. ``step()`` changes parameters
    at the last micro-step of each batch, and leaves out a step whose gradients are not finite.
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
        self.global_steps = 0  #: optimizer steps, those that were left out included
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0  #: steps that were left out
        self._step_applied = False
        self._norm: float | None = None
        self._boundary: bool | None = None  # the boundary that the script has set, if any
        self._inside_no_sync = False
        self._backwards = 0  # calls of backward() since the newest step
        self._is_scaled = False  # whether scale() was called since the newest step
        self.number = next(_numbers)  #: this engine's number in the process, the same on all ranks
        self.saves: Counter[int] = Counter()  #: calls of save_checkpoint() at each global step
        self._scale = loss_scale_of(config)
        self._directory: RunDirectory | None = None
        self._collate_fn = collate_fn
        _streamed.require_no_engine(model)
        self.module = model
        self._prepare_module()
        self.client_optimizer: torch.optim.Optimizer | None = None
        self.optimizer = self._made_optimizer(optimizer, model_parameters)
        self.lr_scheduler = scheduler_of(config, lr_scheduler, self.optimizer)
        self.training_dataloader = (
            None if training_data is None else self.deepspeed_io(training_data)
        )
        _checkpoint.begin(self)
        self._report = Report(self)
        self.monitor = self._report.monitor

    def _prepare_module(self) -> None:
        """Gives the module's parameters the configured type and rank 0's values, on this rank's
        device."""
        cast(self.module, dtype_of(self._config))
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
        trained = list(self.module.parameters() if params is None else params)
        if given is None:
            groups = _optimizers.groups_of(trained, self.module)
            named = self._config.optimizer_class is not None
            made = _optimizers.named(self._config, groups, self._where()) if named else None
        else:
            client = given if isinstance(given, torch.optim.Optimizer) else given(trained)
            if _optimizers.is_ours(client):
                _optimizers.look_at_ours(client, self._config, self.dp_world_size)
                made = client
            else:
                made = _optimizers.in_place_of(client, self.module, self._where())
            self.client_optimizer = client
        if made is None:
            _streamed.say_of_no_optimizer(self._config)
        else:
            made._scale = self._scale
            _owners.take(made)
        return made

    def _where(self) -> dict[str, Any]:
        """Returns the optimizer's arguments beside its settings. In stage 3 the parameters go to it."""
        where = dict(self._config.engine_arguments)
        streaming = _streamed.stream(self.module, self._config, self.dp_world_size)
        offload = self._config.offload_optimizer
        named = None if offload is None or offload.device != "nvme" else offload.nvme_path
        if named is not None and where.get("placement") == f"nvme:{named}":
            self._directory = RunDirectory(named, self.global_rank)
            where["placement"] = f"nvme:{self._directory.path}/state"
        elif streaming is not None and streaming.needs_directory and where.get("placement") == "host":
            path = _streamed.nvme_path_of(self._config)
            if path is not None:  # else the script has called offload() itself, and hears what is missing
                self._directory = RunDirectory(path, self.global_rank, "offload_param")
                _streamed.keep_on_drive(streaming, self._directory.path / "params")
        where |= _streamed.exchange_of(self._config, streaming, self.dp_world_size)
        if self.dp_world_size > 1:
            where["group"] = self._group or torch.distributed.group.WORLD
            if self._config.communication_data_type is not None:
                where["reduce_dtype"] = DTYPES[self._config.communication_data_type]
        if self.zero_optimization_partition_weights():
            # Only scripts for stage 3 are known to gather parameters before they read them, and so
            # to wait for values that the engine still writes beside the next forward.
            where["model"] = self.module
        return where

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.fp16_auto_cast():
            inputs = tree_map(_as_half, inputs)
        with self._report.part("forward"), self._autocast():
            return self.module(*inputs, **named)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._config.torch_autocast
        if dtype is None:
            return contextlib.nullcontext()
        around: contextlib.AbstractContextManager[Any]
        around = torch.autocast(self.device.type, dtype=DTYPES[dtype])
        return around

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulates the gradients of `loss`, and returns it divided by the number of micro-steps.

        Errors: InvalidArgument if `loss` is not a scalar with a graph.
        """
        self._need_optimizer("backward()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(
                "backward(): loss must be a scalar tensor that has a graph: call output.backward() "
                "for gradients of other outputs"
            )
        self._backwards += 1
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = self._scaled(loss)
        with self._report.part("backward"), self._reduced_at_boundary():
            self.optimizer.backward(scaled, retain_graph=retain_graph)
        return loss

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.cur_scale == 1.0 else loss.float() * self.cur_scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times fp16's scale, for scripts that call
        ``engine.scale(loss).backward()`` in place of ``backward(loss)``. ``step()`` then
        divides the gradients by the number of micro-steps."""
        self._is_scaled = True
        return self._scaled(loss)

    def _divisor(self) -> float:
        """Returns the number that divides this step's gradients.

        Errors: InvalidArgument if the script called its own backward without the loss scale.
        """
        if self._backwards:
            return self.cur_scale
        if self.fp16_enabled() and not self._is_scaled:
            raise InvalidArgument(
                "step(): with fp16, the gradients of loss.backward() lack the loss scale: call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        return self.cur_scale * self.gradient_accumulation_steps()

    def _reduced_at_boundary(self) -> contextlib.AbstractContextManager[Any]:
        alone = self.dp_world_size == 1
        if alone or (self.is_gradient_accumulation_boundary() and not self._inside_no_sync):
            return contextlib.nullcontext()
        local: contextlib.AbstractContextManager[Any] = self.optimizer.no_sync()
        return local

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backwards inside accumulate on this rank alone; ``step()`` is refused inside."""
        if self._inside_no_sync:
            raise InvalidArgument(
                "no_sync() was called inside no_sync(): leave the first no_sync() before the second"
            )
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether this micro-step is the last before parameters change."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether micro-steps from now on are the last ones; call it before the forward."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-step; the last one changes parameters, and steps the scheduler."""
        self._need_optimizer("step()")
        if self._inside_no_sync:
            raise InvalidArgument(
                "step() was called inside no_sync(): leave no_sync() before the step"
            )
        self._step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        with self._report.part("step"):
            if is_boundary:
                self._take_step(lr_kwargs)
        self._report.micro_step(is_boundary)
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        divisor = self._divisor()
        norm = _gradients.norm_of(params) / divisor
        overflow = not math.isfinite(norm) and not self._takes_any()
        self._norm = math.inf if overflow else norm
        if overflow:
            self.skipped_steps += 1
        else:
            factor = _gradients.factor_of(norm, self.gradient_clipping(), divisor)
            _gradients.multiply(params, factor)
            self.optimizer.step()
            _state_access.forget_set(param for param in params if param.grad is not None)
            if self.client_optimizer is not None:
                # PyTorch's schedulers warn if the optimizer that they know makes no step.
                self.client_optimizer._opt_called = True  # type: ignore[attr-defined]
        self._backwards, self._is_scaled = 0, False
        self.optimizer.overflow = overflow
        self.optimizer.zero_grad(set_to_none=True)
        self._scale.update(overflow)
        self._step_applied = not overflow
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _takes_any(self) -> bool:
        """Returns whether a step is made even if its gradients are not finite."""
        return self.bfloat16_enabled() and not self._config.check_grad_overflow

    def was_step_applied(self) -> bool:
        """Returns whether the newest ``step()`` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the newest step's gradients before clipping, over all ranks."""
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

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Compiles the module with ``torch.compile``; DeepSpeed's other arguments have no
        effect."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Returns a loader of this rank's share of `dataset`, shuffled if `route` is "train"."""
        return loader_of(
            dataset,
            batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            rank=torch.distributed.get_rank(self._group),
            world_size=self.dp_world_size,
            drop_last=self.dataloader_drop_last(),
            shuffle=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=self._collate_fn if collate_fn is None else collate_fn,
            workers=num_local_io_workers,
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves what ``load_checkpoint()`` needs to continue; `client_state` is the script's own.

        All ranks that call this, with the same tag, write their parts. If some rank does not call
        it, rank 0 writes everything, unless parameters or state were changed since the newest step.
        Any number of ranks can load the checkpoint. An old checkpoint of the tag stays whole until
        the new one is. Errors: Unavailable if a rank failed.
        """
        _checkpoint.save(
            self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Returns the path that was loaded and its ``client_state``, or (None, None) without a
        ``latest``.

        All ranks call this and load the same save; to load the module alone, any rank may call it
        by itself, unless ranks have divided its parameters (stage 3). Load only checkpoints that you trust: a ``client_state`` may run code as it is
        read. Errors, on all ranks: DataLoss, which names the file, if a file is damaged;
        InvalidArgument if something is missing or does not fit. After these errors the optimizer
        keeps its old state, and so does the module unless it refused a value. After a later error,
        such as a full drive or a rank that has ended, the optimizer is closed, and its next step
        reports that.
        """
        return _loading.load(
            self,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the module's ``state_dict()``, in the types with which the model computes."""
        _checkpoint.save_16bit(self, Path(save_dir) / save_filename, exclude_frozen_parameters)
        return True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns True, because weights are always saved whole, whatever the configuration says."""
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Returns the module's ``state_dict()`` on the CPU on rank 0, and None on the others, which
        need not call it. Scripts and Accelerate call this by its private name. Errors: InvalidArgument
        below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise InvalidArgument(
                "_zero3_consolidated_16bit_state_dict(): zero_optimization.stage is "
                f"{self.zero_optimization_stage()}, and this call is for stage 3: call "
                "module_state_dict()"
            )
        if self.global_rank != 0:
            return None
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }

    def save_fp16_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Calls ``save_16bit_model()``, under its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def destroy(self) -> None:
        """Closes the optimizer and removes its state from the drive; training cannot continue
        afterwards."""
        if self.optimizer is not None and hasattr(self.optimizer, "close"):
            self.optimizer.close()
            _stage3_params.unmark(self.module.parameters())
        if self._directory is not None:
            self._directory.remove()
        self.monitor.close()


def _as_half(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if is_float else value
