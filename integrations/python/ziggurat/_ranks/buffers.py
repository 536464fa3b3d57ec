# SPDX-License-Identifier: Apache-2.0
"""Keeps buffers for what ranks send each other. Buffers are used again, because fresh pages cost as
much as a copy."""

from __future__ import annotations

import threading

import torch


class Buffers:
    """Keeps as many buffers as were in use at once, each of the largest size asked for."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a flat buffer with undefined values, which the caller gives back."""
        size_bytes = count * dtype.itemsize
        with self._lock:
            found = next((one for one in self._free if one.device == device), None)
            self._free = [one for one in self._free if one is not found]
            if found is None or found.numel() < size_bytes:
                self.held_bytes += size_bytes - (0 if found is None else found.numel())
                found = None  # frees the old buffer before a larger one is made
                found = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return found[:size_bytes].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        storage = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        with self._lock:
            self._free.append(storage.set_(buffer.untyped_storage()))
