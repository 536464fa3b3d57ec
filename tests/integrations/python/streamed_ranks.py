# SPDX-License-Identifier: Apache-2.0
"""Trains offloaded models among ranks, with as little memory as their largest unit takes. Not to be imported where
ziggurat.torch cannot be imported, because PyTorch is older than offload() takes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from language_models import batches, loss_of

import ziggurat.torch
from ziggurat._units.units import divide

STEPS = 3


def least(model: torch.nn.Module) -> int:
    """Returns the memory without which a rank cannot bring the model's largest unit."""
    division = divide(model, "auto")
    division.set_ranks(dist.get_world_size())
    return division.smallest()[0]


def adamw(model: torch.nn.Module, folder: str | None = None, **given: Any) -> Any:
    placement = "host" if folder is None else f"nvme:{folder}"
    return ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=placement, model=model, **given)


def trained(
    model: torch.nn.Module,
    optimizer: Any,
    rank: int,
    world: int,
    before_update: Callable[[int], None] = lambda step: None,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns what training finds on the way, and the bits of the model. Calls `before_update` with the number of
    each step, and `between` after it."""
    found, texts = [], batches(2 * STEPS * world)
    for step in range(STEPS):
        for text in texts[2 * step * world + rank :: world][:2]:  # two backwards a step
            loss = loss_of(model.train(), text)
            loss.backward()
            found.append(loss.item().hex())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item().hex())
        before_update(step)
        optimizer.step()
        optimizer.zero_grad()
        between()
    return found, {name: values.clone() for name, values in model.state_dict().items()}
