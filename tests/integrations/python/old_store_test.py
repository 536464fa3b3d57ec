# SPDX-License-Identifier: Apache-2.0
"""Stores that an earlier version has made go on with the bits of a run that was today's from the
start.

old_stores/ has one archive for each state format, made at step 3 by the commit that its name ends
with:

    python3 old_store_test.py make FOLDER     (with that version's package and library)

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import os
import sys
import tarfile
from pathlib import Path

try:
    import pytest
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import ziggurat.torch

_STORES = Path(__file__).parent / "old_stores"
_FORMATS = {
    "fp32": torch.float32,
    "split": torch.bfloat16,
    "bf16": torch.bfloat16,
    "8bit": torch.float32,
}
_STEPS = 3


class Model(torch.nn.Module):
    """Parameters of one tile and of several, and small ones, which later versions put together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24) for _ in range(3)])
        self.wide = torch.nn.Linear(24, 800)
        self.at_times = torch.nn.Parameter(torch.ones(800))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.wide(x)
        return x * self.at_times if step % 2 else x


def begun(folder, state_format):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = Model().to(_FORMATS[state_format])
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"nvme:{folder}", state_format=state_format
    )
    return model, optimizer, ziggurat.torch.Resume(optimizer)


def train(model, optimizer, resume, end):
    while resume.steps < end:
        draws = torch.Generator().manual_seed(resume.steps)
        x = torch.randn(8, 24, generator=draws).to(model.at_times.dtype)
        model(x, resume.steps).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(folder):
    """Makes the stores with whatever version is imported."""
    for state_format in _FORMATS:
        path = Path(folder) / state_format
        model, optimizer, resume = begun(path, state_format)
        train(model, optimizer, resume, _STEPS)
        optimizer.close()


@pytest.mark.parametrize("archive", sorted(_STORES.glob("*.tar.xz")), ids=lambda its: its.name)
def test_a_store_of_an_earlier_version_goes_on(tmp_path, archive):
    state_format = archive.name.split("-")[0]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "old", filter="data")
    model, optimizer, resume = begun(tmp_path / "old" / state_format, state_format)
    assert resume.resumed
    assert resume.steps == _STEPS
    train(model, optimizer, resume, 2 * _STEPS)
    today, its, from_the_start = begun(tmp_path / "new", state_format)
    train(today, its, from_the_start, 2 * _STEPS)
    for (name, value), expected in zip(
        model.state_dict().items(), today.state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected), name
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), its.state_dict()["state"].values(), strict=True
    ):
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name
    optimizer.close()
    its.close()


def test_there_are_stores_of_every_format():
    assert {archive.name.split("-")[0] for archive in _STORES.glob("*.tar.xz")} == _FORMATS.keys()


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(sys.argv[2])
        sys.exit(0)
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(pytest.main([__file__, "-v", "-s"]))
