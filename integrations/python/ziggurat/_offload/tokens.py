# SPDX-License-Identifier: Apache-2.0
"""Says once what a token costs when an offloaded model generates with a cache of keys and values: its
forward computes little, but brings the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ziggurat._library.standard_error import stderr
from ziggurat._memory.memory import size_text

if TYPE_CHECKING:
    from ziggurat._streaming.streaming import Streaming


class TokenCost:
    """Counts what the second forward over one cache reads; the first may find units of training there."""

    def __init__(self) -> None:
        self._said = False
        self._forwards = 0  # over the present cache
        self._read_bytes = 0

    def forward_begins(self, kwargs: Mapping[str, Any], streaming: Streaming) -> None:
        """Called before a forward of the whole model without gradients, with its arguments."""
        opened = streaming.opened
        cache = kwargs.get("past_key_values")
        if self._said or cache is None or opened is None or streaming.fits:
            return
        length = getattr(cache, "get_seq_length", None)
        if length is not None and not length():
            self._forwards = 0
        self._forwards += 1
        if self._forwards < 2:
            return
        before, self._read_bytes = self._read_bytes, opened.engine.figures()["nvme_read_bytes"]
        if self._forwards == 3:
            self._said = True
            _say(streaming, opened.store, self._read_bytes - before)


def _say(streaming: Streaming, store: str | None, read_bytes: int) -> None:
    if streaming.placement == "host":
        cost = f"copies up to {size_text(streaming.size_bytes)} of parameters from host memory"
    else:
        cost = f"reads {size_text(read_bytes)} of parameters from {store}"
    if in_files := streaming.files.size_bytes:
        cost += f", and {size_text(in_files)} from the files that they stay in"
    room = size_text(streaming.memory_bytes)
    print(
        f"ziggurat: generate(): each token {cost}, because memory={room} has no room for "
        "all of them: give offload() more memory, or generate several sequences at once, which share it",
        file=stderr(),
    )
