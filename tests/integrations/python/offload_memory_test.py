# SPDX-License-Identifier: Apache-2.0
"""The memory of a process that trains a model much larger than what ziggurat.torch.offload() was given.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import contextlib
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

try:
    import pytest
    import torch
    import torch._dynamo  # which a step loads, and which takes each child seconds
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._checkpoint import checkpoint_load
from ziggurat._memory import memory as memory_module
from ziggurat.torch import streamed_init

MIB = 1 << 20
WIDTH, DEPTH = 1024, 32  # blocks of 4 MiB
HOST_BYTES = 8 * MIB  # of the optimizer's state
FREED_BYTES = memory_module._RETURNED_BYTES
SLACK_BYTES = 16 * MIB  # for activations, and what the engine takes beside that
READER_BYTES = 40 * MIB  # of a checkpoint, for what is hashed together, whose rest may be needed next


class How(NamedTuple):
    """How a model is trained."""

    placement: str | None  # of offload(), if it is called
    trains_all: bool = False
    from_files: bool = False  # whether the model is built in files
    dtype: torch.dtype = torch.float32
    autocast: bool = False


class Block(torch.nn.Module):
    """A large layer, which may be frozen, with a small trained one beside it."""

    def __init__(self, trains_all: bool) -> None:
        super().__init__()
        self.large = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(trains_all)
        self.down, self.up = torch.nn.Linear(WIDTH, 2), torch.nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.large(x) + self.up(self.down(x)))


def blocks(depth: int, how: How) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block(how.trains_all) for _ in range(depth)))
    return model.to(how.dtype)


def of_process(name: str) -> int:
    """Returns a size that the kernel knows of this process."""
    return int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) << 10


def forget_the_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def made(depth: int, folder: Path, how: How) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    folder.mkdir()
    with streamed_init(folder) if how.from_files else contextlib.nullcontext():
        model = blocks(depth, how)
    if how.placement is not None:
        ziggurat.torch.offload(model, memory=memory_of(model), placement=how.placement)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return model, ziggurat.torch.AdamW(
        trained, lr=1e-2, placement=f"nvme:{folder}/store", host_memory=HOST_BYTES
    )


def train(depth: int, folder: Path, how: How) -> float:
    """Returns the last loss. The kernel then knows the most memory that training took, and with
    `from_files` building too; under autocast that of a forward alone."""
    forget_the_most()
    model, optimizer = made(depth, folder, how)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer.open()
    if not how.from_files:
        forget_the_most()
    for _ in range(2):
        for _ in range(2):
            loss = loss_of(model, how)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if how.autocast:
        memory_module.return_freed()
        forget_the_most()
        with torch.autocast("cpu", torch.bfloat16):  # which keeps copies as long as it lasts
            with torch.no_grad():
                loss_of(model, how)
            loss = loss_of(model, how)  # whose graph is there
    return loss.item()


def loss_of(model: torch.nn.Module, how: How) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
        return model(torch.ones(2, WIDTH, dtype=how.dtype)).float().square().mean()


def train_and_measure(folder: Path, how: How) -> None:
    """Writes the most memory that training took beyond what was there before the model, the last
    loss, and the least memory with which the model can be offloaded."""
    if how.autocast:
        memory_module._RETURNED_BYTES = 8 * MIB  # or as much may stay as all copies take
    train(1, folder / "small", how)  # loads what PyTorch and the engine load once
    memory_module.return_freed()  # or training would take that first
    before = of_process("VmRSS")
    loss = train(DEPTH, folder / "large", how)
    peak = of_process("VmHWM") - before
    memory_bytes = memory_of(blocks(DEPTH, how))
    (folder / "measured").write_text(f"{peak} {loss!r} {memory_bytes}")


def save(folder: Path, how: How) -> None:
    model, optimizer = made(DEPTH, folder / "trained", how)
    loss_of(model, how).backward()
    optimizer.step()
    ziggurat.torch.save_checkpoint(folder / "saved", optimizer, model)
    (folder / "loss").write_text(repr(loss_of(model, how).item()))
    optimizer.close()
    shutil.rmtree(folder / "trained")


def load_and_measure(folder: Path, how: How) -> None:
    """Writes what train_and_measure() does, of loading what save() has saved."""
    train(1, folder / "small", how)
    model, optimizer = made(DEPTH, folder / "large", how)
    memory_bytes = memory_of(model)
    memory_module.return_freed()
    before = of_process("VmRSS")
    forget_the_most()
    read = checkpoint_load.read_values
    counts = []

    def counted(checkpoint, index, first, count):
        counts.append(count)
        return read(checkpoint, index, first, count)

    checkpoint_load.read_values = counted
    ziggurat.torch.load_checkpoint(folder / "saved", optimizer, model)
    assert sum(counts) == (0 if how.trains_all else DEPTH * WIDTH * WIDTH)  # the engine reads what is trained
    peak = of_process("VmHWM") - before
    (folder / "measured").write_text(f"{peak} {loss_of(model, how).item()!r} {memory_bytes}")


def measured(folder: Path, how: How, run: Callable[..., None] = train_and_measure) -> tuple[int, str, int]:
    folder.mkdir(exist_ok=True)
    run_alone(run, folder, how)
    peak, loss, memory = (folder / "measured").read_text().split()
    return int(peak), loss, int(memory)


def run_alone(run: Callable[..., None], *arguments) -> None:
    with forked_runs() as runs:
        assert runs.status_of(runs.started(run, *arguments), within=120) == 0


def autocast_bytes() -> int:
    """A processor without products in bf16 multiplies copies, which are freed between others too."""
    return 8 * MIB if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 32 * MIB


@pytest.mark.parametrize(
    ("trains_all", "autocast"), [(False, False), (True, False), (True, True)], ids=["frozen", "trained", "autocast"]
)
def test_the_memory_of_a_model_on_nvme_is_what_offload_was_given(tmp_path, trains_all, autocast):
    """Trained and frozen layers; built in memory, and in files."""
    model_bytes = DEPTH * WIDTH * WIDTH * 4
    plain = How(None, trains_all, autocast=autocast)
    plain_bytes, plain_loss, memory_bytes = measured(tmp_path / "plain", plain)
    assert model_bytes > 7 * memory_bytes
    assert plain_bytes > model_bytes * (1.4 if autocast else 1.9 if trains_all else 0.9)
    for from_files in (False, True):
        how = plain._replace(placement="params=nvme,grads=nvme", from_files=from_files)
        ours_bytes, ours_loss, _ = measured(tmp_path / f"ours-{from_files}", how)
        assert ours_loss == plain_loss
        # What is freed between other memory is given back from time to time.
        freed_bytes = autocast_bytes() if autocast else FREED_BYTES if trains_all else 0
        assert ours_bytes < memory_bytes + HOST_BYTES + SLACK_BYTES + freed_bytes


def count_faults(folder: Path) -> None:
    """Writes how many pages a step took from the system, and how many its gradients have."""
    model = blocks(DEPTH // 2, How("host", trains_all=True))
    ziggurat.torch.offload(model, memory="1GiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss_of(model, How("host")).backward()
        optimizer.step()
        optimizer.zero_grad()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = sum(param.nbytes for param in model.parameters()) // resource.getpagesize()
    (folder / "faults").write_text(f"{min(faults[3:])} {pages}")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_gradients_find_the_memory_of_the_step_before(tmp_path, monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    run_alone(count_faults, tmp_path)
    faults, pages = map(int, (tmp_path / "faults").read_text().split())
    assert faults < pages / 8


@pytest.mark.parametrize("trains_all", [False, True], ids=["frozen", "trained"])
def test_loading_a_checkpoint_takes_memory_for_some_chunks(tmp_path, trains_all):
    """Neither what is trained nor what is frozen is there as a whole, as values or as pages of files."""
    how = How("params=nvme,grads=nvme", trains_all, from_files=True)
    run_alone(save, tmp_path, how)
    peak_bytes, loss, memory_bytes = measured(tmp_path, how, load_and_measure)
    assert loss == (tmp_path / "loss").read_text()
    assert peak_bytes < memory_bytes + HOST_BYTES + SLACK_BYTES + READER_BYTES + FREED_BYTES


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
