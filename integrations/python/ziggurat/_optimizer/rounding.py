# SPDX-License-Identifier: Apache-2.0
"""Rounds masters to parameters as the engine does, and says whether the engine rounds anything
stochastically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ziggurat._exchange.parts import Part
from ziggurat._library.native import Unimplemented
from ziggurat._library.state_kinds import formats


def as_fp32(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `values` as the engine rounds masters: to the nearest bf16, ties away from zero."""
    if dtype != torch.bfloat16 or values.dtype != torch.float32:
        return values.to(dtype)
    nearest = (values.contiguous().view(torch.int32) + 0x8000) >> 16
    return nearest.to(torch.int16).view(torch.bfloat16)


def draws_noise(settings: Mapping[str, Any]) -> bool:
    """Returns whether the engine may round anything stochastically."""
    words = {name: settings.get(name) for name in ("rounding", "state_rounding", "param_rounding")}
    its = formats().get(settings.get("state_format", ""))
    kept = its is not None and its.rounds_state
    # "stochastic" is the default of a new store
    of_state = words["state_rounding"] or words["rounding"] or "stochastic"
    return "stochastic" in words.values() or (kept and of_state == "stochastic")


def require_runs(parts: Sequence[Part], names: Sequence[str]) -> None:
    """Checks that stochastic rounding does not depend on how ranks divide a parameter. Errors:
    Unimplemented, on every rank alike, if it does."""
    for part, name in zip(parts, names, strict=True):
        if not part.is_run():
            placed = getattr(part.param, "placements", "")
            raise Unimplemented(
                f"parameter '{name}' is placed as {placed}, so the elements of a rank's part do "
                "not follow one another in the whole, and stochastic rounding would give other "
                "bits on another number of ranks. Shard the parameter in dimension 0, as "
                "fully_shard() does without "
                'shard_placement_fn, or give state_rounding="nearest" and param_rounding="nearest"'
            )


def draws_params(settings: Mapping[str, Any]) -> bool:
    """Returns whether the settings round the parameters themselves stochastically."""
    return "stochastic" in (settings.get("rounding"), settings.get("param_rounding"))


def rounds_to(master: torch.Tensor, param: torch.Tensor, stochastic: bool) -> bool:
    """Returns whether the engine rounds `master` to `param`; with `stochastic`, whether `param` is
    one of the two neighbours of `master`."""
    if stochastic and param.dtype == torch.bfloat16:
        bits = as_fp32(master).view(torch.int32)
        low = (bits >> 16).to(torch.int16)
        high = ((bits + 0xFFFF) >> 16).to(torch.int16)
        found = param.detach().contiguous().view(torch.int16)
        return bool(((found == low) | (found == high)).all())
    made = rounded(as_fp32(master), param.dtype)
    bits = torch.int32 if param.dtype == torch.float32 else torch.int16
    return torch.equal(made.view(bits), param.detach().contiguous().view(bits))
