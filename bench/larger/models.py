# SPDX-License-Identifier: Apache-2.0
"""Llama-shaped models of a size that is asked for, and what a process that trains one takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

MIB = 1 << 20


class Shape(NamedTuple):
    """A model's blocks, the width of its activations, and its vocabulary."""

    blocks: int
    width: int
    vocabulary: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """Reads BLOCKSxWIDTHxVOCABULARY."""
        return cls(*map(int, text.split("x")))

    @property
    def config(self) -> Any:
        return transformers.LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 43 // 16,
            num_hidden_layers=self.blocks,
            num_attention_heads=max(1, self.width // 128),
            num_key_value_heads=max(1, self.width // 128),
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


def built(shape: Shape) -> Any:
    """Draws the values; within streamed_init() they lie in files. Blocks are computed again in backward."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(shape.config).train()
    model.gradient_checkpointing_enable()
    return model


def batch(shape: Shape, step: int, tokens: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 + step)
    return torch.randint(shape.vocabulary, (1, tokens), generator=made)


def of_process(name: str) -> int:
    """Returns a size that the kernel knows of this process, in bytes: VmRSS, RssAnon, VmHWM."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    """Lets VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")
