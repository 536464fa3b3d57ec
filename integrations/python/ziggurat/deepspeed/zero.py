# SPDX-License-Identifier: Apache-2.0
"""Offers what scripts for ZeRO stage 3 call. It does little, because every rank has whole
parameters.

``Init`` makes a model in the type that it is trained in. ``GatheredParameters`` waits until
parameters have the values of the newest step, and gives what one rank changes to all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._model_dtype import dtype_of
from ziggurat.deepspeed._owners import owner_of

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]


class Init(contextlib.AbstractContextManager["Init"]):
    """Makes the modules inside whole, and in `dtype` or the type that the configuration trains in.

    A `module` that exists already stays as it is until ``initialize()``. The other arguments are
    about partitioning, and have no effect.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        *_: Any,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **__: Any,
    ) -> None:
        given = config if config_dict_or_path is None else config_dict_or_path
        if dtype is None and given is not None:
            several = torch.distributed.is_initialized()
            ranks = torch.distributed.get_world_size() if several else 1
            dtype = dtype_of(Config(given, world_size=ranks))
        self._dtype = dtype if enabled and module is None else None
        self._before = torch.get_default_dtype()

    def __enter__(self) -> Init:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype or self._before)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


@contextlib.contextmanager
def GatheredParameters(
    params: Iterable[torch.Tensor] | torch.Tensor,
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Makes the parameters inside whole, with the values of the newest step.

    What `modifier_rank` writes inside is on all ranks afterwards; without it, nothing may be
    written.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    for owner in {
        id(owner): owner for owner in map(owner_of, listed) if owner is not None
    }.values():
        owner.synchronize()
    yield
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if enabled and modifier_rank is not None and several:
        for param in listed:
            with torch.no_grad():
                torch.distributed.broadcast(param.detach(), modifier_rank)
            # Counts the write, because one below autograd is not counted, and the optimizer looks
            # at the version.
            torch.autograd.graph.increment_version(param)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Does nothing: a parameter that another module uses is always there."""


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Does nothing, like ``register_external_parameter()``."""
