# SPDX-License-Identifier: Apache-2.0
"""Makes a model's forward wait for new parameters: before each module, for the module's own.

A parameter may be used outside the forward of the module that has it (``nn.MultiheadAttention``
uses its ``out_proj`` without calling it), and ``torch.compile`` does not run hooks. The first
step, in which nothing is pending, therefore shows which parameters a hook saw before any operation
used them; ``step()`` itself waits for all others. A model may avoid the hooks only from a later
step on (because it is compiled then): that is found when the gradient comes, and raises. One case
is not found: a later forward that first uses a parameter itself and then calls its module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from ziggurat._exchange.fsdp import FsdpUnits
from ziggurat._pytorch.dtensor import is_dtensor

# Operations that do not read a parameter's values.
_NO_VALUES = {
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_meta", "layout", "ndim", "requires_grad", "shape")
} | {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel, torch.Tensor.size}


class ModuleWaits:
    """Calls ``wait(parameters)`` before each use that a hook can see of one of `params`."""

    def __init__(
        self,
        model: torch.nn.Module,
        params: Set[torch.Tensor],
        wait: Callable[[Iterable[torch.Tensor]], None],
        synchronize: Callable[[], None],
    ) -> None:
        self.params = params
        self.synchronize = synchronize
        self._wait = wait
        self._gathered: set[torch.Tensor] = set()  # parameters waited for before FSDP2 gathers them
        self._seen: set[torch.Tensor] = set()  # parameters seen in the current step's forward
        self._learned: set[torch.Tensor] | None = None  # parameters that hooks saw before every use
        # parameters waited for before a compiled module runs
        self._at_entry: set[torch.Tensor] = set()
        self._outside: set[torch.Tensor] = set()  # parameters used where no hook had seen them
        # notes uses in the outermost module's call, in the first step
        self._uses: _Uses | None = None
        self._handles: list[Any] = []
        self._modules = list(model.modules())
        this = weakref.ref(self)
        self._units = FsdpUnits(model) if any(map(is_dtensor, params)) else None
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            compiled = hasattr(module, "_orig_mod")  # torch.compile() makes such modules
            own = [p for p in module.parameters(recurse=compiled) if p in params]
            if self._units is not None:
                gathered = [p for p in self._units.of(module) if p in params]
                # FSDP2 reads shards in hooks of its own, where no use of a parameter is seen.
                self._gathered.update(gathered)
                own = [*(p for p in own if not is_dtensor(p)), *gathered]
            if compiled:
                self._at_entry.update(own)
            # This hook runs first, because other hooks may compute weights from parameters.
            before = _BeforeForward(this, own)
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True),
                module.register_state_dict_pre_hook(_BeforeState(this)),
                _before_load(module, _BeforeState(this)),
            ]
        self._wait_at_entries()

    def _wait_at_entries(self) -> None:
        """Makes each module on which ``module.compile()`` was called wait for all its parameters
        before it runs."""
        for module in self._modules:
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is not None and not isinstance(compiled, _Entry):
                inside = [p for p in module.parameters() if p in self.params]
                self._at_entry.update(inside)
                module._compiled_call_impl = _Entry(weakref.ref(self), inside, compiled)

    def before_use(self, params: Sequence[torch.Tensor]) -> None:
        self._seen.update(params)
        if self._uses is not None:
            self._uses.seen.update(params)
        self._wait(params)

    def before_call(self, module: torch.nn.Module) -> None:
        if self._units is not None:
            self._wait(self._units.prefetched(module))
        if not (module.training or torch.is_grad_enabled()):
            # Fused inference (in nn.TransformerEncoderLayer) calls no submodule, and no gradient
            # would show that.
            self.synchronize()
        elif self._learned is None and self._uses is None and not self._at_entry:
            self._uses = uses = _Uses(self.params, self._outside)
            uses.__enter__()

            def after(*_: Any) -> None:
                handle.remove()
                self._uses = None
                uses.__exit__(None, None, None)

            handle = module.register_forward_hook(after, always_call=True)

    def compiled(self, params: Sequence[torch.Tensor]) -> None:
        """Called once while code that uses `params` is compiled, not when it runs."""
        self._wait(params)
        self._outside.update(param for param in params if param not in self._at_entry)

    def unseen(self, with_gradient: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns at a step which of the parameters with a gradient the step itself must wait
        for."""
        self._wait_at_entries()
        if self._learned is None:
            # A model with compiled modules notes no uses: only parameters that were waited for at the
            # entry of a compiled module are known to be safe.
            seen = self._seen & self._at_entry if self._at_entry else self._seen
            self._learned = seen & set(with_gradient)
        else:
            # A parameter that a hook saw in the first step but not in this one may be used without
            # its hook.
            self._learned -= set(with_gradient) - self._seen
        self._learned -= self._outside
        self._seen = set()
        waited_for = self._learned | self._gathered
        return [param for param in with_gradient if param not in waited_for]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _before_load(module: torch.nn.Module, hook: Callable[..., None]) -> Any:
    if hasattr(module, "register_load_state_dict_pre_hook"):
        return module.register_load_state_dict_pre_hook(hook)
    return module._register_load_state_dict_pre_hook(hook, with_module=True)  # PyTorch 2.4


class _Uses(TorchFunctionMode):
    """Notes the parameters that an operation uses before a hook has seen them."""

    def __init__(self, params: Set[torch.Tensor], outside: set[torch.Tensor]) -> None:
        super().__init__()
        self.seen: set[torch.Tensor] = set()
        self._params = params
        self._outside = outside

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in _NO_VALUES:
            for value in tree_iter((args, kwargs)):
                if isinstance(value, torch.Tensor) and value in self._params - self.seen:
                    self._outside.add(value)
        return func(*args, **kwargs)


class _Entry:
    """Takes the place of a compiled module's call, and waits first."""

    def __init__(
        self, waits: weakref.ref[ModuleWaits], inside: Sequence[torch.Tensor], compiled: Any
    ) -> None:
        self._waits, self._inside, self._compiled = waits, inside, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waits = self._waits()
        if waits is not None:
            waits.before_use(self._inside)
        return self._compiled(*args, **kwargs)


class _Hook:
    """A hook that does nothing once it is copied or saved with its model, because the copy has no
    optimizer."""

    def __init__(self, waits: weakref.ref[ModuleWaits]) -> None:
        self._waits = waits

    def _synchronize(self) -> None:
        waits = self._waits()
        if waits is not None:
            waits.synchronize()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self._synchronize()
        return _nothing

    def __reduce__(self) -> Any:
        # The file gets the parameters after everything else.
        self._synchronize()
        return _the_nothing, ()


def _nothing(*_: Any) -> None:
    pass


def _the_nothing() -> Callable[..., None]:
    return _nothing


class _BeforeForward(_Hook):
    def __init__(self, waits: weakref.ref[ModuleWaits], own: Sequence[torch.Tensor]) -> None:
        super().__init__(waits)
        self._own = own

        @torch.compiler.assume_constant_result
        def compiled() -> int:
            there = waits()
            if there is not None:
                there.compiled(own)
            return 0

        self._compiled = compiled

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled()
            return
        waits = self._waits()
        if waits is not None:
            waits.before_call(module)
            waits.before_use(self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        super().__deepcopy__(memo)
        for param in self._own:  # a module's parameters are copied before its hooks
            if id(param) in memo:
                memo[id(param)].data.copy_(param.data)
        return _nothing


class _BeforeState(_Hook):
    def __call__(self, *_: Any) -> None:
        self._synchronize()
