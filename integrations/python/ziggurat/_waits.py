# SPDX-License-Identifier: Apache-2.0
"""Where a model's forward waits for new parameters: before each module, for those it has itself.

Not every use of a parameter is in the forward of the module that has it (``nn.MultiheadAttention``
uses its ``out_proj`` without calling it), and hooks are no part of what ``torch.compile`` runs. So
the first step, in which nothing is pending, shows which parameters were seen by a hook before their
gradient came; all others are waited for in ``step()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch


class ModuleWaits:
    """Calls ``wait(parameters)`` before each use that a hook can see, for those of `params`."""

    def __init__(
        self,
        model: torch.nn.Module,
        params: Set[torch.Tensor],
        wait: Callable[[Iterable[torch.Tensor]], None],
        synchronize: Callable[[], None],
    ) -> None:
        self._wait = wait
        self._seen: set[torch.Tensor] = set()  # in the forward of the step under way
        self._learned: set[torch.Tensor] | None = None  # seen before every gradient
        self._handles: list[Any] = []
        this = weakref.ref(self)
        for module in model.modules():
            compiled = hasattr(module, "_orig_mod")  # what torch.compile() gives
            own = [p for p in module.parameters(recurse=compiled) if p in params]
            if module._compiled_call_impl is not None:
                self._wait_at_entry(module, params)
            if own:
                hook = _before_forward(this, own)
                self._handles.append(module.register_forward_pre_hook(hook))
        saved = weakref.WeakMethod(synchronize)  # type: ignore[arg-type]
        self._handles.append(model.register_state_dict_pre_hook(_before_state_dict(saved)))

    def _wait_at_entry(self, module: torch.nn.Module, params: Set[torch.Tensor]) -> None:
        """``module.compile()`` was called: all that is in it is waited for before it runs."""
        inside = [p for p in module.parameters() if p in params]
        compiled, this = module._compiled_call_impl, weakref.ref(self)

        def call(*args: Any, **kwargs: Any) -> Any:
            waits = this()
            if waits is not None:
                waits.before_use(inside)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = call

    def before_use(self, params: list[torch.Tensor]) -> None:
        self._seen.update(params)
        self._wait(params)

    def unseen(self, with_gradient: list[torch.Tensor]) -> list[torch.Tensor]:
        """At a step: of the parameters that have a gradient, those to wait for in the step itself."""
        if self._learned is None:
            self._learned = self._seen & set(with_gradient)
        else:
            # One that a hook saw in the first step, and in this one did not, may be used without.
            self._learned -= set(with_gradient) - self._seen
        self._seen = set()
        return [param for param in with_gradient if param not in self._learned]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _before_forward(this: weakref.ref[ModuleWaits], own: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any) -> None:
        # Inside a compiled region there is no waiting: it was done at the entry, or in step().
        if torch.compiler.is_compiling():
            return
        waits = this()
        if waits is not None:
            waits.before_use(own)

    return hook


def _before_state_dict(synchronize: weakref.WeakMethod[Any]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        call = synchronize()
        if call is not None:
            call()

    return hook
