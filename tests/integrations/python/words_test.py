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
    import missing_peer

    missing_peer.skip(missing)

from ziggurat._library.words import ARGUMENTS, in_arguments, in_settings

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


def test_every_setting_that_a_message_names_is_known():
    unknown = {
        f"{where}: `{word}`"
        for where, message in messages()
        for word in QUOTED.findall(message)
        if is_setting(word) and word.partition("=")[0] not in ARGUMENTS
    }
    assert not unknown, "give them a translation in ziggurat/_library/words.py"


def test_every_setting_of_the_engine_is_known():
    table = (ROOT / "core/engine/engine_settings.cc").read_text()
    names = re.findall(r'In::\w+\(\s*"(\w+)"', table)
    assert len(names) >= 30
    assert set(names) <= ARGUMENTS.keys()


def test_c_and_python_know_the_same_settings():
    source = (ROOT / "integrations/c/c_words.cc").read_text()
    table = source[source.index("places()") : source.index("std::string json_of")]
    with_words = re.findall(r'\{"(\w+)", "', table)
    lists = re.findall(r":\s*\{([^}]*)\}\)", table)  # of keys that keep their names, and of those that C lacks
    assert len(lists) == 2
    assert set(with_words + re.findall(r'"(\w+)"', " ".join(lists))) == ARGUMENTS.keys()


def test_nothing_is_left_in_quotes_but_commands_and_other_configs_keys():
    for where, message in messages():
        left = [word for word in QUOTED.findall(in_arguments(message)) if is_setting(word)]
        assert not left, f"{where}: {message}"


def lacking(words):
    """Settings among them that an optimizer has nothing for, as they are said."""
    for word in filter(is_setting, words):
        name, _, value = word.partition("=")
        its = ARGUMENTS[name]
        if its is None or its(value) is None:
            yield word


def test_no_message_advises_what_an_optimizer_does_not_have():
    looked_at = 0
    for where, message in messages():
        subject, found, advice = message.partition(": ")
        said = in_arguments(message)[len(in_arguments(subject)) :]
        for word in lacking(QUOTED.findall(advice)) if found else ():
            looked_at += 1
            assert not re.search(rf"\b{re.escape(word)}\b", said), f"{where}: {said}"
    assert looked_at >= 20


def test_no_setting_of_an_engine_is_left_as_the_command_has_it():
    pairs = 0
    for where, message in messages():
        settings = [word for word in QUOTED.findall(message) if is_setting(word) and "=" in word]
        said = in_settings(message)
        for word in settings:
            name, _, value = word.partition("=")
            pairs += 1
            assert f'"{name}": "{value}"' in said and f"`{word}`" not in said, f"{where}: {said}"
    assert pairs >= 40


@pytest.mark.parametrize(
    "message, said",
    [
        (
            "acquire(unit 1): its parameters take 1 KiB, for which the 2 KiB for units have no room "
            "beside what is acquired (unit 0 and unit 3): release one before, or give "
            "`device_memory=3 MiB`",
            "acquire(unit 1): its parameters take 1 KiB, for which the 2 KiB for units have no room "
            "beside what is acquired (unit 0 and unit 3): release one before",
        ),
        (
            "`store=/d`: there is a store already: give another directory, `resume=auto` to go on "
            "from it, or `resume=never` to replace it",
            'placement="nvme:/d": there is a store already: give another directory, '
            "Resume(optimizer) or optimizer.open(resume=True) to go on from it, or an empty "
            "directory to replace it",
        ),
        (
            "the store's state is adamw in fp32, this run's adam in fp32: give `optimizer=adamw` "
            "`state_format=fp32`, `resume=reshard` to convert a state of the same optimizer, "
            "another `store`, or `resume=never` to replace it",
            "the store's state is adamw in fp32, this run's adam in fp32: give "
            'ziggurat.torch.AdamW state_format="fp32", resume="reshard" to convert a state of the '
            'same optimizer, another placement="nvme:/path", or an empty directory to replace it',
        ),
        ("a GPU is missing; install one, or use `collectives=auto`", "a GPU is missing; install one"),
        ("it is 3: give `tp`", "it is 3"),
        # What is said of an advice goes with it.
        (
            "{0} does not divide the ranks: give a divisor, or `zero_stage=0`, which keeps a copy "
            "on every rank",
            "{0} does not divide the ranks: give a divisor",
        ),
        (
            "it needs `slots=2`; state in memory has `durable_every`, in seconds",
            "it needs slots=2",
        ),
        ("a: use `collectives=auto`, `host_memory`, or `threads=2`", "a: use host_memory, or threads=2"),
        (
            "x: `resume=reshard` or `resume=auto`",
            'x: resume="reshard" or Resume(optimizer) or optimizer.open(resume=True)',
        ),
        (
            "it needs more. Give `host_memory=2GiB`, or `tp=2`",
            'it needs more. Give host_memory="2GiB"',
        ),
        # What a message is about stays.
        ("`tp=2` needs `zero_stage=3`: set `zero_stage` to 3", "tp=2 needs zero_stage=3"),
        ("give `optimizer=sgd`; see `ziggurat plan`", "give ziggurat.torch.SGD; see `ziggurat plan`"),
        ("it is a key: `wall_clock_breakdown`", "it is a key: `wall_clock_breakdown`"),
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
