# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers.Trainer with a model that takes more than twice its memory, for tests that compare
their bits."""

import os
import signal

import torch
import transformers
from language_models import assert_same_bits, batches, gpt2, llama
from streamed_models import memory_of

import ziggurat.hf
import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of

HOMES = {"host": "host", "nvme": "params=nvme,grads=nvme"}


def long_llama(seed=1, **changes):
    return llama(seed, num_hidden_layers=8, **changes).bfloat16()


def long_gpt2(seed=1, **changes):
    return gpt2(seed, n_layer=8, **changes)


class Texts(torch.utils.data.Dataset):
    def __init__(self, count=48, lengths=(32,)):
        pieces = torch.cat(batches(count // 4))
        self.pieces = [one[: lengths[i % len(lengths)]] for i, one in enumerate(pieces)]

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def collated(items):
    """Pads to the longest."""
    names = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [item[name] for item in items], batch_first=True, padding_value=padding
        )
        for name, padding in names.items()
    }


def offload(model, home):
    memory = memory_of(model)
    size = sum(param.numel() * param.element_size() for param in model.parameters())
    assert size > 2 * memory
    return ziggurat.torch.offload(model, memory=memory, placement=HOMES[home])


def trainer_of(folder, build, home, kind="", callbacks=(), lengths=(32,), engine=None, **more):
    """`home`: where parameters are, or None without offload(). The state is in the same place with both, unless
    `engine`, which the optimizer takes, has another one."""
    model = build()
    if home is not None:
        offload(model, home)
    common = {
        "output_dir": str(folder / "out"),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = getattr(transformers, f"{kind}TrainingArguments")(**(common | more))
    where = "host" if home == "host" else f"nvme:{folder}/state"
    trainer = getattr(transformers, f"{kind}Trainer")(
        model,
        arguments,
        data_collator=collated,
        train_dataset=Texts(lengths=lengths),
        eval_dataset=Texts(8),
        callbacks=[*callbacks],
    )
    # as a parameter of the constructor, which Seq2SeqTrainer lacks
    engine = {"placement": where, "threads": 1} | (engine or {})
    trainer.optimizer_cls_and_kwargs = ziggurat.hf.optimizer(arguments, **engine)
    return trainer


def values(model):
    found = []
    for param in model.parameters():
        with ziggurat.torch.gathered(param):
            found.append(param.detach().clone())
    return found


_MEASURED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def measured(trainer):
    lines = trainer.state.log_history
    return [(name, line[name]) for line in lines for name in _MEASURED if name in line]


def ended(trainer):
    """What was logged, and the model's values in the end."""
    optimizer = trainer.optimizer.optimizer
    streaming = streaming_of(next(trainer.model.parameters()))
    if streaming is not None:
        assert all(unit.pins == 0 for unit in streaming[0].units)
        assert "away" in repr(next(trainer.model.parameters()))
    optimizer.synchronize()
    found = measured(trainer), values(trainer.model)
    optimizer.close()
    return found


def assert_same(one, other):
    assert one[0] == other[0]
    assert_same_bits(one[1], other[1])


class Stop(transformers.TrainerCallback):
    """Kills its own process once the engine has made some steps."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def without_room():
    """Makes memory too small for two models in this process, which goes on with files. There is room for
    a parameter."""
    ziggurat._streaming.streaming.free_bytes = lambda: 100_000
    ziggurat._memory.file_memory.LARGE_BYTES = 1 << 12
