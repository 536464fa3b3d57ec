# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch's optimizers in Hugging Face's ``Trainer``.

    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts,
        optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement="nvme:/fast/run"),
        callbacks=[ziggurat.hf.EveryStep()],
    )
    ziggurat.hf.train(trainer)

A run that was killed at any instant and is started again continues from the newest step with the
same bits. As with Trainer's own checkpoints, a data set that draws random numbers in the main
process draws other numbers after a resume.

Trainer's checkpoints have the whole state, 8 to 12 bytes per parameter, and a run can continue from
each of them, with any placement. On NVMe the checkpoint's state replaces that of an existing store.
In optimizer.pt it is as torch.optim has it: torch's own optimizer can load that state, and ours can
load torch's. The state of an offloaded model, and one that memory has no room for, is in a folder
``ziggurat`` of the checkpoint instead, which is written and read a chunk at a time; torch's own
optimizer refuses such an optimizer.pt with a KeyError ('param_groups'). With ``state="store"``
optimizer.pt names the store and its step. Such a checkpoint is no larger for a larger model, but is
refused once the store is at a later step.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput

import ziggurat.torch
from ziggurat._checkpoint.resume import accelerators, random_states
from ziggurat._library.native import DataLoss, Engine, InvalidArgument, Unimplemented, ZigguratError
from ziggurat._optimizer.optimizer import EngineOptimizer
from ziggurat._optimizer.state import Groups
from ziggurat._streaming.streaming import streaming_of
from ziggurat._trainers.hf_deepspeed import config_of, names_optimizer, optimizer_of
from ziggurat._trainers.in_trainer import InTrainer, in_trainer, mark_saves

__all__ = ["EveryStep", "newest_step", "optimizer", "train"]

_FORMAT = 1
# the newest log entries, kept with each step: a store holds 1 MiB of the trainer's own data
_LOGS_MAX = 200

# The optimizers that TrainingArguments.optim names, and the settings that Trainer gives to each.
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
    """Returns Trainer's ``optimizer_cls_and_kwargs``: the optimizer that ``args.optim`` names, with
    the learning rate, betas, epsilon and weight decay of `args`. Biases and norms have no weight
    decay.

    `arguments` are ``placement``, ``state_format``, ``state`` and all else that ziggurat.torch's
    optimizers take; `config` may have them too, as a mapping or a JSON file. Each module waits for
    its own new parameters, unless ``model=None`` is given.

    `config` may also be a config for DeepSpeed, or Accelerate's YAML with a DeepSpeed plugin. It
    is read with DeepSpeed's meaning: `args` gives the values for "auto", and the optimizer is the
    config's own if it names one. State on a drive is in a directory of ``nvme_path`` named after
    ``args.output_dir``. The schedule is Trainer's. A config that contradicts `args` is refused.
    """
    theirs = None if config is None else config_of(config, args)
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _KINDS and theirs is not None and names_optimizer(theirs):
        name = "adamw_torch"  # the config's optimizer is used
    if name not in _KINDS:
        raise InvalidArgument(f'optim="{name}" is not known: ziggurat.hf has {", ".join(_KINDS)}')
    kind, used = _KINDS[name]
    settings: dict[str, Any] = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    settings = {name: settings[name] for name in used} | {"lr": args.learning_rate}
    if theirs is not None:
        pass  # reads the config once the model is known
    elif isinstance(config, str | Path):
        settings |= json.loads(Path(config).read_text())
    else:
        settings |= config or {}
    settings |= arguments

    def made(model: torch.nn.Module, **more: Any) -> EngineOptimizer:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if args.auto_find_batch_size and any(map(streaming_of, model.parameters())):
            raise Unimplemented(
                "auto_find_batch_size=True does not work with an offloaded model: after an error of "
                "memory Trainer begins the run again, but the engine has the model as the steps "
                "before left it: set per_device_train_batch_size, and auto_find_batch_size=False"
            )
        # The rule uses nothing of a Trainer.
        decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        groups = [
            {"params": [p for name, p in trained if name in decay]},
            {"params": [p for name, p in trained if name not in decay]},
        ]
        for group, weight_decay in zip(groups, (args.weight_decay, 0.0), strict=True):
            group["weight_decay"] = weight_decay
        chosen, all_settings = kind, settings
        if theirs is not None:
            named, own = optimizer_of(theirs, args, model)
            chosen, all_settings = named or kind, ({} if named else settings) | own | arguments
        optimizer = in_trainer(chosen)(groups, **({"model": model} | all_settings | more))
        mark_saves(model)
        whole = settings.get("state", "full") == "full" and not args.save_only_model
        if whole and args.save_strategy != "no" and args.world_size > 1:
            # checks it now, not at the first checkpoint; one rank puts it into a folder
            optimizer.look_at_memory(p for _, p in trained)
        return optimizer

    def chosen_by(*groups: Any, **more: Any) -> Any:
        # transformers 5 asks for what makes an optimizer of a model; 4 wants one at once, of groups of parameters.
        return made(_trainers_model(), **more) if groups else made

    return chosen_by, {}


