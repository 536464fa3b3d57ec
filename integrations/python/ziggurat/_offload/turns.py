# SPDX-License-Identifier: Apache-2.0
"""Lets the passes of several micro-batches through one model take turns, unit by unit.

Each micro-batch has a thread, because its forward and its backward stop in the middle of a module's
call and of PyTorch's engine. One thread runs at a time. It hands on where it comes to a unit's
module, in forward or in backward, and goes on when all others have come there too: always the
micro-batch that is the least far, and of those the first. So a unit is brought once for all of them,
and gradients are added in the order of the micro-batches.

Their calls of the engine come from the thread that runs all this, because the engine would wait for ever
for what a thread holds that waits for its turn.

What is one for all threads, but belongs to a pass, is exchanged with each turn: the states of
PyTorch's generators, and the units' counts of forwards. What PyTorch has for each thread is as it is
in the caller's, and so is the stream of an accelerator.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._memory.loose_memory import loose
from ziggurat._offload.attributes import Attributes, Kept
from ziggurat._offload.served import Served
from ziggurat._pytorch.torch_private import (
    dispatch_modes,
    function_mode,
    function_modes,
    in_backward,
    saved_tensors_hooks,
)
from ziggurat._streaming.pins import PinnedUnit
from ziggurat._streaming.streaming import Streaming

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator


class Turns:
    """The passes of `count` micro-batches, of which at least one, through a model."""

    def __init__(self, streaming: Streaming, count: int, attributes: Attributes) -> None:
        self._streaming, self._sums, self._attributes = streaming, streaming.sums, attributes
        accelerator = streaming.accelerator
        self._generators: list[_Generator] = [_OfCpu()] if accelerator is None else [_OfCpu(), accelerator]
        every = zip(*(_draws(count, one) for one in self._generators), strict=True)
        self._lanes = [_Lane(index, list(draws), self._generators) for index, draws in enumerate(every)]
        self._running = self._lanes[0]
        self._surroundings = _Surroundings(accelerator)
        self._contexts = [contextvars.copy_context() for _ in self._lanes]
        # The stages in the order in which the first micro-batch came to them, which is the first at
        # each: the module's name, and whether it was in backward.
        self._order: list[tuple[str, bool]] = []
        self._held: list[PinnedUnit] = []  # until all micro-batches have left the stage
        self._held_for = 0  # its number
        self._left: Kept = {}  # by the first micro-batch, in its turn at the stage
        self._error: BaseException | None = None  # the first, which ends all passes
        self._begun = False
        self._ended = False
        self.served = Served()  #: for calls of the engine by the micro-batches' threads

    def run(self, one: Callable[[int], None]) -> None:
        """Calls `one` with the number of each micro-batch, and returns when all have returned.

        Errors: the first that one of them has raised, or that a signal raises here meanwhile. All
        others have then ended too."""
        self._one = one
        first = self._lanes[0]
        first.thread = self._thread(first)
        try:
            first.turn.release()
            first.thread.start()
        except BaseException as error:
            self._fail(error)
        serving = True
        while serving:
            try:
                # A thread that has not begun does nothing after an error.
                serving = not self._ended and (self._begun or self._error is None)
                if serving:
                    self.served.serve()
            except BaseException as error:  # Ctrl-C: all end at the next unit
                self._fail(error)
        self._ended = True
        failed, self._error = self._error, None
        if failed is not None:
            raise failed

    # -- in the micro-batches' threads

    def arrive(self, stage: str, units: Sequence[PinnedUnit]) -> None:
        """Returns when it is the micro-batch's turn at the stage. Its units are then pinned, and stay
        so until all have left it.

        Errors: InvalidArgument where micro-batches come to stages in different orders, or twice to
        one."""
        lane = self._running
        if lane.thread is not threading.current_thread():
            raise InvalidArgument(
                f"module '{stage}' was called in another thread while micro_batches() runs: use an "
                "offloaded model in one thread at a time"
            )
        self._check()
        backward = in_backward()
        # The backward of what checkpointing has just computed again; and the last unit's comes at once,
        # so that there are outputs of one micro-batch only.
        if backward and stage == lane.stage:
            return
        if not backward and stage in lane.visited:
            raise InvalidArgument(
                f"module '{stage}' was called twice in micro-batch {lane.index}: micro_batches() needs "
                "a model that calls each unit once in a forward; use the ordinary loop"
            )
        self._look_at_what_stays(lane)
        self._follow(lane, stage, backward)
        if not backward:
            lane.visited.add(stage)
        kept = self._attributes.around()
        self._hand_on(lane)
        lane.turn.acquire()
        self._check()
        self._attributes.require_same(kept, self._attributes.around())
        if self._held_for != lane.position:
            self._leave_stage()
            self._streaming.pin(units, self._held, exact=False)
            self._held_for = lane.position

    def _look_at_what_stays(self, lane: _Lane) -> None:
        """Compares what the micro-batch leaves in modules at the end of its turn with what the first
        has left."""
        if lane.in_backward:
            return
        left = self._attributes.in_turn(lane.stage)
        if lane.index == 0:
            self._left = left
        else:
            self._attributes.require_same(self._left, left)

    def _follow(self, lane: _Lane, stage: str, backward: bool) -> None:
        lane.stage, lane.in_backward = stage, backward
        if lane.index == 0:
            self._order.append((stage, backward))
        at = lane.position
        lane.position += 1
        if at >= len(self._order) or self._order[at] != (stage, backward):
            raise self._other_order(lane.index, at, _told(stage, backward))

    def _other_order(self, index: int, at: int, came_to: str) -> InvalidArgument:
        there = _told(*self._order[at]) if at < len(self._order) else "the end"
        return InvalidArgument(
            f"micro-batch {index} came to {came_to} where micro-batch 0 came to {there}: "
            "micro_batches() needs a model that calls the same units in the same order for all of "
            "them; use the ordinary loop"
        )

    def _thread(self, lane: _Lane) -> threading.Thread:
        run = self._contexts[lane.index].run
        name = f"ziggurat micro-batch {lane.index}"
        return threading.Thread(target=run, args=(self._pass, lane), name=name, daemon=True)

    def _pass(self, lane: _Lane) -> None:
        lane.turn.acquire()
        if lane.index == 0:
            self._begun = True
            if self._error is not None or self._ended:
                self._end_run()
                return
            self._streaming.turns = self
        try:
            self._check()
            with self._surroundings.entered():
                self._one(lane.index)
            if lane.position < len(self._order):
                raise self._other_order(lane.index, lane.position, "the end")
        except _Ended:
            pass
        except BaseException as error:
            self._fail(error)
        lane.ended = True
        with self._surroundings.on_stream():  # what is let go was used there
            self._hand_on(lane)

    def _hand_on(self, lane: _Lane) -> None:
        """Gives the turn to the micro-batch that is the least far."""
        lane.leave(self._streaming)
        if len(self._lanes) > 1:
            # The C library frees into the thread's own heap, and what those keep would add up.
            loose.look()
        following = self._following()
        if following is None:
            self._end()
            return
        following.enter(self._streaming)
        self._running = following
        following.turn.release()

    def _following(self) -> _Lane | None:
        """Returns the micro-batch whose turn it is now, with a thread, or None if all have ended."""
        while True:
            # After an error none begins any more.
            begun = [one for one in self._lanes if self._error is None or one.thread is not None]
            left = [one for one in begun if not one.ended]
            if not left:
                return None
            following = min(left, key=lambda one: (one.position, one.index))
            if following.thread is not None:
                return following
            thread = self._thread(following)
            try:
                thread.start()
            except BaseException as error:  # there may be too many
                self._fail(error)
            else:
                following.thread = thread

    def _end(self) -> None:
        """Leaves all as the last micro-batch of an ordinary loop does."""
        try:
            self._leave_stage(last=True)
        except BaseException as error:
            self._fail(error)
        for its, generator in enumerate(self._generators):
            drawn = any(one.has_drawn(its) for one in self._lanes)
            generator.set_draws(self._lanes[-1 if drawn else 0].draws[its])
        self._streaming.set_forwards([(0, 0)] * len(self._streaming.units))
        for seam in self._streaming.seams:
            seam.made = None
        self._streaming.turns = None
        self._end_run()

    def _end_run(self) -> None:
        self._ended = True
        self.served.wake()

    def _leave_stage(self, last: bool = False) -> None:
        held, self._held = self._held, []
        self._streaming.unpin(held)
        if self._sums is not None:
            self._sums.hand_over(last)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise _Ended


class _Ended(BaseException):
    """Ends the pass of a micro-batch after an error elsewhere."""


class _Lane:
    """The pass of one micro-batch."""

    def __init__(self, index: int, draws: list[torch.Tensor], generators: list[_Generator]) -> None:
        self.index, self._generators = index, generators
        self.thread: threading.Thread | None = None
        self.turn = threading.Semaphore(0)
        self.position = 0  #: how many stages it has come to
        self.stage = ""  #: to which it has come last
        self.in_backward = False  #: there
        self.visited: set[str] = set()  #: the stages of its forward
        self.ended = False
        self.draws = self._first_draws = draws  #: the generators' states while another has its turn
        self.forwards: list[tuple[int, int]] = []  # the same of the units' counts
        self.made: list[Any] = []  # and of the seams

    def has_drawn(self, generator: int) -> bool:
        return not torch.equal(self.draws[generator], self._first_draws[generator])

    def leave(self, streaming: Streaming) -> None:
        self.draws, self.forwards = [one.draws() for one in self._generators], streaming.forwards()
        self.made = [seam.made for seam in streaming.seams]

    def enter(self, streaming: Streaming) -> None:
        for generator, state in zip(self._generators, self.draws, strict=True):
            generator.set_draws(state)
        streaming.set_forwards(self.forwards or [(0, 0)] * len(streaming.units))
        for seam, made in zip(streaming.seams, self.made or [None] * len(streaming.seams), strict=True):
            seam.made = made


class _Surroundings:
    """What PyTorch keeps for each thread, as it is in this one."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        modes = dispatch_modes()
        if modes:
            raise Unimplemented(
                f"micro_batches() was called under a {type(modes[-1]).__name__}, which PyTorch knows "
                "in the calling thread only: leave it before, or use the ordinary loop"
            )
        devices = {"cpu"} if accelerator is None else {"cpu", accelerator.device.type}
        self._casts: list[dict[str, Any]] = [
            {
                "device_type": device,
                "dtype": torch.get_autocast_dtype(device),
                "enabled": torch.is_autocast_enabled(device),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for device in sorted(devices)
        ]
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.current_stream()
        self._saving = saved_tensors_hooks()
        self._modes = function_modes()

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._accelerator is None else self._accelerator.on_stream(self._stream)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        torch.get_num_threads()  # sets the number that OpenMP takes in this thread
        with contextlib.ExitStack() as left:
            for mode in self._modes:
                left.enter_context(function_mode(mode))
            left.enter_context(self.on_stream())
            for casts in self._casts:
                left.enter_context(torch.autocast(**casts))
            if self._saving is not None:
                left.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            yield


class _Generator(Protocol):
    """What draws random numbers on a device."""

    def draws(self) -> torch.Tensor:
        """Returns its state."""

    def set_draws(self, state: torch.Tensor) -> None: ...

    def draws_of(self, seed: int) -> torch.Tensor:
        """Returns the state of one that begins with `seed`."""


class _OfCpu:
    def draws(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_draws(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def draws_of(self, seed: int) -> torch.Tensor:
        return torch.Generator().manual_seed(seed).get_state()


def _draws(count: int, generator: _Generator) -> list[torch.Tensor]:
    """Returns the state of a generator with which each micro-batch begins: the first with the
    caller's, and each other with a seed that is drawn from a copy of the CPU's."""
    seeds = torch.Generator()
    seeds.set_state(torch.get_rng_state())
    drawn = torch.randint(2**62, (count - 1,), generator=seeds).tolist()
    return [generator.draws(), *map(generator.draws_of, drawn)]


def _told(stage: str, backward: bool) -> str:
    return f"the {'backward' if backward else 'forward'} of module '{stage}'"
