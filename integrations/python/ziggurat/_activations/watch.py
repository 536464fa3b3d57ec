# SPDX-License-Identifier: Apache-2.0
"""Notes that objects are gone, for whoever looks later.

What runs when an object goes may be interrupted (Ctrl-C) between any two steps of Python, where it would be lost. So
it is noted by one step in C.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, TypeVar

__all__ = ["Watch"]

_Its = TypeVar("_Its", bound="Watch")


class Watch(weakref.ref[Any]):
    """A weak reference that comes into `gone` when its object goes, as long as somebody has the reference. Subclasses
    say of the object what is needed then."""

    __slots__ = ()

    def __new__(cls: type[_Its], its: object, gone: deque[_Its]) -> _Its:
        return super().__new__(cls, its, gone.append)

    def __init__(self, its: object, gone: deque[Any]) -> None:
        super().__init__(its, gone.append)