def _trainers_model() -> torch.nn.Module:
    """Returns the model of the Trainer of transformers 4 that asks for an optimizer. It tells an optimizer the
    parameters alone, without names, so the model is taken from where it calls."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "create_optimizer":
        frame = frame.f_back
    trainer = frame.f_locals.get("self") if frame is not None else None
    if not isinstance(trainer, Trainer):
        raise Unimplemented(
            f"Trainer of transformers {transformers.__version__} does not tell ziggurat.hf the model: update "
            "transformers to 5, or give Trainer optimizers=(ziggurat.torch.AdamW(model.parameters(), ...), None)"
        )
    return trainer.model


def _unwrapped(optimizer: Any, who: str) -> InTrainer:
    """Returns the optimizer inside Accelerate's wrapper. Errors: InvalidArgument if it is not one
    of ziggurat.hf."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, InTrainer):
        raise InvalidArgument(
            f"{who}: the trainer's optimizer is {type(inner).__name__}, which is not one of "
            "ziggurat.hf: give Trainer "
            "optimizer_cls_and_kwargs=ziggurat.hf.optimizer(arguments, placement=...)"
        )
    inner.need_store(who)
    return inner


class EveryStep(TrainerCallback):
    """Keeps with each step in the store what Trainer needs to continue from it.

    A step becomes durable with what ``on_step_end`` finds: Trainer's state, the groups, the
    scheduler's state, and random states. Without this callback a run can continue from Trainer's
    checkpoints alone.
    """

    def __init__(self) -> None:
        self._optimizer: InTrainer | None = None
        self._scheduler: Any = None
        self._trainer: Any = None
        self.awaited = False  #: whether the newest step's state is not known yet

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        _need_one_rank(args, "EveryStep")
        self._optimizer, self._scheduler = _unwrapped(optimizer, "EveryStep"), lr_scheduler
        self._trainer, self.awaited = state, False
        self._optimizer._resume = None
        self._optimizer.open()
        self._optimizer._resume = self

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer = state
        self.before_step()

    def after_step(self) -> None:
        """Called when the optimizer has made a step whose other state is not known yet."""
        self.awaited = True

    def before_step(self) -> None:
        """Gives the newest step its state, because nothing more belongs to that step."""
        if not self.awaited or self._optimizer is None or self._optimizer.engine is None:
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
        self.awaited = False


def _need_one_rank(args: Any, who: str) -> None:
    if args.world_size > 1:
        raise Unimplemented(
            f"{who} on {args.world_size} ranks is not supported yet: resume from Trainer's "
            "checkpoints, or "
            "write the loop with ziggurat.torch.Resume"
        )


def train(trainer: Trainer, **arguments: Any) -> TrainOutput:
    """Calls ``trainer.train(**arguments)``, which continues from the newest step in the store, if
    there is one.

    A run that was killed after its last step makes no further step: model, optimizer and state are
    those of that step, and the training loss is not known (NaN). Trainer alone would make one more
    step.
    """
    newest = newest_step(trainer)
    if newest is None:
        return trainer.train(**arguments)
    try:
        state = TrainerState.load_from_json(str(Path(newest) / "trainer_state.json"))
        if not _has_ended(trainer.args, state):
            return trainer.train(resume_from_checkpoint=newest, **arguments)
        # as Trainer.train() leaves it
        trainer.optimizer = _prepared(trainer, trainer.create_optimizer())
        optimizer = _unwrapped(trainer.optimizer, "train()")
        optimizer.load_state_dict(torch.load(Path(newest) / "optimizer.pt", weights_only=True))
        trainer.state = state
        return TrainOutput(state.global_step, math.nan, {})
    finally:
        shutil.rmtree(newest, ignore_errors=True)


