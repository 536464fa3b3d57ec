# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch's optimizers in Hugging Face's ``Trainer``.

    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts,
        optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement="nvme:/fast/run"),
        callbacks=[ziggurat.hf.EveryStep()],
    )
    trainer.train(resume_from_checkpoint=ziggurat.hf.newest_step(trainer))

Killed at any instant and started again, this goes on from the newest step with the same bits. As
with Trainer's own checkpoints, a data set that draws random numbers in the main process has others
behind a resume.

A checkpoint of Trainer's has no masters and moments: its optimizer.pt names the store and the step.
To resume from it is an error where the store has gone on: ``newest_step()`` is what goes on from
there. With ``placement="host"`` nothing can be resumed.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

import ziggurat.torch
from ziggurat._native import DataLoss, InvalidArgument
from ziggurat._optimizer import EngineOptimizer
from ziggurat._resume import random_states
from ziggurat._state import Groups

__all__ = ["EveryStep", "newest_step", "optimizer"]

_REFERENCE = "ziggurat"  # in an optimizer's state_dict(): the store, and its step
_FORMAT = 1
_LOGS_MAX = 200  # of the newest, with each step: a store takes 1 MiB of the trainer's own

# What TrainingArguments.optim names, and which of its settings Trainer gives to that optimizer.
_KINDS: dict[str, tuple[type[EngineOptimizer], tuple[str, ...]]] = {
    "adamw_torch": (ziggurat.torch.AdamW, ("betas", "eps")),
    "adamw_torch_fused": (ziggurat.torch.AdamW, ("betas", "eps")),
    "lion_32bit": (ziggurat.torch.Lion, ("betas",)),
    "sgd": (ziggurat.torch.SGD, ()),
    "adagrad": (ziggurat.torch.Adagrad, ()),
}


def optimizer(
    args: Any, config: Mapping[str, Any] | str | Path | None = None, **arguments: Any
) -> tuple[Callable[[], Callable[..., EngineOptimizer]], dict[str, Any]]:
    """Trainer's ``optimizer_cls_and_kwargs``: what ``args.optim`` names, with the learning rate,
    betas, epsilon and weight decay of `args`, which biases and norms do not have.

    `arguments` are ``placement``, ``state_format`` and all else that ziggurat.torch's optimizers
    take; `config` has them too, as a mapping or a JSON file. New parameters are waited for module by
    module, unless ``model=None`` is given.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _KINDS:
        raise InvalidArgument(f'optim="{name}": ziggurat.hf has {", ".join(_KINDS)}')
    kind, used = _KINDS[name]
    settings: dict[str, Any] = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    settings = {name: settings[name] for name in used} | {"lr": args.learning_rate}
    if isinstance(config, str | Path):
        settings |= json.loads(Path(config).read_text())
    else:
        settings |= config or {}
    settings |= arguments

    def made(model: torch.nn.Module, **more: Any) -> EngineOptimizer:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # The rule uses nothing of a Trainer.
        decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        groups = [
            {"params": [p for name, p in trained if name in decay]},
            {"params": [p for name, p in trained if name not in decay]},
        ]
        for group, weight_decay in zip(groups, (args.weight_decay, 0.0), strict=True):
            group["weight_decay"] = weight_decay
        return _in_trainer(kind)(groups, **({"model": model} | settings | more))

    return lambda: made, {}


class _InTrainer(EngineOptimizer):
    """``state_dict()`` names the store and its step, and ``load_state_dict()`` goes on from those."""

    def state_dict(self) -> dict[str, Any]:
        state = Groups(self).state_dict()
        state[_REFERENCE] = self._reference()
        return state

    def _reference(self) -> dict[str, Any]:
        if self.engine is None:
            return {"store": None, "step": 0, "checksum": 0}
        if self._path is not None:
            if self._resume is not None:
                self._resume.before_step()
            self.engine.make_durable()
        step = self.engine.generation
        return {"store": self._path, "step": step, "checksum": self._checksum()}

    def _checksum(self) -> int:
        """Of all parameters."""
        self.synchronize()
        checksum = 0
        for param in self._place:
            flat = param.detach().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(flat.numpy().data, checksum)
        return checksum

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get(_REFERENCE)
        if saved is None:
            raise InvalidArgument(
                "the checkpoint's optimizer.pt is another optimizer's, and its moments cannot be "
                "taken over: give the model its weights, and train without resume_from_checkpoint"
            )
        Groups(self).load_state_dict({k: v for k, v in state_dict.items() if k != _REFERENCE})
        if saved["step"] == 0:
            return
        if saved["store"] is None or self._path is None:
            which = "the checkpoint was" if saved["store"] is None else "this run is"
            raise InvalidArgument(
                f'{which} made with placement="host", which ends with the process: its masters and '
                'moments are gone; give "nvme:/path" to resume'
            )
        if self.engine is None:
            self.open(resume=True)
        assert self.engine is not None
        found = self.engine.generation
        if found != saved["step"] or self._checksum() != saved["checksum"]:
            other = f"is at step {found}" if found != saved["step"] else "has other parameters"
            raise InvalidArgument(
                f"the checkpoint is of step {saved['step']} of the store {saved['store']}, and "
                f"{self._path} {other}: resume from ziggurat.hf.newest_step(trainer), or train "
                "without resume_from_checkpoint into a new directory"
            )


def _in_trainer(kind: type[EngineOptimizer]) -> type[EngineOptimizer]:
    return type(kind.__name__, (_InTrainer, kind), {})


def _unwrapped(optimizer: Any) -> _InTrainer:
    """Accelerate's wrapper has the optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, _InTrainer):
        raise InvalidArgument(
            f"the trainer's optimizer is {type(inner).__name__}: give Trainer "
            "optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement=...)"
        )
    if inner._path is None:
        raise InvalidArgument('with placement="host" no step is durable: give "nvme:/path"')
    return inner


