# SPDX-License-Identifier: Apache-2.0
"""Shows on a terminal how far work is that takes over two seconds, as the engine does of its opening
(integrations/c/open_progress.cc)."""

from __future__ import annotations

import time

from ziggurat._library.standard_error import on_terminal, stderr
from ziggurat._memory.memory import size_text

_SILENCE_S = 2.0
_BETWEEN_S = 0.2


class Progress:
    """A line on standard error, which is written over and goes when the block ends."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._begin = self._shown = time.monotonic()
        self._on_screen = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_screen:
            self._write("")

    def add(self, size_bytes: int) -> None:
        """Tells that so much more is done."""
        self._done_bytes += size_bytes
        now = time.monotonic()
        seconds = now - self._begin
        if seconds < _SILENCE_S or now - self._shown < _BETWEEN_S or not on_terminal():
            return
        self._shown, self._on_screen = now, True
        rate = self._done_bytes / seconds
        left_s = (self._total_bytes - self._done_bytes) / rate if rate else 0.0
        self._write(
            f"ziggurat: {self._what}: {size_text(self._done_bytes)} of {size_text(self._total_bytes)}, "
            f"{rate / 1e9:.2f} GB/s, {left_s:.0f} s to go"
        )

    @staticmethod
    def _write(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=stderr(), flush=True)