def _has_ended(args: Any, state: TrainerState) -> bool:
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return state.global_step >= state.max_steps and args.num_train_epochs <= state.num_train_epochs


def _as_trainer_has(random: dict[str, Any]) -> dict[str, Any]:
    """Returns a process's random states as Trainer stores them, for its own accelerator alone."""
    kind, keys, *rest = random["numpy"]
    states = {"python": random["python"], "cpu": random["torch"]}
    states["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    for name, module in accelerators():
        if name in random:
            states[name] = random[name][module.current_device()]
    return states


def _prepared(trainer: Trainer, optimizer: Any) -> Any:
    """Returns an optimizer in Accelerate's wrapper, which would otherwise take the state of an open
    one into memory, to move it to a device."""
    return trainer.accelerator.prepare(optimizer, device_placement=[False])


class _Weights:
    """Stands in for a trainer's method that loads a checkpoint's weights. Those of the newest step are
    in the model when its store is open."""

    def __init__(self, trainer: Trainer) -> None:
        self._load = trainer._load_from_checkpoint
        self.there = ""  #: the checkpoint of which the model has the weights

    def __call__(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.abspath(resume_from_checkpoint) == self.there:
            return None
        return self._load(resume_from_checkpoint, *args, **kwargs)


def newest_step(trainer: Trainer) -> str | None:
    """Returns the newest step in the store, for ``trainer.train(resume_from_checkpoint=...)``, or
    None if the store has no step.

    The step is a checkpoint in ``output_dir/newest-step`` that names the store, whatever ``state``
    is, and has no weights: the store is open, and the model has them. Only this `trainer` can go on
    from it. Trainer's own checkpoints are left alone. ``train()`` also handles a run that has ended.
    """
    who = "newest_step()"
    _need_one_rank(trainer.args, who)
    before = None if trainer.optimizer is None else _unwrapped(trainer.optimizer, who)
    if before is not None and before.engine is not None and before.newest is None:
        # an open store tells only what it was opened with
        before.close_for_another()
        trainer.optimizer = None
    optimizer = _unwrapped(trainer.create_optimizer(), who)
    optimizer.open(resume=True)
    assert optimizer.engine is not None
    if optimizer.engine.generation == 0:
        return None  # train() uses this optimizer
    try:
        kept = _kept_with(optimizer.engine)
    except ZigguratError:
        optimizer.close_for_another()  # whoever goes on otherwise may open the store
        trainer.optimizer = None
        raise
    folder = Path(os.path.abspath(trainer.args.output_dir or "."), "newest-step")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.save(optimizer.name_newest() | kept["optimizer"], folder / "optimizer.pt")
    torch.save(kept["scheduler"], folder / "scheduler.pt")
    torch.save(_as_trainer_has(kept["random"]), folder / "rng_state.pth")
    TrainerState(**json.loads(kept["trainer"])).save_to_json(str(folder / "trainer_state.json"))
    trainer.optimizer = _prepared(trainer, trainer.optimizer)
    if not isinstance(trainer._load_from_checkpoint, _Weights):
        trainer._load_from_checkpoint = _Weights(trainer)  # type: ignore[method-assign]
    trainer._load_from_checkpoint.there = str(folder)  # type: ignore[attr-defined]
    return str(folder)


def _kept_with(engine: Engine) -> dict[str, Any]:
    """Returns what EveryStep has kept with the step at which the store was opened. Errors: DataLoss if
    there is nothing, InvalidArgument for another format."""
    if not engine.blob:
        raise DataLoss(
            "the store was made without ziggurat.hf.EveryStep, or by a run that went back to a "
            "checkpoint and was ended before its next step, so it has no state of Trainer: resume "
            f"from Trainer's checkpoint of step {engine.generation}"
        )
    # weights_only admits plain data and tensors alone: loading a store runs no code.
    kept: dict[str, Any] = torch.load(io.BytesIO(engine.blob), weights_only=True)
    if kept.get("format") != _FORMAT or "trainer" not in kept:
        raise InvalidArgument(
            f"the store has no state that ziggurat.hf can read (format {_FORMAT}): resume from "
            "Trainer's newest checkpoint"
        )
    return kept
