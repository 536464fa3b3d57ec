# SPDX-License-Identifier: Apache-2.0
"""Trainer's checkpoints on several ranks: any number of ranks goes on from those that have the state,
with its bits; those that name a store are refused in words.

Most ranks are forked from this process, which has imported transformers once for all of them; torchrun
starts those of two runs. Run by pytest; as a script it exits with 77 where PyTorch, transformers,
accelerate or pytest is missing.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)
for module in ("transformers", "accelerate"):
    if importlib.util.find_spec(module) is None:
        print(f"skipped: no {module} here")
        sys.exit(77)

import transformers  # noqa: E402
from hf_ranks_runs import run  # noqa: E402
from rank_runs import on_ranks  # noqa: E402

transformers.logging.set_verbosity_error()


def under_torchrun(folder, name, ranks, steps, placement="host", state="full", checkpoint=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(Path(__file__).with_name("hf_ranks_runs.py"))]
    command += [str(folder), name, str(steps), placement.format(folder), state]
    command += [str(checkpoint)] if checkpoint else []
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )


def result(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=False)


def ended(folder, name, ranks, steps, placement="host", state="full", checkpoint=None):
    saved = str(checkpoint) if checkpoint else None
    on_ranks(ranks, lambda _: run(folder, name, steps, placement.format(folder), state, saved))
    return result(folder, name)


def assert_same(one, other):
    assert one["lr"] == other["lr"]
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name]), name
    for name, state in one["state"].items():
        assert state.keys() == other["state"][name].keys() >= {"step", "exp_avg", "master"}
        for key, value in state.items():
            assert torch.equal(value, other["state"][name][key]), (name, key)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """A run of so many ranks to step 4, and where it is."""

    @functools.cache
    def to_step_4(ranks):
        folder = tmp_path_factory.mktemp(f"of-{ranks}")
        if ranks == 1:
            return folder, ended(folder, "first", ranks, 4)
        done = under_torchrun(folder, "first", ranks, 4)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
        return folder, result(folder, "first")

    return to_step_4


@pytest.mark.parametrize(("ranks", "others"), [(2, 1), (2, 3), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_bits_of_the_state(ranks, others, of_ranks):
    folder, first = of_ranks(ranks)
    saved = folder / "first" / "checkpoint-4"
    on_host = ended(folder, f"to-{others}", others, 6, checkpoint=saved)
    assert_same(on_host["begun"], first["end"])
    assert all(int(state["step"]) == 4 for state in on_host["begun"]["state"].values())
    assert len(on_host["losses"]) == 6
    if others != 3:
        return
    on_nvme = ended(folder, "to-nvme", others, 6, placement="nvme:{}/state", checkpoint=saved)
    # Where the state is changes no bit of what those ranks go on to.
    assert on_nvme["losses"] == on_host["losses"]
    assert_same(on_nvme["begun"], first["end"])
    assert_same(on_nvme["end"], on_host["end"])


def test_as_many_ranks_go_on_from_the_state_and_from_its_store(of_ranks, tmp_path):
    folder, first = of_ranks(2)
    whole = ended(folder, "whole", 2, 6, checkpoint=folder / "first" / "checkpoint-4")
    by_store = ended(tmp_path, "first", 2, 4, placement="nvme:{}/state", state="store")
    assert_same(by_store["end"], first["end"])
    saved = tmp_path / "first" / "checkpoint-4"
    by_reference = {"placement": "nvme:{}/state", "state": "store", "checkpoint": saved}
    refused = under_torchrun(tmp_path, "other", 1, 6, **by_reference)
    assert refused.returncode != 0
    words = refused.stderr
    assert "of 2 ranks, but this run has 1: start 2 ranks" in words
    assert 'save with state="full"' in words
    again = ended(tmp_path, "again", 2, 6, **by_reference)
    assert again["losses"] == whole["losses"]
    assert_same(again["end"], whole["end"])


def test_a_store_on_several_ranks_goes_back_to_a_checkpoint_with_the_state(of_ranks, tmp_path):
    folder, _ = of_ranks(2)
    whole = ended(folder, "from-2", 2, 6, checkpoint=folder / "first" / "checkpoint-2")
    ended(tmp_path, "first", 2, 4, placement="nvme:{}/state")
    again = ended(
        tmp_path,
        "again",
        2,
        6,
        placement="nvme:{}/state",
        checkpoint=tmp_path / "first" / "checkpoint-2",
    )
    assert again["losses"] == whole["losses"]
    assert_same(again["end"], whole["end"])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
