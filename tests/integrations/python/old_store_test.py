# SPDX-License-Identifier: Apache-2.0
"""Stores that an earlier version has made are read as what they hold, and go on with the bits of a
run that was today's from there.

PyTorch's products differ in their last bits between processors, so what an archive holds is compared
with a run from the start within a tolerance. From there on both sides train here, and every bit is
compared.

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
    import missing_peer

    missing_peer.skip(missing)

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


def begun(placement, state_format):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = Model().to(_FORMATS[state_format])
    return model, ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=placement, state_format=state_format
    )


def train(model, optimizer, steps):
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        x = torch.randn(8, 24, generator=draws).to(model.at_times.dtype)
        model(x, step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def arrays(model, optimizer):
    """Every value of both, by name."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for param, state in optimizer.state_dict()["state"].items():
        values |= {f"{param}.{name}": value.clone() for name, value in state.items()}
    return values


def make(folder):
    """Makes the stores with whatever version is imported."""
    for state_format in _FORMATS:
        model, optimizer = begun(f"nvme:{Path(folder) / state_format}", state_format)
        resume = ziggurat.torch.Resume(optimizer)
        while resume.steps < _STEPS:
            train(model, optimizer, [resume.steps])
        optimizer.close()


@pytest.mark.parametrize("archive", sorted(_STORES.glob("*.tar.xz")), ids=lambda its: its.name)
def test_a_store_of_an_earlier_version_goes_on(tmp_path, archive):
    state_format = archive.name.split("-")[0]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "old", filter="data")
    model, optimizer = begun(f"nvme:{tmp_path / 'old' / state_format}", state_format)
    resume = ziggurat.torch.Resume(optimizer)
    assert resume.resumed
    assert resume.steps == _STEPS
    held = arrays(model, optimizer)

    fresh, from_the_start = begun("host", state_format)
    train(fresh, from_the_start, range(_STEPS))
    expected = arrays(fresh, from_the_start)
    assert held.keys() == expected.keys()
    for name, value in held.items():
        # A code of 8 bits, or a value rounded to bf16, may be the next one.
        allowed = 1e-5 if state_format == "fp32" else 0.02
        difference = (value - expected[name]).abs().max()
        assert difference <= allowed * expected[name].abs().max(), name
    from_the_start.close()

    ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)
    today, its = begun(f"nvme:{tmp_path / 'new'}", state_format)
    ziggurat.torch.load_checkpoint(tmp_path / "saved", its, today)
    for run in ((model, optimizer), (today, its)):
        train(*run, range(_STEPS, 2 * _STEPS))
    ends = arrays(today, its)
    for name, value in arrays(model, optimizer).items():
        assert torch.equal(value, ends[name]), name
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
