# SPDX-License-Identifier: Apache-2.0
"""A training that foreign_test.py goes on with, and the script that begins it under DeepSpeed.

    torchrun --nproc-per-node 2 foreign_runs.py FOLDER CASE...

Each CASE is STAGE-TYPE, as "2-bf16", or STAGE-TYPE-VARIANT with one of VARIANTS. A rank trains,
saves to FOLDER/CASE, and trains on; rank 0 writes the losses of those later steps, the mean of the
ranks', to FOLDER/CASE.json. A case that takes more than $PATIENCE seconds says where it waits, and
ends its rank.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
from rank_end import end_rank

BEFORE, AFTER = 6, 10  # steps, and those behind the checkpoint
LR, DECAY = 1e-2, 0.1


# What changes where DeepSpeed puts things, or which of its optimizers has them.
VARIANTS = {
    "": {},
    "robin": {"zero_optimization": {"round_robin_gradients": True}},
    "aligned": {"zero_optimization": {"parameter_alignment": True}},
    "summed": {"data_types": {"grad_accum_dtype": "fp32"}},
    "device": {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
    "torch": {"optimizer": {"params": {"torch_adam": True}}},
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "adagrad": {"optimizer": {"type": "Adagrad"}},
}


class Model(torch.nn.Module):
    """With what checkpoints have trouble with: a weight of two names, frozen ones, a buffer, and
    sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(61, 37)
        self.frozen = torch.nn.Linear(37, 37)
        self.middle = torch.nn.Linear(37, 37)
        self.norm = torch.nn.LayerNorm(37)
        self.register_buffer("scale", torch.rand(37) + 0.5)
        self.head = torch.nn.Linear(37, 61)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens).mean(1))
        hidden = self.norm(torch.nn.functional.gelu(self.middle(hidden)))
        return self.head(hidden * self.scale.to(hidden.dtype))


def new_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    model = Model().to(dtype)
    model.scale = model.scale.float()
    return model


def groups_of(model: torch.nn.Module) -> list[dict]:
    """Two, as trainers make them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def loss_of(model: torch.nn.Module, step: int, rank: int, ranks: int = 2) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 + ranks * step + rank)
    tokens = torch.randint(61, (8, 9), generator=draws)
    return torch.nn.functional.cross_entropy(model(tokens[:, :8]).float(), tokens[:, 8])


def config_of(case: str) -> dict:
    stage, dtype, *variant = case.split("-")
    zero = {"stage": int(stage), "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1000}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }
    for section, changed in VARIANTS["".join(variant)].items():
        before = config.get(section, {})
        config[section] = {**before, **changed}
        if "params" in changed:
            config[section]["params"] = {**before.get("params", {}), **changed["params"]}
    return config


def run(folder: Path, case: str) -> None:
    import deepspeed

    model = new_model()
    engine = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=config_of(case)
    )[0]
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            engine.save_checkpoint(str(folder / case))
        loss = loss_of(engine, step, rank, ranks)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if rank == 0:
        (folder / f"{case}.json").write_text(json.dumps(losses[BEFORE:]))
    engine.destroy()


if __name__ == "__main__":
    faulthandler.enable()
    patience = float(os.environ.get("PATIENCE", "300"))
    faulthandler.dump_traceback_later(patience, exit=True)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for case in sys.argv[2:]:
        faulthandler.dump_traceback_later(patience, exit=True)
        run(Path(sys.argv[1]), case)
    torch.distributed.barrier()
    end_rank()
