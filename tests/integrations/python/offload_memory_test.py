# SPDX-License-Identifier: Apache-2.0
"""The memory of a process that trains a model much larger than what ziggurat.torch.offload() was given.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import contextlib
import re
import shutil
import sys
from pathlib import Path

try:
    import pytest
    import torch
    import torch._dynamo  # which a step loads, and which takes each child seconds
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import ziggurat.torch
from ziggurat.torch import streamed_init

MIB = 1 << 20
WIDTH, DEPTH = 1024, 16  # blocks of 4 MiB
HOST_BYTES = 8 * MIB  # of the optimizer's state
SLACK_BYTES = 16 * MIB  # for activations, and what the engine takes beside that


class Block(torch.nn.Module):
    """A large frozen layer with a small trained one beside it, whose gradients need no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 2), torch.nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.large(x) + self.up(self.down(x)))


def of_process(name: str) -> int:
    """Returns a size that the kernel knows of this process."""
    return int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) << 10


def train(depth: int, folder: Path, tier: str | None, from_files: bool) -> float:
    """Returns the last loss. The kernel then knows the most memory that training took, or with
    `from_files`, for a model that is built in files, building and training."""
    torch.manual_seed(1)
    folder.mkdir()
    with streamed_init(folder) if from_files else contextlib.nullcontext():
        if from_files:
            Path("/proc/self/clear_refs").write_text("5")
        model = torch.nn.Sequential(*(Block() for _ in range(depth)))
    if tier is not None:
        ziggurat.torch.offload(model, memory=memory_of(model), placement=tier)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-2, placement=f"nvme:{folder}/store", host_memory=HOST_BYTES)
    optimizer.open()
    if not from_files:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most that there was so far
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train_and_measure(folder: Path, tier: str | None, from_files: bool) -> None:
    """Writes the most memory that training took beyond what was there before the model, and the
    last loss."""
    train(1, folder / f"{tier}-small", tier, from_files)  # loads what PyTorch and the engine load once
    before = of_process("VmRSS")
    loss = train(DEPTH, folder / f"{tier}", tier, from_files)
    (folder / f"{tier}.txt").write_text(f"{of_process('VmHWM') - before} {loss!r}")


def measured(folder: Path, tier: str | None, from_files: bool = False) -> tuple[int, str]:
    with forked_runs() as runs:
        assert runs.status_of(runs.started(train_and_measure, folder, tier, from_files), within=120) == 0
    peak, loss = (folder / f"{tier}.txt").read_text().split()
    return int(peak), loss


def test_the_memory_of_a_model_on_nvme_is_what_offload_was_given(tmp_path):
    model_bytes = DEPTH * WIDTH * WIDTH * 4
    memory_bytes = memory_of(torch.nn.Sequential(*(Block() for _ in range(DEPTH))))
    assert model_bytes > 7 * memory_bytes
    plain_bytes, plain_loss = measured(tmp_path, None)
    ours_bytes, ours_loss = measured(tmp_path, "nvme")
    assert ours_loss == plain_loss
    assert plain_bytes > model_bytes
    assert ours_bytes < memory_bytes + HOST_BYTES + SLACK_BYTES
    shutil.rmtree(tmp_path / "nvme")
    shutil.rmtree(tmp_path / "nvme-small")
    built_bytes, built_loss = measured(tmp_path, "nvme", from_files=True)
    assert built_loss == plain_loss
    assert built_bytes < memory_bytes + HOST_BYTES + SLACK_BYTES


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
