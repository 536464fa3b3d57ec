# SPDX-License-Identifier: Apache-2.0
"""What a gradient of an offloaded model holds while the engine has its values, in a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ziggurat._dtypes import DTYPES
from ziggurat._file_memory import let_pages_go
from ziggurat._gradient_content import Content, Slot, Taken
from ziggurat._memory import count_freed, free_bytes
from ziggurat._native import Engine, InvalidArgument, ZigguratError
from ziggurat._waited import Waited


class EngineSums:
    """The gradients that an engine has for the step to come, and the content that each belongs to.

    Has no parameter: C++ has what a parameter has, so that a circle through it would stay for
    good."""

    def __init__(self, engine: Engine, waited: Waited) -> None:
        self.engine, self.waited = engine, waited
        #: called once, where a second backward is added to a gradient
        self.on_second: Callable[[], None] | None = None
        # By the parameter's index. A sum whose content is no more is discarded before it is used.
        self._owners: dict[int, weakref.ref[EngineContent]] = {}
        # What is summed in memory until hand_over(), while several backwards come to a unit in turn
        self._waiting: list[EngineContent] | None = None

    def __bool__(self) -> bool:
        return bool(self._owners)

    def live(self) -> Iterator[tuple[int, EngineContent]]:
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

    def claim(self, index: int, content: EngineContent) -> None:
        """Makes a parameter's sum, which is empty now, that of `content`. One that somebody has kept
        gets its values into memory."""
        for kept_index, kept in self.live():
            if kept_index == index:
                kept.come_home()
        if index in self._owners:
            self.engine.discard_gradient(index)
        self._owners[index] = weakref.ref(content)

    def let_others_go(self, used: dict[int, EngineContent]) -> None:
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


class EngineContent(Content):
    """A gradient that is handed to the engine as backward makes it. Each use of its values reads
    them into memory of their own; one that writes them keeps that memory until the step."""

    def __init__(self, slot: Slot, made: torch.Tensor, sums: EngineSums, index: int) -> None:
        self._summands = 0  # that the engine has
        self._lost = ""  # why the values are no more
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
    def is_zero(self) -> bool:
        return not self.at_engine and super().is_zero

    def check(self) -> None:
        if self._lost:
            raise InvalidArgument(
                f"the gradient of parameter '{self.slot.name}' was in a file of its optimizer, "
                f"{self._lost}: call zero_grad()"
            )
        super().check()

    def _hand_over(self, values: torch.Tensor) -> None:
        if not self.at_engine:
            self.sums.claim(self.index, self)
            values = values.to(self.dtype)
        elif self.sums.on_second is not None:
            say, self.sums.on_second = self.sums.on_second, None
            say()
        self._give(values.contiguous())
        self._summands += 1

    def hand_over_sum(self) -> None:
        """Hands over the sum of several backwards that was made in memory."""
        values = self._own
        if values is None or self.scale is not None or self.taken:
            return
        self.sums.claim(self.index, self)
        self._give(values.contiguous())
        self._own = None
        self._summands = 1 if values.dtype == self.dtype else 2

    def _give(self, values: torch.Tensor) -> None:
        with self.sums.waited.gradients:
            self.sums.engine.add_gradient(
                self.index, DTYPES[values.dtype], values.data_ptr(), values.numel()
            )
        let_pages_go(values)
        count_freed(values.nbytes)  # soon, when backward has no use for it any more

    def _read(self) -> torch.Tensor:
        """Returns what Content would have: the gradient as backward made it, or a sum in fp32."""
        values = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        with self.sums.waited.gradients:
            found = self.sums.engine.read_gradient(self.index, values.data_ptr())
        if not found:
            raise ZigguratError(f"the engine has no gradient of parameter '{self.slot.name}'")
        count_freed(values.nbytes)  # soon, by whoever reads
        return values if self._summands > 1 else values.to(self.dtype)

    def _drop(self) -> None:
        # What the engine has is discarded when the next sum begins, or by the step.
        self._summands, self.scale = 0, None
        super()._drop()

    def bring_home(self) -> None:
        """Reads the values into memory, where they stay."""
        if self.at_engine:
            part, scale = self.part, self.scale
            self._drop()
            self.part, self.scale = part, scale

    def settle(self) -> torch.Tensor:
        self.bring_home()
        return super().settle()

    def leave(self) -> None:
        """Takes the values from an engine that is about to be closed."""
        if 4 * self.shape.numel() <= free_bytes():
            self.come_home()
        else:
            self._lose("which was closed when memory had no room for it")

    def come_home(self) -> None:
        """Reads the values into memory for the engine to forget them. Those that the drive does not
        give are lost to whoever asks for them later, and to nobody else."""
        try:
            self.bring_home()
        except ZigguratError as error:
            self._lose(f"which could not be read ({error})")

    def _lose(self, why: str) -> None:
        self._drop()
        self._lost = why

    def zero(self) -> None:
        self._lost = ""
        super().zero()

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

    def consumed_by_step(self, keep: bool) -> None:
        # The engine has nothing of it after the step.
        super().consumed_by_step(keep and not self.at_engine)


def at_engine(grad: torch.Tensor | None) -> EngineContent | None:
    """Returns the content of a whole gradient whose values an engine has, or None."""
    content = content_of(grad)
    return content if content is not None and content.at_engine else None


def content_of(grad: torch.Tensor | None) -> EngineContent | None:
    """Returns the content of a whole gradient that was handed to an engine, or None."""
    content = getattr(grad, "_content", None)
    return content if type(content) is EngineContent and not grad._path else None  # type: ignore
