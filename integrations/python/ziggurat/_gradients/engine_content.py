# SPDX-License-Identifier: Apache-2.0
"""What a gradient of an offloaded model holds while the engine has its values: in a file, or in host memory
where an accelerator computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ziggurat._gradients.gradient_content import Content, Slot, Taken
from ziggurat._library.dtypes import DTYPES
from ziggurat._library.native import Engine, InvalidArgument, ZigguratError
from ziggurat._library.waited import Waited
from ziggurat._memory.file_memory import let_pages_go
from ziggurat._memory.memory import count_freed, free_bytes

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator


class HandedOver(Content):
    """A gradient, or this rank's slice of one, that is handed to the engine. What the engine has goes with the next
    sum, with the step, or when the engine is closed."""

    sums: EngineSums
    index: int  #: the parameter's, in the engine
    _lost = ""  # why the values are no more

    @property
    def at_engine(self) -> bool:
        """Returns whether the engine has the values."""
        raise NotImplementedError

    @property
    def factor(self) -> float:
        """By what the step multiplies the values that the engine has."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """The number of the engine's values."""
        raise NotImplementedError

    def check_for_step(self) -> None:
        """Errors: InvalidArgument if a step cannot consume it."""
        raise NotImplementedError

    def bring_home(self) -> None:
        """Reads the values into memory, where they stay."""
        raise NotImplementedError

    @property
    def is_zero(self) -> bool:
        return not self.at_engine and super().is_zero

    def check(self) -> None:
        if self._lost:
            raise InvalidArgument(
                f"the gradient of parameter '{self.slot.name}' was in {self.sums.told} of its optimizer, "
                f"{self._lost}: call zero_grad()"
            )
        super().check()

    def leave(self) -> None:
        """Takes the values from an engine that is about to be closed."""
        if 4 * self.count <= free_bytes():
            self.come_home()
        else:
            self._lose("which was closed when memory had no room for it")

    def come_home(self) -> None:
        """Reads the values into memory for the engine to forget them. Those that the drive does not
        give, or a GPU has no room for, are lost to whoever asks for them later, and to nobody else."""
        try:
            self.bring_home()
        except (ZigguratError, torch.cuda.OutOfMemoryError) as error:
            self._lose(f"which could not be read ({error})")

    def _lose(self, why: str) -> None:
        self._drop()
        self._lost = why

    def zero(self) -> None:
        self._lost = ""
        super().zero()

    def consumed_by_step(self, keep: bool) -> None:
        """Tells that a step has used the values, of which the engine has nothing after it."""
        super().consumed_by_step(keep and not self.at_engine)


class EngineSums:
    """The gradients that an engine has for the step to come, and the content that each belongs to.

    Has no parameter: C++ has what a parameter has, so that a circle through it would stay for
    good."""

    def __init__(
        self, engine: Engine, waited: Waited, in_files: bool, accelerator: Accelerator | None
    ) -> None:
        self.engine, self.waited, self.in_files = engine, waited, in_files
        self._accelerator = accelerator  # that makes the gradients
        #: called once, where a second backward is added to a gradient
        self.on_second: Callable[[], None] | None = None
        # By the parameter's index. A sum whose content is no more is discarded before it is used.
        self._owners: dict[int, weakref.ref[HandedOver]] = {}
        # What is summed in memory until hand_over(), while several backwards come to a unit in turn
        self._waiting: list[EngineContent] | None = None

    def __bool__(self) -> bool:
        return bool(self._owners)

    @property
    def told(self) -> str:
        return "a file" if self.in_files else "the engine"

    def in_host_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Returns gradients that backward has made where the engine can read them, in order."""
        if self._accelerator is None:
            return values.contiguous()
        return self._accelerator.to_host(values)

    def add(self, content: HandedOver, values: torch.Tensor) -> None:
        """Adds to the sum of a parameter."""
        with self.waited.gradients:
            self.engine.add_gradient(content.index, DTYPES[values.dtype], values.data_ptr(), values.numel())

    def read(self, content: HandedOver) -> torch.Tensor:
        """Returns the values, flat, in fp32."""
        values = torch.empty(content.count, dtype=torch.float32, device="cpu")
        with self.waited.gradients:
            found = self.engine.read_gradient(content.index, values.data_ptr())
        if not found:
            raise ZigguratError(f"the engine has no gradient of parameter '{content.slot.name}'")
        return values

    def say_second(self) -> None:
        """Tells that a second backward is added to a gradient."""
        say, self.on_second = self.on_second, None
        if say is not None:
            say()

    def live(self) -> Iterator[tuple[int, HandedOver]]:
        """Yields the contents whose values the engine has, and the parameters' indices."""
        for index, ref in list(self._owners.items()):
            content = ref()
            if content is not None and content.at_engine:
                yield index, content

    def waits(self, content: EngineContent) -> bool:
        """Returns whether the content is to sum in memory now, and notes it then."""
        if self._waiting is not None:
            self._waiting.append(content)
        return self._waiting is not None

    def hand_over(self, last: bool = False) -> None:
        """Hands what was summed in memory to the engine. What comes then is summed in memory until the
        next call, with the same bits; after the `last` one it goes to the engine at once."""
        waiting, self._waiting = self._waiting or [], None if last else []
        for content in waiting:
            content.hand_over_sum()

    def claim(self, index: int, content: HandedOver) -> None:
        """Makes a parameter's sum, which is empty now, that of `content`. One that somebody has kept
        gets its values into memory."""
        for kept_index, kept in self.live():
            if kept_index == index:
                kept.come_home()
        if index in self._owners:
            self.engine.discard_gradient(index)
        self._owners[index] = weakref.ref(content)

    def let_others_go(self, used: Mapping[int, HandedOver]) -> None:
        """Called before the engine discards what the step does not use. What somebody has kept of it
        gets its values into memory."""
        for index, kept in self.live():
            if used.get(index) is not kept:
                kept.come_home()
        for index in set(self._owners).difference(used):
            del self._owners[index]

    def used(self) -> None:
        """Tells that a step has used all."""
        for _, content in self.live():
            content.consumed_by_step(keep=False)
        self._owners.clear()

    def close(self) -> None:
        """Brings the values into memory before the engine is closed, as far as there is room."""
        for _, content in self.live():
            content.leave()
        self._owners.clear()


