# SPDX-License-Identifier: Apache-2.0
"""Translates the advice in the engine's messages into the words of the Python caller.

A message names a setting in backticks: `store`, or `resume=auto`. For ``ziggurat.torch`` that
becomes an argument or a call (:func:`in_arguments`); advice that has no such translation is left
out. For ``ziggurat.Engine`` settings keep their names (:func:`in_settings`). Both translations are
defined in this file alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_QUOTED = re.compile(r"`([^`]*)`")
#: Separates what a message says from its advice, and one piece of advice from the next.
_BETWEEN = re.compile(r"(: |; |, or |, |\. (?=[A-Z]))")
_GIVE = re.compile(r"give |use |or |Give ")
_GOES_ON = re.compile(r"which |that |in ")

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _class_of(optimizer: str) -> str:
    from ziggurat._library.state_kinds import optimizers  # which calls the library, whose errors come here

    its = optimizers().get(optimizer or "adamw")
    return optimizer if its is None else its.title


def _argument(name: str) -> Callable[[str], str]:
    return lambda value: f'{name}="{value}"' if value else name


def _number(name: str) -> Callable[[str], str]:
    return lambda value: f"{name}={value}" if value else name


def _place(value: str) -> str:
    tier = value.removeprefix("optimizer=")
    return f'placement="{"nvme:/path" if tier in ("", "nvme") else tier}"'


def _resume(value: str) -> str | None:
    calls = {
        "auto": "Resume(optimizer) or optimizer.open(resume=True)",
        "reshard": 'resume="reshard"',
        "never": "an empty directory",
    }
    return calls.get(value)


#: What ziggurat.torch's optimizers have for each setting, by its value; None if they have nothing.
ARGUMENTS: dict[str, Callable[[str], str | None] | None] = {
    "betas": _number("betas"),
    "checkpoint_bandwidth": _number("bandwidth"),
    "checkpoint_stall_max": _number("stall_max"),
    "clip": lambda value: "torch.nn.utils.clip_grad_norm_()",
    "dtype": lambda value: f"model.to(torch.{_DTYPES.get(value, 'dtype')})",
    "eps": _number("eps"),
    "host_memory": _argument("host_memory"),
    "hpz": _number("hpz"),
    "load_partial": lambda value: "strict=False",
    "load_rename": lambda value: "rename=",
    "lr": _number("lr"),
    "optimizer": lambda value: f"ziggurat.torch.{_class_of(value)}",
    "param_groups": lambda value: "param_groups",
    "param_rounding": _argument("param_rounding"),
    "placement": _place,
    "quantized_gradients": _number("quantized_gradients"),
    "quantized_weights": lambda value: "quantized_weights=True",
    "ranks_per_node": _number("ranks_per_node"),
    "reduce_dtype": _number("reduce_dtype"),
    "resume": _resume,
    "run": lambda value: "names and shapes of the parameters",
    "shard_group": _number("shard_group"),
    "slots": _number("slots"),  # a store keeps the number of slots it was made with
    "state_format": _argument("state_format"),
    "state_rounding": _argument("state_rounding"),
    "store": lambda value: f'placement="nvme:{value or "/path"}"',
    "threads": _number("threads"),
    "weight_decay": _number("weight_decay"),
} | dict.fromkeys(
    [
        "activation_checkpointing",
        "batch",
        "accumulate",
        "checkpoint_dir",
        "collectives",
        "device",
        "device_memory",
        "durable_every",
        "durable_every_steps",
        "first_elements",
        "force",
        "pieces",
        "wholes",
        "initial_accumulator",
        "json",
        "max_live_parameters",
        "max_reuse_distance",
        "min_loss_scale",
        "model",
        "nproc",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "profile",
        "reduce_bucket_size",
        "rounding",
        "speculate",
        "strategy",
        "tp",
        "trace",
        "tune",
        "warmup_max_lr",
        "zero_stage",
    ]
)


def in_settings(message: str) -> str:
    """Writes `resume=auto` as "resume": "auto", which is how ziggurat.Engine's settings write
    it."""

    def setting(found: re.Match[str]) -> str:
        name, equals, value = found[1].partition("=")
        return f'"{name}": "{value}"' if name in ARGUMENTS and equals else found[0]

    return _QUOTED.sub(setting, message)


def in_arguments(message: str) -> str:
    """Writes settings as arguments of ziggurat.torch's optimizers; leaves out advice that none of
    them can follow."""
    first, *others = _BETWEEN.split(message)
    text = _QUOTED.sub(lambda found: _told(found[1]), first)
    left_out = False
    for between, piece in zip(others[::2], others[1::2], strict=True):
        if left_out and between == ", " and _GOES_ON.match(piece):
            continue  # the end of what was left out
        words = [_translated(quoted) for quoted in _QUOTED.findall(piece)]
        left_out = None in words
        if not left_out:
            rest = iter(words)
            text += between + _QUOTED.sub(lambda _, rest=rest: str(next(rest)), piece)
        elif (verb := _GIVE.match(piece)) and between in (": ", "; ", ". "):
            text += between + verb[0]  # "Give A, or B" becomes "Give B"
    return _mended(text)


def _translated(quoted: str) -> str | None:
    name, _, value = quoted.partition("=")
    if name not in ARGUMENTS:
        return f"`{quoted}`"  # not a setting, but a command or a key of another config
    its = ARGUMENTS[name]
    return None if its is None else its(value)


def _told(quoted: str) -> str:
    """Translates a setting that a message is about, not one that it advises."""
    return _translated(quoted) or quoted


def _mended(text: str) -> str:
    """Mends the text where advice was left out."""
    text = re.sub(r"(: |; |\. )([Gg]ive |use )(, or |, )", r"\1\2", text)
    text = re.sub(r"(: |; |\. )([Gg]ive |use |or )(?=\. |; |$)", "", text)
    return text
