# SPDX-License-Identifier: Apache-2.0
"""What the tests of ZeRO stage 3 train: small blocks, with a config of parameters on a device."""

import torch

import ziggurat.deepspeed as deepspeed

WIDTH, DEPTH = 256, 6
UNIT = WIDTH * WIDTH + 3 * WIDTH  # elements of a block


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = torch.nn.Linear(WIDTH, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def config(folder, param="cpu", state="cpu", *, stage=3, offload_param=None, more=None, **keys):
    """Of parameters on `param` and state on `state`, with memory for two blocks unless `keys` say else."""
    nvme = {"nvme_path": str(folder)}
    zero = {
        "stage": stage,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": state} | (nvme if state == "nvme" else {}),
    }
    if param is not None:
        its = {"device": param} | (nvme | {"max_in_cpu": 0, "buffer_count": 0} if param == "nvme" else {})
        zero["offload_param"] = its | (offload_param or {})
    return {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero | keys,
    } | (more or {})


def made(settings, model=None):
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Model() if model is None else model()
    return deepspeed.initialize(model=model, config=settings)[0]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        loss = engine(torch.randn(8, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bits(engine):
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def figures(settings, model=None):
    """What a step does when the order of the units is known."""
    engine = made(settings, model)
    train(engine, 0, 4)
    engine.optimizer.figures()
    train(engine, 4, 5)
    found = engine.optimizer.figures()
    engine.destroy()
    return found
