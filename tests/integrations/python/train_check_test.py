# SPDX-License-Identifier: Apache-2.0
"""``ziggurat doctor --train``: right on the CPU and over an accelerator's double, and it finds what is wrong.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import os
import subprocess
import sys

try:
    import pytest
    import torch
    from device_double import Double
    from small_models import one_thread  # noqa: F401: pytest uses it
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._pytorch import torch_private
from ziggurat._trainers import train_check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(train_check, "STEPS", 6)


def test_all_is_right_over_an_accelerators_double(tmp_path, capsys):
    with Double(0) as double:
        assert train_check.check([CPU], tmp_path) == 0
        assert any(accelerator.pinned_bytes for accelerator in double.accelerators)
    said = capsys.readouterr().out
    assert said.count("same bits") == 6 and "all is right" in said


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="this PyTorch is too old for offload()")
def test_it_says_whether_offload_is_here_and_reads_are_guarded(monkeypatch):
    words = f"offload(): with PyTorch {torch.__version__}, by exchanging the memory of storages (_swap_data_ptr_); "
    assert train_check._offload() == words + "a read in C++ of a parameter that is away is an error"
    monkeypatch.setattr("ziggurat._pytorch.storages.guards_reads", lambda: False)
    assert train_check._offload().startswith(words + "NOT GUARDED")


def test_it_says_what_offload_needs_where_pytorch_is_too_old(monkeypatch):
    monkeypatch.setattr(torch_private, "_NEEDED", ("UntypedStorage._exchange",))
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert train_check._offload().startswith("offload() needs PyTorch 2.12 or later, and this is ")


def test_other_losses_than_torch_optims_are_found(tmp_path, capsys, monkeypatch):
    right = ziggurat.torch.AdamW
    monkeypatch.setattr(ziggurat.torch, "AdamW", lambda *args, **kwargs: right(*args, **kwargs | {"lr": 2e-3}))
    assert train_check.check([CPU], tmp_path) == 1
    said = capsys.readouterr().out
    assert "MORE THAN" in said and "wrong: cpu, float32: the losses differ" in said and "Please report" in said


def test_other_bits_on_nvme_are_found(tmp_path, capsys, monkeypatch):
    right = ziggurat.torch.AdamW

    def other_on_nvme(*args, **kwargs):
        return right(*args, **kwargs | {"weight_decay": 0.011 if kwargs["placement"] != "host" else 0.01})

    monkeypatch.setattr(ziggurat.torch, "AdamW", other_on_nvme)
    assert train_check.check([CPU], tmp_path) == 1
    wrong = 'wrong: cpu, float32: the row "ziggurat, nvme" has other bits than the row "ziggurat, host"'
    assert wrong in capsys.readouterr().out


def test_a_device_that_raises_is_said_and_the_next_one_tried(tmp_path, capsys):
    assert train_check.check([torch.device("meta"), CPU], tmp_path) == 1
    said = capsys.readouterr().out
    assert "wrong: meta, float32: training failed with an error" in said and said.count("same bits") == 6


def test_every_path_that_is_given_is_trained_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    used = []
    right = ziggurat.torch.AdamW

    def noted(*args, **kwargs):
        used.append(kwargs["placement"])
        return right(*args, **kwargs)

    monkeypatch.setattr(ziggurat.torch, "AdamW", noted)
    given = [f"--path={tmp_path}/one", "--path", f"{tmp_path}/other"]
    assert train_check.main(["--train", *given]) == 0
    said = capsys.readouterr().out
    assert said.count("ziggurat, nvme 1") == 4 and said.count("ziggurat, nvme 2") == 4
    assert f"nvme 2: {tmp_path}/other" in said and said.count("same bits") == 10
    for folder in ("one", "other"):
        assert sum(f"{tmp_path}/{folder}/" in place for place in used) == 4


def test_a_path_that_cannot_be_written_is_said(tmp_path, capsys):
    assert train_check.main(["--train", "--path", f"{tmp_path}/nothing"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ziggurat: error: cannot write in {tmp_path}/nothing: No such file")


def test_the_command_runs_it(tmp_path):
    command = os.environ.get("ZIGGURAT_COMMAND")
    start = [command] if command else [sys.executable, "-m", "ziggurat"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        [*start, "doctor", "--train", "--path", tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is right" in done.stdout and "PyTorch" in done.stdout
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
