# SPDX-License-Identifier: Apache-2.0
"""What the engine's messages advise, in what a Python script has. words_test.py ROOT

Run by pytest; as a script it exits with 77 where pytest is missing.
"""

import os
import re
import sys
from pathlib import Path

try:
    import pytest
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from ziggurat._words import ARGUMENTS, in_arguments, in_settings

ROOT = Path(os.environ.get("ZIGGURAT_SOURCE", Path(__file__).parents[3]))
# All that is in libziggurat.so.
FOLDERS = ["base", "aio", "tiers", "optimizer", "collectives", "core"]
FOLDERS += ["integrations/c", "integrations/deepspeed"]
QUOTED = re.compile(r"`([^`]*)`")
# Commands, and keys of DeepSpeed's config, which its script has.
NO_SETTINGS = ["ziggurat ", "ulimit ", "{"]  # the last: a name that is filled in, in the place of its own
KEYS = {"communication_data_type", "csv_monitor", "intra_op_parallelism", "tensorboard", "wandb"}
KEYS |= {"wall_clock_breakdown", "{}"}


def messages():
    """Every string of the sources that has a word in backticks."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".cc", ".h", ".cu"):
                continue
            source = re.sub(r"//[^\n]*", "", path.read_text())
            source = re.sub(r'"\s*\n\s*"', "", source)  # a string of several lines
            for found in re.finditer(r'"((?:[^"\\]|\\.)*)"', source):
                if "`" in found[1]:
                    yield path.name, found[1].replace('\\"', '"')


def is_setting(word):
    return not (word in KEYS or any(word.startswith(begin) for begin in NO_SETTINGS))


def test_the_sources_have_such_words():
    assert len(list(messages())) > 60


@pytest.mark.parametrize("translate", [in_arguments, in_settings])
def test_every_setting_that_a_message_names_is_known(translate):
    unknown = {
        f"{where}: `{word}`"
        for where, message in messages()
        for word in QUOTED.findall(message)
        if is_setting(word) and word.partition("=")[0] not in ARGUMENTS
    }
    assert not unknown, "give them a translation in ziggurat/_words.py"


def test_every_setting_of_the_engine_is_known():
    table = (ROOT / "core/engine/engine_settings.cc").read_text()
    names = re.findall(r'In::\w+\(\s*"(\w+)"', table)
    assert len(names) >= 30
    assert set(names) <= ARGUMENTS.keys()


def test_nothing_is_left_in_quotes_but_commands_and_other_configs_keys():
    for where, message in messages():
        left = [word for word in QUOTED.findall(in_arguments(message)) if is_setting(word)]
        assert not left, f"{where}: {message}"


def test_no_message_advises_what_an_optimizer_does_not_have():
    has = {"auto": False, "never": False, "reshard": False}
    for where, message in messages():
        said = in_arguments(message)
        _, _, advice = said.partition(": ")
        assert not [value for value in has if f"resume={value}" in advice], f"{where}: {said}"


@pytest.mark.parametrize(
    "message, said",
    [
        (
            "`store=/d`: there is a store already: give another directory, `resume=auto` to go on "
            "from it, or `resume=never` to replace it",
            'placement="nvme:/d": there is a store already: give another directory, '
            "Resume(optimizer) or optimizer.open(resume=True) to go on from it, or an empty "
            "directory to replace it",
        ),
        (
            "the store's state is adamw in fp32, this run's adam in fp32: give `optimizer=adamw` "
            "`state_format=fp32`, `resume=reshard` to convert it (the same optimizer's), another "
            "`store`, or `resume=never` to replace it",
            "the store's state is adamw in fp32, this run's adam in fp32: give "
            'ziggurat.torch.AdamW state_format="fp32", another placement="nvme:/path", or an empty '
            "directory to replace it",
        ),
        ("a GPU is missing; install one, or use `collectives=auto`", "a GPU is missing; install one"),
        ("it is 3: give `tp`", "it is 3"),
        ("see `ziggurat plan`", "see `ziggurat plan`"),
        ("nothing is quoted here, or there", "nothing is quoted here, or there"),
    ],
)
def test_advice_is_what_an_optimizer_takes(message, said):
    assert in_arguments(message) == said


def test_settings_of_an_engine_are_its_dictionary():
    message = "`store=/d`: give `resume=auto`, or another `store`; see `ziggurat plan`"
    said = '"store": "/d": give "resume": "auto", or another `store`; see `ziggurat plan`'
    assert in_settings(message) == said


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
