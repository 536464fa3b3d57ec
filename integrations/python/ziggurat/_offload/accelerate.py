# SPDX-License-Identifier: Apache-2.0
"""Keeps Accelerate, and with it Trainer, from wrapping an offloaded model among several ranks.

It would wrap the model in DistributedDataParallel, which holds all gradients and sends them itself. A model that
is only evaluated it prepares without: with its precision, and all else.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from ziggurat._ranks.ranks import several_ranks

_FRAMES_BETWEEN = 8  # at most, of a model around it


class Prepared:
    """The attribute ``_is_accelerate_prepared``, by which Accelerate knows what it has prepared, of an
    offloaded model. Accelerate's prepare_model() asks for it before all else."""

    def __init__(self) -> None:
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._preparing: weakref.WeakSet[Any] = weakref.WeakSet()

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        if module not in self._prepared and module not in self._preparing and several_ranks():
            self._prepare(module)
        return module in self._prepared

    def __set__(self, module: Any, prepared: bool) -> None:
        (self._prepared.add if prepared else self._prepared.discard)(module)

    def __delete__(self, module: Any) -> None:
        self._prepared.discard(module)

    def _prepare(self, module: Any) -> None:
        """Does what a prepare_model() that asks is about to do, but for wrapping."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_FRAMES_BETWEEN):
            if frame is None or frame.f_code.co_name == "prepare_model":
                break
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "prepare_model" or "self" not in frame.f_locals:
            return
        asks = frame.f_locals  # of the model itself, or of one around it, as PEFT's
        self._preparing.add(module)
        try:
            asks["self"].prepare_model(
                asks["model"], device_placement=asks["device_placement"], evaluation_mode=True
            )
        finally:
            self._preparing.discard(module)
        self._prepared.add(module)


PREPARED = Prepared()
