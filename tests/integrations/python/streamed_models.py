# SPDX-License-Identifier: Apache-2.0
"""A small language model of blocks, for tests of what is brought block by block: they are skipped where this cannot be
imported, because PyTorch is older than offload() takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide

if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
    raise ImportError(f"PyTorch {torch.__version__} cannot exchange the memory of a storage")

VOCABULARY, WIDTH, LENGTH, DEPTH = 97, 64, 16, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.LayerNorm(WIDTH)
        # its out_proj is used without a call
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.after = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.after(x))


class Gpt(torch.nn.Module):
    """Its head is tied to the embedding. `checkpointing`: None, "reentrant" or "not reentrant"."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH * 4)
        self.narrow = torch.nn.Linear(WIDTH * 4, WIDTH, bias=False)
        self.position = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.widen = torch.nn.Linear(WIDTH, WIDTH * 4, bias=False)
        self.head = torch.nn.Linear(WIDTH * 4, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1).to(self.position.dtype)
        x = self.narrow(self.embedding(tokens)) + self.position[:length]
        for block in self.blocks:
            if self.checkpointing is None or not torch.is_grad_enabled():
                x = block(x, mask)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(block, x, mask, use_reentrant=reentrant)
        return self.head(self.widen(self.norm(x)))


def gpt(dtype: torch.dtype = torch.float32, checkpointing: str | None = None) -> Gpt:
    torch.manual_seed(1)
    return Gpt(checkpointing).to(dtype)


def tokens_of(step: int, batch: int = 4) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=made)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def train(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    steps: range,
    after_step: Callable[[int], Any] = lambda step: None,
    accumulate: int = 1,
    clip: float | None = None,
    loss_of: Callable[..., torch.Tensor] = loss_of,
) -> list[float]:
    """Returns the losses of all steps, and of an evaluation after each."""
    losses = []
    for step in steps:
        for part in range(accumulate):
            loss = loss_of(model, tokens_of(step * accumulate + part)) / accumulate
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, tokens_of(1000)).item())
        after_step(step)
    return losses


def memory_of(model: torch.nn.Module) -> int:
    """Returns the least memory with which the model can be offloaded."""
    return divide(model, "auto").smallest()[0]


def pinned(model: torch.nn.Module) -> list[str]:
    streaming, _ = streaming_of(next(model.parameters()))
    return [unit.name for unit in streaming.units if unit.pins]


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_run(one: tuple[Any, dict[str, torch.Tensor]], other: tuple[Any, dict[str, torch.Tensor]]) -> None:
    """Compares what two runs found on the way, and the values of their models."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def offloaded(model: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    """Returns an optimizer of the model, which has made a step; its parameters are away."""
    ziggurat.torch.offload(model, memory=memory_of(model), **arguments)
    return stepped(model)


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of the model, which has made a step."""
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    return optimizer


def same_with_and_without(run: Callable[[Callable[..., Any]], Any]) -> None:
    """Compares what `run` returns, which gets a function to offload a model with, and one that does
    nothing."""

    def offload(model: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        memory = arguments.pop("memory", None) or memory_of(model)
        return ziggurat.torch.offload(model, memory=memory, **arguments)

    plain = run(lambda model, **arguments: model)
    assert run(offload) == plain
