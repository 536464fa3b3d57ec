# SPDX-License-Identifier: Apache-2.0
"""Pins a model's units around each module's forward, and around its part of a backward.

A unit's module gets a made subclass, whose ``__call__`` pins around everything that the module's
own does: hooks, checkpointing, compiled code. Nothing is added to the graph, so sums of gradients
keep their order and with it their bits.

On the CPU backward runs what was made last first. So a hook on what made a unit's outputs comes
before all that reads the unit's parameters, and a hook on what made its newest input after. A unit
has also ended where one begins that ran before it, and all have where the backward ends, also by an
error.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ziggurat._activations.activations import Activations
from ziggurat._activations.casts import casting_again
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._memory.memory import free_bytes
from ziggurat._memory.placement import fits_half
from ziggurat._offload.accelerate import PREPARED
from ziggurat._offload.tokens import TokenCost
from ziggurat._pytorch import storages
from ziggurat._pytorch.subclass import OFFLOADED, reduced, subclass
from ziggurat._pytorch.tensors_in import tensors_in
from ziggurat._pytorch.torch_private import (
    at_end_of_backward,
    backward_number,
    in_backward,
    next_number,
    number_of,
    uncompiled,
)
from ziggurat._streaming.pins import PinnedUnit
from ziggurat._streaming.streaming import Streaming

_SHARD_BYTES = 2_000_000_000  # of a model that memory has no room for, which is what saving it takes


def enter_at_call(
    module: torch.nn.Module,
    streaming: Streaming,
    units: Sequence[PinnedUnit],
    opens: bool,
    stage: str | None = None,
    tokens: TokenCost | None = None,
    activations: Activations | None = None,
) -> None:
    """Makes calls of `module` pin `units`. `opens`: a call that trains may open the engine. `stage`:
    the module's name, if micro-batches can take turns at it. `tokens` is told of calls that may
    generate, and `activations` keeps what backward needs of calls that train."""
    module.__dict__[OFFLOADED] = _Around(
        streaming, list(units), opens, stage, tokens, activations
    )
    module.__class__ = _made(type(module))


@functools.cache
def _made(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns the subclass whose calls pin. Modules of a class share it, so that what is compiled
    for one serves the others."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[OFFLOADED](original.__call__, self, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if self.__dict__[OFFLOADED].streaming.has_values_here:
            return reduced(self, protocol)
        raise Unimplemented(
            f"an offloaded {original.__name__} cannot be pickled while its parameters are away: close() its "
            "optimizer before, pickle copy.deepcopy(model), which has all values, or save model.state_dict()"
        )

    def __copy__(self: Any) -> NoReturn:
        raise Unimplemented(
            f"an offloaded {original.__name__} cannot share its parameters with a copy (copy.copy), whose "
            "calls would not bring them: use copy.deepcopy()"
        )

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if hasattr(original, "__deepcopy__"):  # it copies what is added here too, which an error says
            return original.__deepcopy__(self, memo)
        with self.__dict__[OFFLOADED].streaming.copying_deeply():
            make, given, state, *_ = reduced(self, 4)
            memo[id(self)] = made = make(*given)
            made.__setstate__(copy.deepcopy(state, memo))
            return made

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__[OFFLOADED].streaming.copying():
            return original.state_dict(self, *args, **kwargs)

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign") or any(flag is True for flag in args[2:]):
            raise Unimplemented(
                f"load_state_dict(assign=True) would replace the parameters of an offloaded "
                f"{original.__name__}: leave assign out, so that it writes them"
            )
        with self.__dict__[OFFLOADED].streaming.loading():
            return original.load_state_dict(self, *args, **kwargs)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        streaming = self.__dict__[OFFLOADED].streaming
        if not kwargs.get("safe_serialization", True):
            return original.save_pretrained(self, *args, **kwargs)
        if "max_shard_size" in inspect.signature(original.save_pretrained).parameters:
            if not fits_half(streaming.size_bytes, free_bytes()):
                kwargs.setdefault("max_shard_size", _SHARD_BYTES)
        with streaming.copying_later():
            return original.save_pretrained(self, *args, **kwargs)

    members = {
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "__copy__": __copy__,
        "__deepcopy__": __deepcopy__,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "_is_accelerate_prepared": PREPARED,
    }
    # transformers 4 looks up the parameters of such models by names that they have in files alone.
    if _is_pretrained(original) and not getattr(original, "_checkpoint_conversion_mapping", None):
        members["save_pretrained"] = save_pretrained
    return subclass(original, members)


def _is_pretrained(original: type[torch.nn.Module]) -> bool:
    """Returns whether a class saves as transformers or PEFT do. Others may need values."""
    named = {(one.__module__.partition(".")[0], one.__name__) for one in original.__mro__}
    return not named.isdisjoint({("transformers", "PreTrainedModel"), ("peft", "PeftModel")})


class _Around:
    """Runs a unit's module with its units pinned."""

    def __init__(
        self,
        streaming: Streaming,
        units: list[PinnedUnit],
        opens: bool,
        stage: str | None,
        tokens: TokenCost | None,
        activations: Activations | None,
    ) -> None:
        self.streaming, self._units, self._opens = streaming, units, opens
        self.stage, self._tokens, self._activations = stage, tokens, activations

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unimplemented(
            "an offloaded model whose class copies itself, as one of torch.fx does, cannot be copied: copy it "
            "before offload(), or load its state_dict() into a new one"
        )

    def __call__(self, call: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._opens and (torch.is_grad_enabled() or self.streaming.accelerator is not None):
            self.streaming.open()
        if self.streaming.accelerator is not None:
            self.streaming.compute_there()
        if self._tokens is None:
            return self._saved(call, module, args, kwargs)
        # What a forward that trains computes without gradients, as of a frozen tower, is a part of it.
        if self.streaming.calls == 0:
            self.streaming.passes(torch.is_grad_enabled())
        self.streaming.calls += 1
        try:
            return self._saved(call, module, args, kwargs)
        finally:
            self.streaming.calls -= 1

    def _saved(self, call: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._activations is not None and torch.is_grad_enabled():
            with self._activations.kept():
                return self._pinned(call, module, args, kwargs)
        return self._pinned(call, module, args, kwargs)

    def _pinned(self, call: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside():
            if not torch.compiler.is_compiling():
                self.streaming.require_thread(self._units)
            return call(module, *args, **kwargs)
        use, trains = None, False
        pinned: list[PinnedUnit] = []
        counted = 0
        try:
            use = self._enter(module, (args, kwargs), pinned)
            trains = use is not None
            for unit in self._units:
                unit.forwards += 1
                unit.trained_forwards += trains
                counted += 1
            if trains and torch.is_autocast_enabled(self.streaming.device.type):
                with casting_again(self._trained()):
                    result = call(module, *args, **kwargs)
            else:
                result = call(module, *args, **kwargs)
            if use is not None:
                self._watch(use, result)
        except RuntimeError as error:
            if storages.is_refusal(error):
                raise InvalidArgument(self._stray()) from error
            raise
        finally:
            for unit in self._units[:counted]:
                unit.forwards -= 1
                unit.trained_forwards -= trains
            if torch.is_autocast_enabled(self.streaming.device.type):
                torch.clear_autocast_cache()  # which keeps copies of all that was used, until autocast ends
            self.streaming.unpin(pinned)
        return result

    def _is_inside(self) -> bool:
        """Returns whether a forward around this one has pinned the units, and its backward will."""
        if torch.is_grad_enabled():
            return all(unit.trained_forwards for unit in self._units)
        return all(unit.forwards for unit in self._units)

    @uncompiled
    def _enter(self, module: Any, given: Any, pinned: list[PinnedUnit]) -> _Use | None:
        use = None
        if torch.jit.is_tracing():
            self._require_there(module)
        self.streaming.wait_for_turn(self.stage, self._units)
        if in_backward():
            self.streaming.recomputes = True
        if torch.is_grad_enabled():
            if torch.is_autocast_enabled(self.streaming.device.type):
                self._warn_of_casts(module)
            use = _Use(self.streaming, self._units, self.stage)
            made = [tensor.grad_fn for tensor in tensors_in(given) if tensor.grad_fn is not None]
            if made:
                newest: Any = max(made, key=number_of)
                newest.register_prehook(use.end)
        elif self._tokens is not None:
            self._tokens.forward_begins(given[1], self.streaming)
        self.streaming.pin(self._units, pinned, exact=False)
        if self.streaming.tables_in_files:
            self.streaming.expect_rows(self._units, tensors_in(given))
        return use

    def _require_there(self, module: Any) -> None:
        """Errors: Unimplemented if a trace would record how parameters are brought."""
        away = [unit.name for unit in self._units if unit.comes and not unit.pins]
        if away and not self.streaming.has_values_here:
            raise Unimplemented(
                f"torch.jit.trace of an offloaded {type(module).__name__} would record how its unit '{away[0]}', which "
                "is away, is brought: trace copy.deepcopy(model), which has all values, or the model before its first "
                "forward that trains"
            )

    def _trained(self) -> set[torch.Tensor]:
        all_held = (held for unit in self._units for held in unit.all_held)
        return {held.param for held in all_held if held.param.requires_grad}

    def _warn_of_casts(self, module: torch.nn.Module) -> None:
        """Warns of casts that casting_again() does not see: in compiled code, and of parameters that
        have no gradient."""
        compiled = module._compiled_call_impl is not None
        all_held = (held for unit in self._units for held in unit.all_held)
        # Vectors are added and multiplied in fp32.
        wide = (one for one in all_held if not one.unit.unit.tiles and one.param.dtype == torch.float32 and one.param.dim() > 1)
        kept = next((one for one in wide if compiled or not one.param.requires_grad), None)
        if kept is not None and not self.streaming.warned_of_casts:
            self.streaming.warned_of_casts = True
            warnings.warn(
                f"parameter '{kept.name}' is fp32 and {'in compiled code' if compiled else 'frozen'}, "
                "and autocast keeps a 16-bit copy of all such parameters until backward, beyond the "
                "memory that offload() was given: put them into 16 bits before, with .bfloat16(); of "
                "trained ones the optimizer keeps fp32 masters",
                stacklevel=4,
            )

    @uncompiled
    def _watch(self, use: _Use, result: Any) -> None:
        use.last = next_number()
        for tensor in tensors_in(result):
            node: Any = tensor.grad_fn
            # An input that is returned as it is was not made here.
            if node is not None and number_of(node) >= use.first:
                node.register_prehook(use.begin)
            # A view that is written in place afterwards gets another node; its base's stays.
            base: Any = tensor._base.grad_fn if tensor._is_view() else None
            if base is not None and number_of(base) >= use.first:
                base.register_prehook(use.begin)

    def _stray(self) -> str:
        names = ", ".join(f"'{unit.name}'" for unit in self._units)
        return (
            f"the module of {'units' if len(self._units) > 1 else 'unit'} {names} has used a "
            "parameter of another unit, which is away: give offload() units in which both are "
            "together, and keep no alias of a parameter, such as p.detach()"
        )


class _Use:
    """One forward of a module: its backward pins the units from the first use to the last."""

    def __init__(
        self, streaming: Streaming, units: list[PinnedUnit], stage: str | None
    ) -> None:
        self._streaming, self._units, self._stage = streaming, units, stage
        self._in: _Backward | None = None
        # The numbers of the nodes that the forward has made are from `first` to below `last`.
        self.first = next_number()
        self.last = self.first

    def begin(self, *_: Any) -> None:
        if self._in is None:
            backward = self._backward()
            backward.end_after(self.last)
            self._streaming.wait_for_turn(self._stage, self._units)
            self._streaming.pin_for_backward(self._units)
            self._in = backward
            backward.uses.add(self)
        if torch.is_grad_enabled():  # create_graph: another backward reads the parameters
            self._streaming.until_step(self._units)

    def end(self, *_: Any) -> None:
        if self._in is not None:
            self._in.uses.discard(self)
            self._in = None
            self._streaming.unpin(self._units)

    def _backward(self) -> _Backward:
        task, known = backward_number(), self._streaming.backwards
        backward: _Backward | None = known.get(task)
        if backward is None:
            self._streaming.passes(True)
            backward = known[task] = _Backward()
            at_end_of_backward(_AtEnd(backward, self._streaming))
        return backward


class _Backward:
    """The uses in one backward."""

    def __init__(self) -> None:
        self.uses: set[_Use] = set()

    def end_after(self, last: int) -> None:
        """Ends the uses all of whose nodes come after number `last`, and so before it in here."""
        for use in [one for one in self.uses if one.first >= last]:
            use.end()

    def end(self) -> None:
        for use in list(self.uses):
            use.end()


class _AtEnd:
    """Ends the uses when PyTorch calls it at the end of a backward. Nothing is called if an error
    ends the backward; then PyTorch drops this, which nobody else has."""

    def __init__(self, backward: _Backward, streaming: Streaming) -> None:
        self._backward, self._streaming = backward, streaming
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._backward.end()

    def __del__(self) -> None:
        self._backward.end()
        if not self._called:
            self._streaming.let_kept_go()


def stages_in(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Returns the modules at which micro-batches take turns, and their names."""
    around = ((module, module.__dict__.get(OFFLOADED)) for module in model.modules())
    return {module: its.stage for module, its in around if its is not None and its.stage is not None}
