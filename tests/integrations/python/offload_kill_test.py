# SPDX-License-Identifier: Apache-2.0
"""Killed at any instant and started again, a script with a model of ziggurat.torch.offload() and workers of a DataLoader goes
on with the bits of one that was neither killed nor offloaded.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
ZIGGURAT_KILLS: how often the runs are killed (20).
"""

import os
import random
import shutil
import sys
import time

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from streamed_models import memory_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch

EPOCHS, BATCHES, WORKERS, WIDTH = 2, 6, 4, 128
KILLS = int(os.environ.get("ZIGGURAT_KILLS", "20")) // 2


class Waves(torch.utils.data.Dataset):
    """Items that are drawn anew each time, in the worker that makes them."""

    def __len__(self) -> int:
        return BATCHES * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(WIDTH)) * (index + 1)) + 0.1 * torch.rand(WIDTH) + 0.1 * random.random()


def block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.2))


def run(directory: str, path: str, placement: str | None) -> None:
    """Trains to the end, offloaded if `placement` is given, and leaves parameters and losses in `path`."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    random.seed(7)
    model = torch.nn.Sequential(*(block() for _ in range(4)), torch.nn.LayerNorm(WIDTH))
    if placement is not None:
        ziggurat.torch.offload(model, memory=memory_of(model), placement=placement)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{directory}", threads=1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES // 2)
    loader = torch.utils.data.DataLoader(Waves(), 4, shuffle=True, num_workers=WORKERS)
    resume = ziggurat.torch.Resume(optimizer, scheduler, loader)
    for _ in resume.epochs(EPOCHS):
        for batch in resume:
            (model(batch) - batch).square().mean().backward()
            if resume.batch % 2 == 0:  # two backwards a step
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    optimizer.synchronize()
    state = [value.clone() for value in model.state_dict().values()]
    state.append(torch.tensor([scheduler.get_last_lr()[0], resume.steps]))
    torch.save(state, path + ".part")
    os.rename(path + ".part", path)
    optimizer.close()


def compare(one: str, other: str) -> None:
    for a, b in zip(torch.load(one), torch.load(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("placement", ["nvme", "params=nvme,grads=nvme"])
def test_a_run_that_was_killed_again_and_again_has_the_bits_of_one_that_was_not(placement, tmp_path):
    folder, whole, parts = (str(tmp_path / name) for name in ("state", "whole.pt", "parts.pt"))
    with forked_runs() as runs:
        assert runs.status_of(runs.started(run, str(tmp_path / "plain"), whole, None)) == 0
        begun = time.monotonic()
        assert runs.status_of(runs.started(run, str(tmp_path / "other"), parts, placement)) == 0
        took = time.monotonic() - begun
        compare(whole, parts)

        def begin_anew():
            compare(whole, parts)
            shutil.rmtree(folder)
            os.unlink(parts)

        runs.kill_and_resume(lambda: runs.started(run, folder, parts, placement), KILLS, took, begin_anew)
    compare(whole, parts)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], __file__]))
