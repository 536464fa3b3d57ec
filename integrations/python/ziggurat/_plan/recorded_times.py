# SPDX-License-Identifier: Apache-2.0
"""Records what a forward and a backward of a model do when, on a batch: which module with units is called for how long,
and when each parameter's gradient is there. The model is as it is without offload(), and stays as it was."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ziggurat._plan.recorded_step import Runs, tensors
from ziggurat._plan.times import BACKWARD, BEGIN, DONE, END, ENTER, GRADIENT, LEAVE, Happened, Times
from ziggurat._plan.unchanged import unchanged
from ziggurat._pytorch.tensors_in import tensors_in
from ziggurat._pytorch.torch_private import at_end_of_backward, backward_number, next_number, number_of
from ziggurat._units.units import Division

# A recording is one whose steps all do the same; the first ones make what a model keeps.
_WARM, _STEPS = 2, 5
_ADDED_BYTES = 64 << 20  # enough to leave the caches
# An update passes over the state of all parameters, after which caches have none of them: so many bytes of an element.
_STATE_BYTES, _STATE_BYTES_MAX = 12, 256 << 20


def recorded_times(model: torch.nn.Module, division: Division, run: Runs, batch: Any) -> Times:
    """Makes some steps, and returns the median of each part."""
    params = tuple(model.parameters())
    with unchanged(model, tensors(batch), _stand, lambda one: one.detach().clone()) as stands, torch.enable_grad():
        recorder = _Recorder(division, [stands[one] for one in params])
        found = [recorder.step(run, batch) for _ in range(_WARM + _STEPS)][_WARM:]
    names = [(one.what, one.of) for one in found[-1]]
    alike = [one for one in found if [(it.what, it.of) for it in one] == names]
    parts = zip(names, *alike, strict=True)
    happened = tuple(Happened(*name, statistics.median(one.seconds for one in those)) for name, *those in parts)
    return Times(happened, params, torch.get_num_threads(), *_rates(params))


def bytes_beside(model: torch.nn.Module) -> int:
    """Returns what recorded_times() takes beside parameters and activations."""
    params = list(model.parameters())
    copied = [*model.buffers(), *(one for one in params if one.requires_grad)]
    return sum(one.nbytes for one in copied) + max(_state_bytes(params), 2 * _ADDED_BYTES)


def _state_bytes(params: Sequence[torch.Tensor]) -> int:
    return min(_STATE_BYTES * sum(one.numel() for one in params), _STATE_BYTES_MAX)


def _stand(param: torch.Tensor) -> torch.Tensor:
    made = torch.nn.Parameter(param.data, param.requires_grad)
    vars(made).update(vars(param))
    return made


def _rates(params: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Returns what a byte takes of a gradient that is added, and of one whose norm is asked for."""
    dtype = max(params, key=lambda one: one.nbytes).dtype
    a, b = (torch.zeros(_ADDED_BYTES // dtype.itemsize, dtype=dtype) for _ in range(2))
    return _timed(lambda: a.add_(b)) / a.nbytes, _timed(lambda: torch.linalg.vector_norm(a)) / a.nbytes


def _timed(call: Callable[[], object]) -> float:
    took = []
    for _ in range(4):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return min(took[1:])


class _Recorder:
    """Notes what happens, by hooks on modules that are entries and on the graph that they make."""

    def __init__(self, division: Division, stands: Sequence[torch.Tensor]) -> None:
        self._notes: list[tuple[str, int, float]] = []
        self._entered: list[_Pass] = []
        self._begun: dict[int, list[_Pass]] = {}  # by backwards, which may run inside of others
        for number, entry in enumerate(division.entries):
            entry.module.register_forward_pre_hook(functools.partial(self._enter, number), with_kwargs=True)
            # Checkpointing ends a forward that is made again by an error, as soon as it has what it needs.
            entry.module.register_forward_hook(functools.partial(self._leave, number), always_call=True)
        for number, stand in enumerate(stands):
            if stand.requires_grad:
                stand.register_post_accumulate_grad_hook(functools.partial(self._arrived, number))
        self._stands = stands
        self._state = torch.zeros(_state_bytes(stands) // 4)

    def step(self, run: Runs, batch: Any) -> list[Happened]:
        for one in self._stands:
            one.grad = None
        self._notes, self._entered, self._begun = [], [], {}
        gc.collect()
        self._state.add_(1)
        begun = time.perf_counter()
        loss, output = run(batch)
        del output
        self._note(BACKWARD, 0)
        loss.backward()
        self._note(DONE, 0)
        times = [begun, *(at for _, _, at in self._notes)]
        return [Happened(what, of, at - before) for (what, of, at), before in zip(self._notes, times, strict=False)]

    def begun(self) -> list[_Pass]:
        """Returns what has begun in the backward that runs, which ends with it."""
        number = backward_number()
        found = self._begun.get(number)
        if found is None:
            found = self._begun[number] = []
            at_end_of_backward(functools.partial(_end_all, found))
        return found

    def _note(self, what: str, of: int) -> None:
        self._notes.append((what, of, time.perf_counter()))

    def _enter(self, number: int, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        use = _Pass(functools.partial(self._note, of=number), self.begun, module)
        made = [one.grad_fn for one in tensors_in((args, kwargs)) if one.grad_fn is not None]
        if made:
            newest: Any = max(made, key=number_of)
            newest.register_prehook(use.end)
        self._entered.append(use)
        self._note(ENTER, number)

    def _leave(self, number: int, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not self._entered or self._entered[-1].module is not module:
            return  # another hook has refused the call before
        self._note(LEAVE, number)
        use = self._entered.pop()
        use.last = next_number()
        for one in tensors_in(result):
            # A view that is written in place afterwards gets another node; its base's stays.
            for its in (one, one._base) if one._is_view() else (one,):
                node: Any = None if its is None else its.grad_fn
                if node is not None and number_of(node) >= use.first:
                    node.register_prehook(use.begin)

    def _arrived(self, number: int, param: torch.Tensor) -> None:
        self._note(GRADIENT, number)


class _Pass:
    """A call of a module, whose backward begins and ends as that of an offloaded one (_offload/passes.py)."""

    def __init__(self, note: Callable[[str], None], begun: Callable[[], list[_Pass]], module: torch.nn.Module) -> None:
        self._note, self._begun, self.module = note, begun, module
        self._among: list[_Pass] | None = None
        self.first = self.last = next_number()

    def begin(self, *_: Any) -> None:
        if self._among is not None:
            return
        among = self._begun()
        _end_all([one for one in among if one.first >= self.last])
        among.append(self)
        self._among = among
        self._note(BEGIN)

    def end(self, *_: Any) -> None:
        if self._among is not None:
            self._among.remove(self)
            self._among = None
            self._note(END)


def _end_all(passes: list[_Pass]) -> None:
    for one in list(passes):
        one.end()
