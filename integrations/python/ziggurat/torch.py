# SPDX-License-Identifier: Apache-2.0
"""Optimizers for PyTorch whose state is the engine's: masters and moments in host memory or on NVMe.

    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement="nvme:/fast/run")
    for batch in loader:
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

All of them take, beside what PyTorch's have:

``placement``
    ``"host"``, or ``"nvme:/path"``: a directory for the state, in which every finished step is durable.
``state_format``
    How masters and moments are held: "fp32", "bf16-moments", "8bit", "split" or "bf16".
``threads``
    Workers; 0: this process's share of the machine.
``host_memory``
    Budget in bytes, or text like "2GiB"; as much as a run uses well if not given.

The state is made from the parameters at the first ``step()``. ``state_dict()`` has the groups; the
state itself stays where it is.

Gradients are read and parameters written where PyTorch has them: nothing is copied. A parameter
without a gradient is left alone, as PyTorch does. For now: parameters on the CPU; ``step()`` returns
when all new parameters are there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ziggurat._native import Engine, GroupStep, InvalidArgument, Param, Runtime, Unimplemented

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _where(placement: str) -> tuple[str, str | None]:
    """The tier, and the directory that was named."""
    if placement == "host":
        return "host", None
    tier, _, path = placement.partition(":")
    if tier == "nvme" and path:
        return "nvme", path
    raise InvalidArgument(f'placement="{placement}": "host", or "nvme:/path" with a directory')


def _close(engine: Engine, runtime: Runtime) -> None:
    engine.close()
    runtime.close()


class _Opened:
    """The engine of an optimizer's parameters, from its first step on."""

    def __init__(self, groups: list[dict[str, Any]], tier: str, path: str | None, **settings: Any):
        self.params: list[torch.Tensor] = []
        described: list[Param] = []
        for index, group in enumerate(groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                if not param.requires_grad:
                    continue
                name = names[i] if names else f"group{index}.{i}"
                self.params.append(param)
                described.append(_described(param, name, index))
        self.names = [param.name for param in described]
        # As the engine left them: a parameter that differs was written or moved by somebody else.
        self._versions = [param._version for param in self.params]
        self._addresses = [param.data_ptr() for param in self.params]
        self._lent: list[torch.Tensor | None] = [None] * len(self.params)
        runtime = Runtime(settings.pop("threads"))
        settings |= {"placement": f"optimizer={tier}", "resume": "new"}
        if path is not None:
            settings["store"] = path
        try:
            self.engine = Engine(runtime, described, settings)
        except BaseException:
            runtime.close()
            raise
        self.close = weakref.finalize(self, _close, self.engine, runtime)

    def step(self, groups: list[GroupStep]) -> None:
        # All are looked at before the first is given: a step that is refused has given nothing.
        gradients = [_gradient(p, name) for p, name in zip(self.params, self.names, strict=True)]
        if all(gradient is None for gradient in gradients):
            return
        self._look_at_params()
        self.engine.discard_gradients()
        self._lent = gradients
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.engine.lend_gradient(
                    index, _DTYPES[gradient.dtype], gradient.data_ptr(), gradient.numel()
                )
        self.engine.step(groups)
        self.engine.wait()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                torch.autograd.graph.increment_version(self.params[index])
                self._versions[index] = self.params[index]._version
        self._lent = [None] * len(self.params)

    def _look_at_params(self) -> None:
        for index, param in enumerate(self.params):
            address = param.data_ptr()
            if address != self._addresses[index]:
                described = _described(param, self.names[index], 0)
                self.engine.lend_param(index, described.dtype, address, described.count)
                self._addresses[index] = address
            elif param._version == self._versions[index]:
                continue
            self.engine.param_written(index)
            self._versions[index] = param._version


def _gradient(param: torch.Tensor, name: str) -> torch.Tensor | None:
    if param.grad is None:
        return None
    if param.grad.is_sparse:
        raise Unimplemented(f"parameter '{name}' has a sparse gradient")
    return param.grad.contiguous()


def _described(param: torch.Tensor, name: str, group: int) -> Param:
    if param.device.type != "cpu":
        raise Unimplemented(f"parameter '{name}' is on {param.device}: not built yet")
    if param.dtype not in _DTYPES:
        raise InvalidArgument(f"parameter '{name}' is {param.dtype}: fp32, bf16 and fp16 are known")
    if not param.is_contiguous():
        raise InvalidArgument(f"parameter '{name}' is not contiguous: call .contiguous() before")
    return Param(name, tuple(param.shape), _DTYPES[param.dtype], param.data_ptr(), group)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise Unimplemented(f"{what} is not built yet")


class _EngineOptimizer(torch.optim.Optimizer):
    """What the optimizers share: all but the meaning of a group's settings."""

    _kind: str

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        placement: str = "host",
        state_format: str = "fp32",
        threads: int = 0,
        host_memory: int | str | None = None,
        maximize: bool = False,
        **flags: Any,
    ) -> None:
        _need(not maximize, "maximize")
        for flag, value in flags.items():
            if flag not in ("foreach", "fused", "capturable", "differentiable"):
                raise TypeError(f"{type(self).__name__}() has no argument '{flag}'")
            if value:
                warnings.warn(f"{flag}={value} changes nothing: the engine updates", stacklevel=3)
        self._tier, self._path = _where(placement)
        self._settings: dict[str, Any] = {"state_format": state_format, "threads": threads}
        if host_memory is not None:
            self._settings["host_memory"] = host_memory
        self._opened: _Opened | None = None
        super().__init__(params, defaults)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        """The engine's settings of `group` in this step: what it has, by its PyTorch name."""
        step = GroupStep(lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))
        if "betas" in group:
            step = replace(step, betas=(float(group["betas"][0]), float(group["betas"][1])))
        if "eps" in group:
            step = replace(step, eps=float(group["eps"]))
        return step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _need(getattr(self, "_opened", None) is None, "add_param_group() after the first step()")
        super().add_param_group(param_group)

    @property
    def engine(self) -> Engine | None:
        """From the first ``step()`` on."""
        return self._opened.engine if self._opened else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._opened is None:
            self._opened = _Opened(
                self.param_groups, self._tier, self._path, optimizer=self._kind, **self._settings
            )
        self._opened.step([self._group_step(group) for group in self.param_groups])
        return loss

    def close(self) -> None:
        """Waits until every step is durable, and lets the engine go; also at exit, unwaited."""
        if self._opened is not None:
            if self._path is not None:
                self._opened.engine.make_durable()
            self._opened.close()
            self._opened = None


class AdamW(_EngineOptimizer):
    """AdamW (Loshchilov & Hutter 2019), as ``torch.optim.AdamW`` has it, with fp32 masters."""

    _kind = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **where: Any,
    ) -> None:
        _need(not amsgrad, "amsgrad")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **where)


class Adam(AdamW):
    """Adam (Kingma & Ba 2015), as ``torch.optim.Adam``: decay is added to the gradient."""

    _kind = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **where: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **where)


class Lion(_EngineOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2)."""

    _kind = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **where: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **where)


class Adagrad(_EngineOptimizer):
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad``."""

    _kind = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **where: Any,
    ) -> None:
        _need(initial_accumulator_value == 0, "initial_accumulator_value")
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults, **where)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        return replace(super()._group_step(group), lr_decay=float(group["lr_decay"]))


class SGD(_EngineOptimizer):
    """Gradient descent with momentum, as ``torch.optim.SGD``."""

    _kind = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **where: Any,
    ) -> None:
        _need(dampening == 0, "dampening")
        _need(not nesterov, "nesterov")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, **where)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        return replace(super()._group_step(group), betas=(float(group["momentum"]), 0.0))
