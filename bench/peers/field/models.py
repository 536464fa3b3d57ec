# SPDX-License-Identifier: Apache-2.0
"""The models that the scripts share, and the checks of what is right for each."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Mapping, Sequence

import torch
from field.jobs import Wrong
from torch import Tensor

SPACING = 2**-8  # between bf16 numbers around 1
WORDS_MAX = 100


def brief(error: BaseException) -> str:
    """Returns the type and the first words of an error, fit for a table's cell."""
    words = " ".join(str(error).split()).replace("|", "/").replace("`", "'")
    if len(words) > WORDS_MAX:
        words = words[:WORDS_MAX].rsplit(" ", 1)[0] + " ..."
    return f"`{type(error).__name__}: {words}`"


def values_of(model: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


class Net(torch.nn.Module):
    """An embedding, two layers and a head; the head can be tied to the embedding."""

    def __init__(self, seed: int, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = torch.nn.Embedding(17, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])
        self.head = torch.nn.Linear(width, 17, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def compiled(model: Net, what: str) -> torch.nn.Module:
    if what == "whole":
        return torch.compile(model, backend="eager")
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="eager")
    return model


def loss_of(model: torch.nn.Module, step: int = 0) -> Tensor:
    torch.manual_seed(step)
    tokens = torch.randint(17, (4, 5))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_loaded(found: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    other = sum(not torch.equal(a, b) for a, b in zip(found, saved, strict=True))
    if other:
        raise Wrong(f"{other} of {len(saved)} tensors are not those that were saved")


def check_tied(model: Net, saved: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    if model.head.weight is not model.emb.weight:
        raise Wrong("head and embedding are two tensors after the load")
    check_loaded(found, saved)


def check_fives(found: Sequence[Tensor]) -> None:
    """Checks report 6: loaded weights of 5, after steps of 1e-3."""
    means = [float(value.float().mean()) for value in found]
    if any(abs(mean - 5) > 0.1 for mean in means):
        raise Wrong(f"weights of 5.0 that were loaded are {means[0]:.2f} after steps of 1e-3")


def check_decayed(value: Tensor) -> None:
    """Checks report 12: ones that lost 1e-4 of themselves 400 times."""
    mean = float(value.float().mean())
    if abs(mean - 0.9999**400) > SPACING:
        raise Wrong(f"the mean is {mean:.4f}, and {0.9999**400:.4f} is right")


def pair(seed: int) -> torch.nn.ParameterDict:
    """Returns report 7's two parameters of one shape."""
    torch.manual_seed(seed)
    return torch.nn.ParameterDict({name: torch.randn(6, 4) for name in "ab"})


def gradients_of_pair(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: (1 + 9 * (name == "a")) * torch.randn(6, 4) for name in "ab"}


class Pair(torch.nn.Module):
    """The pair as a module, whose loss has the pair's gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, value in pair(seed).items():
            self.register_parameter(name, torch.nn.Parameter(value.detach().clone()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return (self.a * gradients["a"]).sum() + (self.b * gradients["b"]).sum()


def check_moments(found: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if torch.equal(found["a"], saved["b"]) and torch.equal(found["b"], saved["a"]):
        raise Wrong("parameter a has the moments of b, and b has those of a")
    if not all(torch.equal(found[name], saved[name]) for name in "ab"):
        raise Wrong("moments are not those that were saved")


@contextlib.contextmanager
def files_end_at(count: int) -> Iterator[None]:
    """Lets a write past `count` bytes fail with EFBIG in mid-write, as on a full disk (report
    9)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def said_of(error: BaseException | None) -> str:
    """Returns what the error of a failed save lacks (report 9)."""
    if error is None:
        raise Wrong("the failed save raised no error")
    words = str(error)
    lacks = [] if "step" in words else ["path"]
    if not any(cause in words for cause in ("File too large", "Errno 27")):
        lacks.append("cause")
    return f"; the error names no {' and no '.join(lacks)}" if lacks else ""
