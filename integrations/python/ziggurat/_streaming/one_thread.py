# SPDX-License-Identifier: Apache-2.0
"""Refuses a thread that comes to a model while another one uses it."""

from __future__ import annotations

import threading

from ziggurat._library.native import InvalidArgument


class OneThread:
    """The thread that uses a model. Threads of PyTorch's own come for it: they run parts of a backward that it
    waits for."""

    def __init__(self) -> None:
        self._user: threading.Thread | None = None
        self._uses = 0
        self._lock = threading.RLock()  # what is collected as garbage meanwhile may end a use

    def require(self, needed: str) -> None:
        """Errors: InvalidArgument if another thread uses the model, and this one needs the unit `needed`."""
        user, this = self._user, threading.current_thread()
        if user is not None and user is not this and user.is_alive() and not _is_of_pytorch(this):
            raise InvalidArgument(
                f"unit '{needed}' is needed in thread '{this.name}' while thread '{user.name}' uses the model: use "
                "an offloaded model in one thread at a time"
            )

    def enter(self, needed: str | None) -> None:
        """Begins a use of the unit `needed`, or one that is not refused, after which leave() is called.
        Errors: as of require()."""
        with self._lock:
            this = threading.current_thread()
            if needed is not None:
                self.require(needed)
                # What create_graph keeps until the step may outlive the thread that made it.
                if (self._user is None or not self._user.is_alive()) and not _is_of_pytorch(this):
                    self._user = this
            self._uses += 1

    def leave(self) -> None:
        """Ends a use, in whatever thread."""
        with self._lock:
            self._uses -= 1
            if self._uses == 0:
                self._user = None


def _is_of_pytorch(thread: threading.Thread) -> bool:
    """Returns whether Python has not made the thread."""
    return isinstance(thread, threading._DummyThread)
