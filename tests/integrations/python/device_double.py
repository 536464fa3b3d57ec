# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is not there: CPU tensors play its tensors, and its copies are late.

Computation happens when it is called, on the current stream; a copy happens when somebody waits for
it: the host, or a computation behind a wait of the current stream. With a seed other than 0 streams
also run ahead by themselves. What a real accelerator would leave to chance is made visible here:

- the target of a copy is NaN until the copy has happened;
- gradients that are written while they are copied arrive as NaN, and staging that is written while
  it is copied is an error;
- so is a copy on a stream that has not waited for what the computation did to the accelerator's
  tensor, and one from a gradient whose memory may have gone to another tensor.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import ziggurat._optimizer.device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from ziggurat._gradients.gradient import LentGradient


def _storage(tensor: torch.Tensor) -> int:
    return torch.Tensor.untyped_storage(tensor).data_ptr()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


class Stream:
    """What is queued, in order: each a call."""

    def __init__(self, accelerator: DoubleAccelerator) -> None:
        self._accelerator = accelerator
        self._queue: deque[Callable[[], None]] = deque()
        self.queued = self._done = 0
        self.knows = 0  #: the computation's time that it has waited for

    def add(self, call: Callable[[], None]) -> None:
        self._queue.append(call)
        self.queued += 1

    def run(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._queue.popleft()()

    def wait_stream(self, other: Stream) -> None:
        until = other.queued
        self.add(lambda: other.run(until))
        is_current = other is self._accelerator.current
        self.knows = max(self.knows, self._accelerator.double.now if is_current else other.knows)
        self._accelerator.double.run_ahead()

    def synchronize(self) -> None:
        self.run(self.queued)


class DoubleAccelerator:
    """In the place of ziggurat._pytorch.accelerator.Accelerator."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.current = Stream(self)
        self.streams: list[Stream] = []
        self.pinned_bytes: list[int] = []
        self.reads = 0
        self._kept: set[int] = set()

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.current

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(size_bytes)
        memory = torch.full((size_bytes,), 255, dtype=torch.uint8)  # NaN in all float types
        self.double.pinned[_storage(memory)] = memory
        return memory

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._kept.add(_storage(tensor))

    def read(self, scalars: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.reads += 1
        return [scalar.clone() for scalar in scalars]

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.is_contiguous() and source.is_contiguous()
        down = self.double.is_pinned(target)
        assert down != self.double.is_pinned(source), "a copy is between the host and the device"
        used = self.double.used.get(_storage(source if down else target), 0)
        computes = stream is self.current
        assert computes or stream.knows >= used, "the copy does not wait for what computed before it"
        with self.double.itself():
            target, source = target.data, source.data
            then = source.clone()
            target.fill_(255 if target.dtype == torch.uint8 else float("nan"))  # NaN in all float types
        stream.add(lambda: self._copy_now(down and not computes, down, target, source, then))
        self.double.run_ahead()

    def _copy_now(
        self, beside: bool, down: bool, target: torch.Tensor, source: torch.Tensor, then: torch.Tensor
    ) -> None:
        with self.double.itself():
            as_it_was = _same_bits(source, then)
            if down:
                assert not beside or _storage(source) in self._kept, "the gradient may be gone by now"
                target.copy_(source if as_it_was else torch.full_like(source, float("nan")))
            else:
                assert as_it_was, "staging was written while it was copied up"
                target.copy_(source)


class Double(TorchDispatchMode):
    """While entered, `where(tensor)` says on which accelerator a tensor is; None: on the CPU."""

    def __init__(self, seed: int, where: Callable[[torch.Tensor], int | None] | None = None):
        super().__init__()
        self.now = 0  #: operations that the computation has done
        self.used: dict[int, int] = {}  #: when each storage was last used by one
        self.pinned: dict[int, torch.Tensor] = {}
        self.accelerators = [DoubleAccelerator(self) for _ in range(2)]
        self._where = where or (lambda tensor: 0)
        self._random = random.Random(seed) if seed else None
        self._itself = False

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, LentGradient) and _storage(tensor) in self.pinned

    def accelerator_of(self, tensor: torch.Tensor) -> DoubleAccelerator | None:
        at = None if self.is_pinned(tensor) else self._where(tensor)
        return None if at is None else self.accelerators[at]

    def run_ahead(self) -> None:
        streams = [stream for each in self.accelerators for stream in each.streams]
        if self._random is not None and streams and self._random.random() < 0.5:
            stream = self._random.choice(streams)
            stream.run(self._random.randint(0, stream.queued))

    def synchronize(self) -> None:
        for accelerator in self.accelerators:
            for stream in (accelerator.current, *accelerator.streams):
                stream.synchronize()

    @contextmanager
    def itself(self) -> Iterator[None]:
        """No computation of the accelerator's."""
        before, self._itself = self._itself, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._itself = before

    def __enter__(self) -> Double:
        self._real, ziggurat._optimizer.device.accelerator_of = (
            ziggurat._optimizer.device.accelerator_of,
            self.accelerator_of,  # type: ignore[assignment]
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ziggurat._optimizer.device.accelerator_of = self._real
        if error[0] is None:
            self.synchronize()

    def _tensors(self, *values: Any) -> list[torch.Tensor]:
        found = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        lent = [value.part for value in found if isinstance(value, LentGradient)]
        plain = [value for value in found if not isinstance(value, LentGradient)]
        plain += [part for part in lent if part is not None]
        return [value for value in plain if not self.is_pinned(value)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._itself or func.is_view:
            return func(*args, **kwargs)
        if self._tensors(args, kwargs):
            for accelerator in self.accelerators:
                accelerator.current.synchronize()
        result = func(*args, **kwargs)
        self.now += 1
        for tensor in self._tensors(args, kwargs, result):
            self.used[_storage(tensor)] = self.now
        return result