class EngineContent(HandedOver):
    """A gradient that is handed to the engine as backward makes it. Each use of its values reads
    them into memory of their own; one that writes them keeps that memory until the step."""

    def __init__(self, slot: Slot, made: torch.Tensor, sums: EngineSums, index: int) -> None:
        self._summands = 0  # that the engine has
        super().__init__(slot, made)
        self.sums, self.index = sums, index
        if not sums.waits(self):
            self._own = None
            self._hand_over(made)

    # The base has an attribute here.
    @property  # type: ignore[override]
    def part(self) -> torch.Tensor | None:
        return self._read() if self.at_engine else self._own

    @part.setter
    def part(self, part: torch.Tensor | None) -> None:
        self._own: torch.Tensor | None = part

    @property
    def at_engine(self) -> bool:
        return self._summands > 0

    @property
    def count(self) -> int:
        return self.shape.numel()

    def check_for_step(self) -> None:
        self.check()

    @property
    def factor(self) -> float:
        return 1.0 if self.scale is None else float(self.scale)

    def _hand_over(self, values: torch.Tensor) -> None:
        if not self.at_engine:
            self.sums.claim(self.index, self)
            values = values.to(self.dtype)
        else:
            self.sums.say_second()
        self._give(self.sums.in_host_memory(values))
        self._summands += 1

    def hand_over_sum(self) -> None:
        """Hands over the sum of several backwards that was made in memory."""
        values = self._own
        if values is None or self.scale is not None or self.taken:
            return
        self.sums.claim(self.index, self)
        self._give(self.sums.in_host_memory(values))
        self._own = None
        self._summands = 1 if values.dtype == self.dtype else 2

    def _give(self, values: torch.Tensor) -> None:
        self.sums.add(self, values)
        let_pages_go(values)
        count_freed(values.nbytes)  # soon, when backward has no use for it any more

    def _read(self) -> torch.Tensor:
        """Returns what Content would have: the gradient as backward made it, or a sum in fp32."""
        values = self.sums.read(self)
        count_freed(values.nbytes)  # soon, by whoever reads
        dtype = torch.float32 if self._summands > 1 else self.dtype
        return values.view(self.shape).to(self.device, dtype)

    def _drop(self) -> None:
        # What the engine has is discarded when the next sum begins, or by the step.
        self._summands, self.scale = 0, None
        super()._drop()

    def bring_home(self) -> None:
        if self.at_engine:
            part, scale = self.part, self.scale
            self._drop()
            self.part, self.scale = part, scale

    def settle(self) -> torch.Tensor:
        self.bring_home()
        return super().settle()

    def add(self, other: Any, alpha: Any) -> None:
        self.check()
        as_it_is = alpha == 1 and self.scale is None and self._takes(other)
        if as_it_is and self._own is None and not self.sums.waits(self):
            self._hand_over(other)
            return
        self.bring_home()
        super().add(other, alpha)

    def _takes(self, other: Any) -> bool:
        """Returns whether the engine can add it."""
        if type(other) is not torch.Tensor or other.layout is not torch.strided:
            return False
        return (
            other.dtype in DTYPES
            and other.device == self.device
            and other.shape == self.shape
        )

    def take(self) -> Taken | None:
        self.bring_home()
        return super().take()


def at_engine(grad: torch.Tensor | None) -> EngineContent | None:
    """Returns the content of a whole gradient whose values an engine has, or None."""
    content = content_of(grad)
    return content if isinstance(content, EngineContent) and content.at_engine else None


def content_of(grad: torch.Tensor | None) -> HandedOver | None:
    """Returns the content of a gradient that was handed to an engine, or a slice of it, or None."""
    content = getattr(grad, "_content", None)
    return content if isinstance(content, HandedOver) and not grad._path else None  # type: ignore
