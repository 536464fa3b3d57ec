# SPDX-License-Identifier: Apache-2.0
"""Pins a model's units around each module's forward, and around its part of a backward.

A unit's module gets a made subclass, whose ``__call__`` pins around everything that the module's
own does: hooks, checkpointing, compiled code. In backward a hook on what made the outputs pins, and
an identity function on the inputs, whose gradients come last, unpins. What has no such input is let
go when that backward ends, also by an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from ziggurat._native import InvalidArgument, Unimplemented
from ziggurat._streaming import PinnedUnit, Streaming


def enter_at_call(
    module: torch.nn.Module, streaming: Streaming, units: Sequence[PinnedUnit], opens: bool
) -> None:
    """Makes calls of `module` pin `units`. `opens`: a call that trains may open the engine."""
    around = _Around(streaming, list(units), opens)
    original = type(module)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original.__call__, self, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        raise Unimplemented(
            f"an offloaded {original.__name__} cannot be copied or pickled, because an engine has "
            "its parameters: copy it before offload(), or save what gathered() brings"
        )

    module.__class__ = type(
        original.__name__,
        (original,),
        {
            "__call__": __call__,
            "__reduce_ex__": __reduce_ex__,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        },
    )


class _Around:
    """Runs a unit's module with its units pinned."""

    def __init__(self, streaming: Streaming, units: list[PinnedUnit], opens: bool) -> None:
        self._streaming, self._units, self._opens = streaming, units, opens
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = _backwards_of(streaming)

    def __call__(self, call: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._opens and torch.is_grad_enabled():
            self._streaming.open()
        if not self._streaming.needs_pins():
            return call(module, *args, **kwargs)
        use, args, kwargs = self._enter(args, kwargs)
        try:
            result = call(module, *args, **kwargs)
            if use is not None:
                self._watch(use, result)
        except RuntimeError as error:
            if "Cannot access data pointer" in str(error):
                raise InvalidArgument(self._stray()) from error
            raise
        finally:
            self._streaming.unpin(self._units)
        return result

    @torch._disable_dynamo  # type: ignore[misc]
    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Use | None, tuple[Any, ...], dict[str, Any]]:
        self._streaming.pin(self._units)
        if not torch.is_grad_enabled():
            return None, args, kwargs
        try:
            use = _Use(self._streaming, self._units, self._backwards)
            found = list(_trained_tensors((args, kwargs)))
            if found:
                marked = iter(_Last.apply(use, *found))  # type: ignore[no-untyped-call]
                args, kwargs = _replaced((args, kwargs), marked)
        except BaseException:
            self._streaming.unpin(self._units)
            raise
        return use, args, kwargs

    @torch._disable_dynamo  # type: ignore[misc]
    def _watch(self, use: _Use, result: Any) -> None:
        for tensor in _trained_tensors(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(use.begin)

    def _stray(self) -> str:
        names = ", ".join(f"'{unit.name}'" for unit in self._units)
        return (
            f"the module of {'units' if len(self._units) > 1 else 'unit'} {names} has used a "
            "parameter of another unit, which is away: give offload() units in which both are "
            "together"
        )


class _Use:
    """One forward of a module: its backward pins the units from the first use to the last."""

    def __init__(
        self,
        streaming: Streaming,
        units: list[PinnedUnit],
        backwards: weakref.WeakValueDictionary[int, _Backward],
    ) -> None:
        self._streaming, self._units, self._backwards = streaming, units, backwards
        self._in: _Backward | None = None

    def begin(self, *_: Any) -> None:
        if self._in is None:
            backward = self._backward()
            self._streaming.pin(self._units)
            self._in = backward
            backward.uses.add(self)
        if torch.is_grad_enabled():  # create_graph: another backward reads the parameters
            self._streaming.until_step(self._units)

    def end(self) -> None:
        if self._in is not None:
            self._in.uses.discard(self)
            self._in = None
            self._streaming.unpin(self._units)

    def _backward(self) -> _Backward:
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            backward = self._backwards[task] = _Backward()
            torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(backward))  # type: ignore[attr-defined]
        return backward


class _Backward:
    """The uses in one backward."""

    def __init__(self) -> None:
        self.uses: set[_Use] = set()

    def end(self) -> None:
        for use in list(self.uses):
            use.end()


class _AtEnd:
    """Ends the uses when PyTorch calls it at the end of a backward. Nothing is called if an error
    ends the backward; then PyTorch drops this, which nobody else has."""

    def __init__(self, backward: _Backward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        self._backward.end()

    def __del__(self) -> None:
        self._backward.end()


class _Last(torch.autograd.Function):
    """Returns its inputs. Its backward comes after those of all that was made of them."""

    @staticmethod
    def forward(use: _Use, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.use = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.use.end()
        return (None, *grads)


_all_backwards: weakref.WeakKeyDictionary[Streaming, Any] = weakref.WeakKeyDictionary()


def _backwards_of(streaming: Streaming) -> Any:
    return _all_backwards.setdefault(streaming, weakref.WeakValueDictionary())


def _trained_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of arguments or results through which gradients go."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _trained_tensors(one)
    elif isinstance(value, dict):
        yield from _trained_tensors(list(value.values()))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _trained_tensors(list(vars(value).values()))


def _replaced(value: Any, marked: Iterator[torch.Tensor]) -> Any:
    """Returns arguments with the tensors of _trained_tensors() replaced, in the same order."""
    if isinstance(value, torch.Tensor):
        return next(marked) if value.requires_grad else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(one, marked) for one in value))
    if type(value) in (list, tuple):
        return type(value)(_replaced(one, marked) for one in value)
    if type(value) is dict:
        return {key: _replaced(one, marked) for key, one in value.items()}
    # An object of another class stays as it is; its tensors are let go at the end of backward.
    for _ in _trained_tensors(value):
        next(marked)
    return value
