# SPDX-License-Identifier: Apache-2.0
"""Models of random shapes, and random steps, evaluations and writes of them: they are skipped where this cannot be
imported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import ziggurat.torch
from ziggurat._units.units import divide
from ziggurat.torch import gathered


class Layer(torch.nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        inner = draw.choice([3, 40, 256, 700, 1500])
        self.norm = torch.nn.LayerNorm(width)
        self.wide, self.narrow = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
        self.factors = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(draw.choice([1, width])))
            for _ in range(draw.randint(0, 4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(torch.relu(self.wide(self.norm(x))))
        for factor in self.factors:
            y = y * torch.tanh(factor)
        return x + y


class Layers(torch.nn.Module):
    """Its root may be larger than all else, and then lies in the middle of the memory at times."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([16, 64, 200])
        self.first = torch.nn.Linear(8, width)
        self.layers = torch.nn.ModuleList(Layer(draw, width) for _ in range(draw.randint(2, 7)))
        if draw.random() < 0.3:
            self.layers.append(self.layers[0])
        self.bias = torch.nn.Parameter(0.01 * torch.randn(draw.choice([1, 20_000]), width))
        self.last = torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.bias.mean(0)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def drawn_input(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_some(model: torch.nn.Module, draw: random.Random) -> list[float]:
    before = []
    for param in draw.sample(list(model.parameters()), 2):
        with gathered(param), torch.no_grad():
            before.append(param.double().sum().item())
            param.mul_(0.9)
    return before


def run(seed: int, folder: Any, offload: Callable[..., Any] | None = None) -> list[float]:
    """Returns what a random run finds on its way and at its end. `offload` gets the model, memory= and placement=."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    model = Layers(draw).to(dtype)
    for param in model.parameters():
        param.requires_grad_(draw.random() > 0.15)
    tier = draw.choice(["host", "nvme"])
    where = "host" if tier == "host" and draw.random() < 0.5 else f"nvme:{folder}"
    formats = ["fp32"] if dtype == torch.float32 else ["fp32", "split", "bf16-moments"]
    if offload is not None:
        offload(model, memory=divide(model, "auto").smallest()[0], placement=tier)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=where, state_format=draw.choice(formats)
    )
    found = []
    for call in range(16):
        what, x = draw.random(), drawn_input(100 * seed + call, dtype)
        if what < 0.2:
            with torch.no_grad():
                found.append(model(x).sum().item())
        elif what < 0.3:
            found += write_some(model, draw)
        else:
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.item())
        if draw.random() < 0.4:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return found + [param.double().sum().item() for param in model.parameters()]
