# SPDX-License-Identifier: Apache-2.0
"""A rank of Trainer's, which torchrun starts for hf_ranks_test.py.

    torchrun --nproc-per-node N hf_ranks_runs.py FOLDER NAME STEPS PLACEMENT STATE [CHECKPOINT]

Trains to step STEPS, from CHECKPOINT where one is given, saving every two steps to FOLDER/NAME. Rank
0 writes FOLDER/NAME.pt: the losses, and weights and state of the optimizer as they were when
training began and as they are in the end.
"""

import sys
from pathlib import Path

import torch
import transformers
from language_models import batches, gpt2
from rank_end import end_rank

import ziggurat.hf


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.pieces = torch.cat(batches(12))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Watch(transformers.TrainerCallback):
    """What the first step begins with."""

    def __init__(self):
        self.begun = None

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if self.begun is None:
            self.begun = found(model, optimizer)


def found(model, optimizer):
    inner, ours = getattr(model, "module", model), optimizer
    while hasattr(ours, "optimizer"):
        ours = ours.optimizer
    ours.synchronize()
    weights = {name: value.clone() for name, value in inner.state_dict().items()}
    names = {param: name for name, param in inner.named_parameters()}
    state = {names[p]: ours.state_of(p) for group in ours.param_groups for p in group["params"]}
    return {"weights": weights, "state": state, "lr": [g["lr"] for g in ours.param_groups]}


def run(folder, name, steps, placement, state, checkpoint=None):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / name),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        eval_on_start=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    made = ziggurat.hf.optimizer(arguments, placement=placement, state=state, threads=1)
    watch = Watch()
    trainer = transformers.Trainer(
        gpt2().bfloat16(),
        arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        optimizer_cls_and_kwargs=made,
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    end = found(trainer.model, trainer.optimizer)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if arguments.process_index == 0:
        torch.save({"losses": losses, "begun": watch.begun, "end": end}, folder / f"{name}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    trainer.optimizer.optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    end_rank()