class EveryStep(TrainerCallback):
    """Keeps with each step in the store what Trainer needs to go on from it.

    A step is durable with what ``on_step_end`` finds: Trainer's state, the groups, the scheduler's,
    and random states. Without this callback a run can be resumed from Trainer's newest checkpoint,
    and only if it made no step since.
    """

    def __init__(self) -> None:
        self._optimizer: _InTrainer | None = None
        self._scheduler: Any = None
        self._trainer: Any = None
        self._awaited = False

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        self._optimizer, self._scheduler = _unwrapped(optimizer), lr_scheduler
        self._trainer, self._awaited = state, False
        self._optimizer._resume = None
        self._optimizer.open()
        self._optimizer._resume = self

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer = state
        self.before_step()

    def after_step(self) -> None:
        """The optimizer has made a step; what belongs to it is not yet known."""
        self._awaited = True

    def before_step(self) -> None:
        """Nothing more belongs to the newest step."""
        if not self._awaited or self._optimizer is None or self._optimizer.engine is None:
            return
        logs = self._trainer.log_history[-_LOGS_MAX:]
        state = dataclasses.asdict(dataclasses.replace(self._trainer, log_history=logs))
        memory = io.BytesIO()
        torch.save(
            {
                "format": _FORMAT,
                "trainer": json.dumps(state),
                "optimizer": Groups(self._optimizer).state_dict(),
                "scheduler": self._scheduler.state_dict(),
                "random": random_states(),
            },
            memory,
        )
        self._optimizer.engine.give_blob(memory.getvalue())
        self._awaited = False


def newest_step(trainer: Trainer) -> str | None:
    """The newest step in the store as a checkpoint in ``output_dir``; None where there is no step.

    For ``trainer.train(resume_from_checkpoint=...)``. A checkpoint of that step that is there
    already is replaced: the run may have been killed while it was written.
    """
    before = trainer.optimizer
    if before is not None and _unwrapped(before).engine is not None:
        _unwrapped(before).close()  # an open store tells only what it was opened with
        trainer.optimizer = None
    optimizer = _unwrapped(trainer.create_optimizer())
    optimizer.open(resume=True)
    assert optimizer.engine is not None
    if optimizer.engine.generation == 0:
        return None  # train() goes on with this optimizer
    blob = optimizer.engine.blob
    if not blob:
        raise DataLoss(
            "the store was made without ziggurat.hf.EveryStep: it has no state of Trainer's; resume "
            "from Trainer's newest checkpoint"
        )
    # Plain data and tensors only: a store runs no code.
    kept = torch.load(io.BytesIO(blob), weights_only=True)
    if kept.get("format") != _FORMAT or "trainer" not in kept:
        raise InvalidArgument("the store's state of the trainer is not that of ziggurat.hf")
    state = TrainerState(**json.loads(kept["trainer"]))
    folder = Path(trainer.args.output_dir or ".") / f"checkpoint-{state.global_step}"
    part = folder.with_name(f"part-of-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    trainer.save_model(str(part))
    saved = kept["optimizer"] | {_REFERENCE: optimizer._reference()}
    torch.save(saved, part / "optimizer.pt")
    torch.save(kept["scheduler"], part / "scheduler.pt")
    kind, keys, *rest = kept["random"]["numpy"]
    random = {"python": kept["random"]["python"], "cpu": kept["random"]["torch"]}
    random["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    torch.save(random, part / "rng_state.pth")
    state.save_to_json(str(part / "trainer_state.json"))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    # Trainer loads the weights, and then makes the optimizer that goes on: masters would be taken
    # anew from the parameters if one were there.
    optimizer.close()
    trainer.optimizer = None
    return str(folder)
