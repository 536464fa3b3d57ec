# SPDX-License-Identifier: Apache-2.0
"""The device that this process computes on, as scripts get it from ``deepspeed.accelerator``."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument

__all__ = ["Accelerator", "get_accelerator"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


class Accelerator:
    """A kind of device. Methods that it lacks come from ``torch.cuda`` or its counterpart."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = getattr(torch, name, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        one = device_index is None or self._name == "cpu"
        return self._name if one else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return self.device_name(None if self._name == "cpu" else self.current_device())

    def current_device(self) -> int:
        return 0 if self._name == "cpu" else int(getattr(torch, self._name).current_device())

    def device_count(self) -> int:
        return 1 if self._name == "cpu" else int(getattr(torch, self._name).device_count())

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            getattr(torch, self._name).set_device(device_index)

    def is_available(self) -> bool:
        return self._name == "cpu" or bool(getattr(torch, self._name).is_available())

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            getattr(torch, self._name).synchronize(device_index)

    def empty_cache(self) -> None:
        if self._name != "cpu":
            getattr(torch, self._name).empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return (
            0 if self._name == "cpu" else getattr(torch, self._name).memory_allocated(device_index)
        )

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            return 0
        return int(getattr(torch, self._name).max_memory_allocated(device_index))

    def communication_backend_name(self) -> str:
        return _BACKENDS[self._name]

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


@functools.cache
def get_accelerator() -> Accelerator:
    """Returns CUDA or XPU if this machine has one, else the CPU; ``DS_ACCELERATOR`` chooses
    another."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is not None:
        if chosen not in _BACKENDS:
            known = ", ".join(_BACKENDS)
            raise InvalidArgument(
                f"DS_ACCELERATOR={chosen} is not known: unset it, or set it to one of {known}"
            )
        return Accelerator(chosen)
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return Accelerator(name)
    return Accelerator("cpu")
