# SPDX-License-Identifier: Apache-2.0
"""Small GPT-2 and Llama models with random weights, real text, and runs that must be alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import ziggurat.torch

VOCABULARY = 256  # a token is a byte
WIDTH = 64
MAJOR = int(transformers.__version__.partition(".")[0])  # of the version of transformers: 4 or 5

Model = torch.nn.Module
Loop = Callable[[Any, Callable[..., Any]], list[float]]


def gpt2(seed: int = 1, **changes: Any) -> Any:
    """Its output layer and its embedding are one parameter."""
    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**(shape | silent | ends | changes))
    ).train()


def llama(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(shape | heads | ends | changes))
    ).train()


def text() -> torch.Tensor:
    """The repository's LICENSE, byte by byte: a text that stays as it is."""
    read = (Path(__file__).parents[3] / "LICENSE").read_bytes()
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long()


def batches(count: int, size: int = 4, length: int = 32) -> list[torch.Tensor]:
    """Pieces of the text: the same ones each time."""
    tokens, draw = text(), torch.Generator().manual_seed(3)
    starts = torch.randint(len(tokens) - length, (count, size), generator=draw)
    return [torch.stack([tokens[s : s + length] for s in batch]) for batch in starts]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def bits(model: Model) -> list[torch.Tensor]:
    as_integers = {2: torch.int16, 4: torch.int32}
    return [p.detach().view(as_integers[p.element_size()]).clone() for p in model.parameters()]


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    differ = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]
    assert not differ, f"parameters {differ} differ"


def trained(
    build: Callable[[], Model],
    loop: Loop,
    placement: str = "host",
    threads: int = 1,
    waits: bool = False,
    **arguments: Any,
) -> tuple[list[float], list[torch.Tensor]]:
    """What `loop(model, adamw)` returns, and the parameters' bits after it.

    `waits`: new parameters are waited for module by module, not in ``step()``.
    """
    model = build()
    made: list[Any] = []

    def adamw(params: Any, model: Any = model, **more: Any) -> Any:
        where = f"{placement}-{len(made)}" if placement != "host" else placement
        made.append(
            ziggurat.torch.AdamW(
                params,
                placement=where,
                threads=threads,
                model=model if waits else None,
                **(arguments | more),
            )
        )
        return made[-1]

    values = loop(model, adamw)
    for optimizer in made:
        optimizer.close()
    return values, bits(model)


def trained_by_torch(
    build: Callable[[], Model], loop: Loop
) -> tuple[list[float], list[torch.Tensor]]:
    def adamw(params: Any, model: Any = None, **more: Any) -> Any:
        optimizer = torch.optim.AdamW(params, **more)
        optimizer.synchronize = lambda: None  # type: ignore[attr-defined]
        return optimizer

    model = build()
    return loop(model, adamw), bits(model)


def assert_alike(
    tmp_path: Path, build: Callable[[], Model], loop: Loop, *, torchs: float | None = 1e-4
) -> None:
    """In host memory and on NVMe with waits in the forward: the same bits. What the loop returns is
    PyTorch's within `torchs`, relative; None: there is no such run."""
    values, host = trained(build, loop)
    on_nvme = trained(build, loop, f"nvme:{tmp_path}/state", threads=2, waits=True)
    assert on_nvme[0] == values
    assert_same_bits(on_nvme[1], host)
    if torchs is not None:
        expected, _ = trained_by_torch(build, loop)
        torch.testing.assert_close(
            torch.tensor(values), torch.tensor(expected), rtol=torchs, atol=torchs
        )
