# SPDX-License-Identifier: Apache-2.0
"""A drive that fails, or has no room, under a model of ziggurat.torch.offload() whose parameters, gradients and state are on
it: an error with the file's name, and training goes on with the same bits, at once or from the store.

ZIGGURAT_FAULTS=all has each write of three steps fail, and not only some. Run by pytest; as a script it exits with 77 where PyTorch
or pytest is missing, or PyTorch is older than offload() takes.
"""

import errno
import gc
import os
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from failing_calls import FailingCalls
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, memory_of, tokens_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch

STEPS = 5  # with faults in the first three
FAULTS = range(1, 400) if os.environ.get("ZIGGURAT_FAULTS") == "all" else range(5, 140, 66)
SAVE_FAULTS = range(1, 40) if os.environ.get("ZIGGURAT_FAULTS") == "all" else (1, 2, 3, 5)
FOR_EVER = 1 << 30


def made(folder) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = gpt()
    ziggurat.torch.offload(model, memory=memory_of(model), placement="params=nvme,grads=nvme")
    return model, ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{folder}", threads=1)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(folder: str, at: int, error: int, times: int, expected: list[float]) -> None:
    """Trains while the drive's call number `at` fails, and then the others up to `times`; then goes on."""
    os.environ["ZIGGURAT_IO"] = "threads"
    calls = FailingCalls()
    model, optimizer = made(folder)
    optimizer.open()
    calls.arm(at, error, times)
    words = None
    try:
        assert trained(model, optimizer, range(3)) == expected[:3]
        optimizer.engine.make_durable()
    except ziggurat.ZigguratError as raised:
        words = str(raised)
    calls.disarm()
    assert calls.failed or calls.count < at
    if words is None:
        optimizer.close()
    else:
        print(at, calls.failed[0], words)
        assert folder in words and errno.errorcode[error] in words
        goes_on(model, optimizer, words, expected)
        del model, optimizer
        gc.collect()
    model, optimizer = made(folder)
    optimizer.open(resume=True)
    begin = optimizer.engine.generation
    assert words is not None or begin == 3
    assert trained(model, optimizer, range(begin, STEPS)) == expected[begin:]
    optimizer.close()
    os._exit(0 if calls.failed else 9)


def goes_on(model, optimizer, words: str, expected: list[float]) -> None:
    """Makes a step with the optimizer that has failed, if it can. It must where nothing was updated."""
    optimizer.zero_grad()
    try:
        step = optimizer.engine.generation
        assert trained(model, optimizer, range(step, step + 1)) == expected[step : step + 1]
        optimizer.close()
    except ziggurat.ZigguratError as raised:
        print("then", raised)
        assert "nothing was updated" not in words
        assert str(raised) == words  # what has happened stays the reason


def saving(folder: str, at: int, error: int, placement: str, expected: list[float]) -> None:
    """Saves in the background while the drive's calls from number `at` on fail. Steps are made meanwhile where they write
    nothing themselves."""
    os.environ["ZIGGURAT_IO"] = "threads"
    calls = FailingCalls()
    model = gpt()
    ziggurat.torch.offload(model, memory=memory_of(model), placement=placement)
    where = "host" if placement == "host" else f"nvme:{folder}/state"
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=where, threads=1)
    losses = trained(model, optimizer, range(2))
    optimizer.synchronize()
    if where != "host":
        optimizer.engine.make_durable()
    calls.arm(at, error, FOR_EVER)
    words = None
    try:
        save = ziggurat.torch.save_checkpoint(f"{folder}/saved", optimizer, model, background=True)
        losses += trained(model, optimizer, range(2, 3) if where == "host" else range(0))
        save.wait()
    except ziggurat.ZigguratError as raised:
        words = str(raised)
    calls.disarm()
    if words is not None:
        print(at, placement, calls.failed[0], words)
        assert f"{folder}/saved" in words and errno.errorcode[error] in words
        assert not list(Path(folder, "saved").glob("*/*"))  # of a checkpoint no more than its folder
    losses += trained(model, optimizer, range(len(losses), 4))
    found = ziggurat.torch.save_checkpoint(f"{folder}/saved", optimizer, model, background=True).wait()
    assert words is None or [path.name for path in Path(folder, "saved").glob("step-*")] == ["step-000000004"]
    losses += trained(model, optimizer, range(4, STEPS))
    assert losses == expected
    optimizer.close()
    model = gpt()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    assert ziggurat.torch.load_checkpoint(found, optimizer, model).step == 4
    assert trained(model, optimizer, range(4, STEPS)) == expected[4:]
    optimizer.close()
    os._exit(0 if calls.failed else 9)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    model = gpt()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, range(STEPS))
    optimizer.close()
    return losses


@pytest.mark.parametrize("times", [1, FOR_EVER], ids=["once", "until there is room"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_drive_that_fails_is_named_and_training_goes_on(error, times, expected, tmp_path):
    with forked_runs() as runs:
        if runs.status_of(runs.started(FailingCalls)) != 0:
            pytest.skip("this machine lets no process set such a filter")
        for at in FAULTS:
            status = runs.status_of(runs.started(run, f"{tmp_path}/{at}", at, error, times, expected), within=60)
            assert status in (0, 9), at
            if status == 9:  # there are no more calls
                return


@pytest.mark.parametrize("placement", ["host", "params=nvme,grads=nvme"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_save_in_the_background_that_fails_is_named_and_the_next_one_works(error, placement, expected, tmp_path):
    with forked_runs() as runs:
        if runs.status_of(runs.started(FailingCalls)) != 0:
            pytest.skip("this machine lets no process set such a filter")
        failed = 0
        for at in SAVE_FAULTS:
            status = runs.status_of(runs.started(saving, f"{tmp_path}/{at}", at, error, placement, expected), within=60)
            assert status in (0, 9), at
            failed += status == 0
            if status == 9:  # there are no more calls
                break
        assert failed


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], __file__]))
