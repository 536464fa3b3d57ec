# SPDX-License-Identifier: Apache-2.0
"""Makes the calls of several threads in one, which waits for them meanwhile.

The engine tells by its callers' threads whether anybody may still release what an acquire waits for.
Of threads that wait for each other elsewhere it does not know, and would wait for ever.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from typing import Any


class Served:
    """Calls that are made in the thread that made this, one at a time."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        # Not an Event, whose lock stays taken if a signal strikes as it is taken.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked: collections.deque[_Asked] = collections.deque()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Returns when serve() has made the call. Errors: the function's; after a signal its own, and
        the call may have been made or not."""
        if threading.current_thread() is self._thread:
            function(*args)
            return
        asked = _Asked(function, args)
        self._asked.append(asked)
        self._woken.put(None)
        asked.answered.get()
        error, asked.error = asked.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # which has this frame

    def wake(self) -> None:
        """Lets serve() return."""
        self._woken.put(None)

    def serve(self) -> None:
        """Makes calls that were asked for, and waits for the next or for wake(). A signal's error may
        come at any point: the next serve() goes on."""
        while self._asked:
            self._asked[0].make()
            self._asked.popleft()
        self._woken.get()


class _Asked:
    """A call that a thread waits for."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._begun = False
        self.error: BaseException | None = KeyboardInterrupt()  # unless the call is known to have ended
        self.answered: queue.SimpleQueue[None] = queue.SimpleQueue()

    def make(self) -> None:
        if not self._begun:
            try:
                self._begun = True
                self._function(*self._args)
                self.error = None
            except BaseException as error:
                self.error = error
        self.answered.put(None)
