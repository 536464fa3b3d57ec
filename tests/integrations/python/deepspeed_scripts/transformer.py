# SPDX-License-Identifier: Apache-2.0
"""What the scripts beside it train: a small transformer over the bytes of a text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

VOCABULARY = 256  # a token is a byte


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.norm_2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Transformer(torch.nn.Module):
    """Gives the logits, or the loss where it is told what comes next."""

    def __init__(
        self, layers: int = 2, width: int = 64, heads: int = 4, positions: int = 32
    ) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(positions, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text with what follows each of their bytes."""

    def __init__(self, paths: list[Path], length: int = 32, held_out: bool = False) -> None:
        read = bytearray(b"".join(path.read_bytes() for path in paths))
        text = torch.frombuffer(read, dtype=torch.uint8).long()
        cut = len(text) * 9 // 10
        self.text, self.length = (text[cut:] if held_out else text[:cut]), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """That of a step, which is the same in every run."""
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.text) - self.length, (size,), generator=draw).tolist()
        rows = torch.stack([self.text[s : s + self.length + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]
