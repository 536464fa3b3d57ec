# SPDX-License-Identifier: Apache-2.0
"""Offers what scripts for ZeRO stage 3 call.

``Init`` makes a model in the type that it is trained in, and in files where its parameters are going
to be on a drive. ``GatheredParameters`` brings parameters that are streamed, with the values of the
newest step, and gives what one rank changes to all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ziggurat._library.native import InvalidArgument, ResourceExhausted
from ziggurat._ranks.ranks import rank_count
from ziggurat._streaming.gathered import brought, gathered
from ziggurat._streaming.streamed_init import streamed_init
from ziggurat._streaming.streaming import streaming_of
from ziggurat.deepspeed import _stage3_units, _streamed
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed._log import logger
from ziggurat.deepspeed._model_dtype import dtype_of
from ziggurat.deepspeed._owners import owner_of
from ziggurat.deepspeed._stage3_params import ZeroParamStatus, available
from ziggurat.deepspeed._tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]


class Init(contextlib.AbstractContextManager["Init"]):
    """Makes the modules inside in `dtype` or the type that the configuration trains in. Where it
    has parameters on a drive, each large one lies in a file without a name in ``nvme_path`` from the
    beginning, so that memory need not have room for the model; else they are in memory until the
    first forward moves them one by one.

    A `module` that exists already stays as it is until ``initialize()``. The other arguments are
    about devices and ranks, and have no effect.
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
        self._folder: str | None = None
        if given is not None and enabled and module is None:
            read = Config(given, world_size=rank_count())
            dtype = dtype_of(read) if dtype is None else dtype
            if _streamed.streams(read):
                self._folder = _streamed.nvme_path_of(read)
        self._dtype = dtype if enabled and module is None else None
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Init:
        with contextlib.ExitStack() as entered:
            entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype or torch.get_default_dtype())
            if self._folder is not None:
                os.makedirs(self._folder, exist_ok=True)
                entered.enter_context(streamed_init(self._folder))
            self._inside = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()


@contextlib.contextmanager
def GatheredParameters(
    params: Iterable[torch.Tensor | None] | torch.Tensor | None,
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Brings the parameters for the block, whole and with the values of the newest step.

    What `modifier_rank` writes inside is kept, on all ranks, which all call this; the next step makes
    masters of it. Without it, nothing may be written, and a rank may call this alone. Errors:
    InvalidArgument if `params` has something else than parameters and None; ResourceExhausted if there
    is no room for all of them at once.
    """
    listed = _listed(params)
    for owner in {
        id(owner): owner for owner in map(owner_of, listed) if owner is not None
    }.values():
        owner.synchronize()
    if not enabled:
        yield
        return
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    with contextlib.ExitStack() as there:
        try:
            there.enter_context(brought(listed) if modifier_rank is None else gathered(listed))
        except ResourceExhausted as error:
            said = f"GatheredParameters(): {error}, or gather fewer parameters at once"
            raise ResourceExhausted(said) from error
        with available(listed):
            yield
        if modifier_rank is not None and several:
            for param in listed:
                # A copy, because the group's thread may have it longer than the block.
                values = param.detach().clone()
                torch.distributed.broadcast(values, modifier_rank)
                with torch.no_grad():
                    param.copy_(values)


def _listed(params: Iterable[torch.Tensor | None] | torch.Tensor | None) -> list[torch.Tensor]:
    """Returns the parameters of `params`. As in DeepSpeed None is passed over, such as a layer's bias
    that it does not have. Errors: InvalidArgument, which says what else was given."""
    given = list(params) if isinstance(params, Iterable) and not torch.is_tensor(params) else [params]
    listed = [param for param in given if isinstance(param, torch.Tensor)]
    others = [one for one in given if one is not None and not isinstance(one, torch.Tensor)]
    if others:
        raise InvalidArgument(
            f"GatheredParameters(): params has {others[0]!r:.80} of type {type(others[0]).__name__}: give "
            "parameters, as of module.parameters()"
        )
    return listed


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Tells that `module` uses a parameter of another one without calling that. The unit that the
    parameter lies in is then there as long as the model runs. Call it before ``initialize()``; a
    unit that is registered later stays what it is, which is said."""
    _stage3_units.register(parameter)
    if streaming_of(parameter) is not None:
        logger.warning(
            "register_external_parameter() was called after initialize(), and has no effect: call it "
            "in the constructor of the module"
        )


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undoes ``register_external_parameter()``, before ``initialize()``."""
    _stage3_units.unregister(parameter)
