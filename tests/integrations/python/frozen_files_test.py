# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters of an offloaded model that stay in the files that their memory is a mapping of.

Run by pytest; as a script it exits with 77 where PyTorch, safetensors or pytest is missing, or
PyTorch is older than offload() takes.
"""

import errno
import os
import re
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from safetensors.torch import load_file, save_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of, pinned
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import DataLoss
from ziggurat._checkpoint.left_out import LeftOut
from ziggurat._memory.memory import advise
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import gathered, offload, streamed_init

WIDTH, DEPTH = 1024, 8
BLOCK_BYTES = WIDTH * WIDTH * 4


class Block(torch.nn.Module):
    """A frozen matrix with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 2, bias=False), torch.nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.base(x) + self.up(self.down(x)))


def built() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block() for _ in range(DEPTH)))


@pytest.fixture
def saved(tmp_path) -> Path:
    file = tmp_path / "base.safetensors"
    save_file({name: value.clone() for name, value in built().state_dict().items()}, file)
    return file


def loaded(file: Path) -> torch.nn.Sequential:
    """Returns the model with all values where the file has them."""
    model = built()
    model.load_state_dict(load_file(file), assign=True)
    for block in model:
        block.base.requires_grad_(False)
    return model


def train(model, folder=None, home="host", looked=lambda: None, where=None):
    """Returns the losses, and the optimizer. With a folder the model is offloaded, in the least memory that works."""
    if folder is not None:
        offload(model, memory=memory_of(model), placement=home)
    for block in model:
        block.register_forward_hook(lambda *_: looked())
    trained = [param for param in model.parameters() if param.requires_grad]
    where = folder or where
    where = "host" if where is None else f"nvme:{where}/store"
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-2, placement=where)
    return steps_of(model, optimizer), optimizer


def steps_of(model, optimizer):
    losses = []
    for step in range(2):
        loss = model(torch.full((2, WIDTH), 0.1 * (step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resident(file: Path) -> int:
    """Returns how much of the mappings of `file` this process has."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    own = [entry for entry in entries if str(file) in entry.partition("\n")[0]]
    return sum(int(size) << 10 for entry in own for size in re.findall(r"^Rss: +(\d+)", entry, re.M))


def in_files(model) -> int:
    return streaming_of(model[0].base.weight)[0].files.size_bytes



@pytest.mark.parametrize("home", ["host", "nvme"])
def test_the_bits_are_those_without_offload_and_no_frozen_value_is_written(saved, tmp_path, home):
    plain, _ = train(loaded(saved))
    model = loaded(saved)
    before = sum(one.stat().st_blocks for one in tmp_path.rglob("*"))
    ours, optimizer = train(model, tmp_path, home)
    assert ours == plain
    assert in_files(model) == DEPTH * BLOCK_BYTES
    kept = sum(one.stat().st_blocks for one in tmp_path.rglob("*")) - before
    assert 0 < kept * 512 < DEPTH * BLOCK_BYTES / 2
    assert pinned(model) == []
    optimizer.close()
    assert torch.equal(model[0].base.weight, built()[0].base.weight)


def test_the_process_has_no_more_of_the_file_than_the_units_in_use_and_the_next(saved, tmp_path):
    model = loaded(saved)
    seen = []
    _, optimizer = train(model, tmp_path, looked=lambda: seen.append(resident(saved)))
    assert len(seen) == 2 * DEPTH
    # One unit is in use, the next is read, and each matrix leaves its two edges.
    assert 0 < max(seen) < 2 * BLOCK_BYTES + DEPTH * 2 * 4096 + (256 << 10)
    assert streaming_of(model[0].base.weight)[0].engine_bytes < BLOCK_BYTES / 2
    optimizer.close()


def test_what_stays_needs_no_more_than_its_bytes_of_the_memory(saved, tmp_path):
    """An engine would take whole tiles for it."""
    model = loaded(saved)
    division = divide(model, "auto")
    division.leave_in_files({param for param in model.parameters() if param.requires_grad})
    least = division.smallest()[0]
    assert least < memory_of(model)
    offload(model, memory=least)
    _, optimizer = train(model, where=tmp_path)
    assert in_files(model) == DEPTH * BLOCK_BYTES
    optimizer.close()


def test_all_stay_if_there_is_room(saved, tmp_path):
    model = loaded(saved)
    offload(model, memory="1GiB", placement="host")
    _, optimizer = train(model)
    assert resident(saved) >= DEPTH * BLOCK_BYTES
    optimizer.close()


def test_a_use_outside_of_the_model_reads_the_file(saved, tmp_path):
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    plain = built()
    assert torch.equal(model[3].base.weight, plain[3].base.weight)
    assert torch.equal(model.state_dict()["3.base.weight"], plain[3].base.weight)
    optimizer.close()


def test_a_value_that_is_written_stays_and_that_is_said(saved, tmp_path, capfd):
    def changed(model):
        with torch.no_grad(), gathered(model[2].base.weight):
            model[2].base.weight[5, 7] += 1.0  # one page of many

    plain, model = loaded(saved), loaded(saved)
    expected, plain_optimizer = train(plain)
    ours, optimizer = train(model, tmp_path)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        changed(one)
        (expected if one is plain else ours).extend(steps_of(one, its))
    assert ours == expected
    told = [line for line in capfd.readouterr().err.splitlines() if "was written" in line]
    assert len(told) == 1 and "'2.base.weight'" in told[0]
    with torch.no_grad(), gathered(model[4].base.weight, write=True):
        model[4].base.weight.mul_(2)
    for _ in range(2):
        model(torch.ones(1, WIDTH))
    assert torch.equal(model[4].base.weight, 2 * built()[4].base.weight)
    optimizer.close()


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("memory", ["least", "1GiB"])
def test_a_file_that_is_cut_is_an_error_with_its_name_where_a_use_would_end_the_process(saved, tmp_path, passes, memory):
    model = loaded(saved)
    offload(model, memory=memory_of(model) if memory == "least" else memory, placement="nvme")
    _, optimizer = train(model, where=tmp_path)
    whole = saved.read_bytes()
    loss = model(torch.ones(2, WIDTH)).square().mean() if passes == "backward" else None
    os.truncate(saved, len(whole) // 2 + 100)  # within a page, whose end is zeros then
    name = "cannot be read from .*base.safetensors, because the file has [0-9]+ bytes now, and the parameter ends at byte"
    with pytest.raises(DataLoss, match=rf"parameter '\d.base.weight' {name} [0-9]+: give the file"):
        loss.backward() if loss is not None else model(torch.ones(2, WIDTH))
    assert pinned(model) == []
    with saved.open("r+b") as file:
        file.write(whole)
    optimizer.zero_grad()
    steps_of(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize(("code", "why"), [(errno.EFAULT, "the drive did not give it"), (133, "memory is damaged")])
def test_a_page_that_cannot_be_had_is_an_error_and_what_a_kernel_has_no_call_for_is_none(
    saved, tmp_path, monkeypatch, code, why
):
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    codes = {22: code}

    def failing(address, size_bytes, advice):
        return codes.get(advice) or advise(address, size_bytes, advice)

    monkeypatch.setattr("ziggurat._memory.frozen_files.advise", failing)
    with pytest.raises(DataLoss, match=f"parameter '0.base.weight' cannot be read from .*, because .*{why}"):
        steps_of(model, optimizer)
    for codes[22] in (errno.EINVAL, errno.ENOMEM):
        steps_of(model, optimizer)
    os.truncate(saved, 4096)
    with pytest.raises(DataLoss, match="the file has 4096 bytes now"):
        steps_of(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("memory", [3 * BLOCK_BYTES, 1 << 30], ids=["less than the table", "for all"])
def test_a_row_that_cannot_be_had_is_an_error_too(tmp_path, memory):
    def model():
        torch.manual_seed(1)
        blocks = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        return torch.nn.Sequential(torch.nn.Embedding(4 * WIDTH, WIDTH), *map(torch.nn.Sequential, blocks))

    file = tmp_path / "table.safetensors"
    save_file(model().state_dict(), file)
    ours = model()
    ours.load_state_dict(load_file(file), assign=True)
    ours[0].requires_grad_(False)
    offload(ours, memory=memory)
    trained = [param for param in ours.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained)
    optimizer.open()
    tokens = torch.tensor([0, 5, 5, 4 * WIDTH - 1])
    with torch.no_grad():
        assert torch.equal(ours(tokens), model()(tokens))
    with pytest.raises(IndexError):
        ours(tokens + 1)
    os.truncate(file, 4 * BLOCK_BYTES - 8192)
    with torch.no_grad(), pytest.raises(DataLoss, match="parameter '0.weight' cannot be read from .*table.safetensors"):
        ours(tokens)
    assert pinned(ours) == []
    optimizer.close()


def test_what_was_written_before_goes_to_the_engine(saved, tmp_path):
    model = loaded(saved)
    with torch.no_grad():
        model[2].base.weight.mul_(2)
    _, optimizer = train(model, tmp_path)
    assert in_files(model) == (DEPTH - 1) * BLOCK_BYTES
    with gathered(model[2].base.weight):
        assert torch.equal(model[2].base.weight, 2 * built()[2].base.weight)
    optimizer.close()


def own_bytes(file: Path) -> int:
    """Returns how much of the mappings of `file` is no longer the file's."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    own = [entry for entry in entries if str(file) in entry.partition("\n")[0]]
    return sum(int(size) << 10 for entry in own for size in re.findall(r"^Anonymous: +(\d+)", entry, re.M))


def test_loading_the_same_values_needs_no_memory(saved, tmp_path, monkeypatch):
    """Also of a checkpoint that has them, as earlier versions made it."""
    monkeypatch.setattr(LeftOut, "add", lambda *_: False)
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    before = own_bytes(saved)
    model.load_state_dict(load_file(saved))
    assert own_bytes(saved) == before
    checkpoint = ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)
    optimizer.close()
    again = loaded(saved)
    optimizer = ziggurat.torch.AdamW([p for p in again.parameters() if p.requires_grad], placement="host")
    before = own_bytes(saved)
    assert "left_in_files" not in ziggurat.torch.load_checkpoint(checkpoint, optimizer, again).resume
    assert own_bytes(saved) - before < BLOCK_BYTES / 2  # of what is trained


def test_a_parameter_that_is_given_other_memory_is_used_there(saved, tmp_path):
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    model[1].base.weight.data = torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        ours = model(torch.ones(1, WIDTH))
        plain = torch.ones(1, WIDTH)
        for block in model:
            with gathered(block.parameters()):
                plain = block(plain)
    assert torch.equal(ours, plain)
    assert torch.count_nonzero(model[1].base.weight) == 0
    optimizer.close()


def test_units_may_have_nothing_but_what_is_in_files(saved, tmp_path):
    plain, model = loaded(saved), loaded(saved)
    for one in (plain, model):
        for block in (one[0], one[3], one[DEPTH - 1]):
            block.requires_grad_(False)
            block.up = block.down = torch.nn.Identity()
            block.forward = lambda x, block=block: torch.tanh(x + block.base(x))
    expected, _ = train(plain)
    ours, optimizer = train(model, tmp_path)
    assert ours == expected
    optimizer.close()


class Based(torch.nn.Module):
    """A matrix, and perhaps what is added to it later."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.added: torch.nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) if self.added is None else self.base(x) + self.added(x))


def test_an_engine_may_have_nothing_of_the_model(tmp_path):
    """All of it stays in files, and what is trained came after offload()."""

    def run(folder):
        model = torch.nn.Sequential(*(Based() for _ in range(DEPTH)))
        model.load_state_dict(load_file(tmp_path / "base.safetensors"), assign=True)
        model.requires_grad_(False)
        if folder is not None:
            offload(model, memory=2 * BLOCK_BYTES + (1 << 20), placement="nvme")
        torch.manual_seed(2)
        for block in model:
            block.added = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        losses, optimizer = train(model, where=folder)
        optimizer.close()
        return losses

    torch.manual_seed(1)
    values = torch.nn.Sequential(*(Based() for _ in range(DEPTH))).state_dict()
    save_file(values, tmp_path / "base.safetensors")
    assert run(tmp_path) == run(None)


def test_what_torch_load_has_mapped_stays_too(tmp_path):
    torch.save(built().state_dict(), tmp_path / "base.pt")
    model = built()
    model.load_state_dict(torch.load(tmp_path / "base.pt", mmap=True), assign=True)
    for block in model:
        block.base.requires_grad_(False)
    ours, optimizer = train(model, tmp_path)
    assert ours == train(built())[0]
    assert in_files(model) == DEPTH * BLOCK_BYTES
    optimizer.close()


def test_a_model_built_in_files_stays_in_them(tmp_path):
    plain, _ = train(built())
    with streamed_init(tmp_path):
        model = built()
    ours, optimizer = train(model, tmp_path)
    assert ours == plain
    assert in_files(model) == DEPTH * BLOCK_BYTES
    optimizer.close()


def test_what_is_trained_moves_to_the_engine_as_ever(saved, tmp_path):
    model = loaded(saved)
    for block in model:
        block.base.requires_grad_(True)
    _, optimizer = train(model, tmp_path)
    assert in_files(model) == 0
    optimizer.close()
    # frozen now, and in PyTorch's memory
    for block in model:
        block.base.requires_grad_(False)
    optimizer = ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], placement="host")
    optimizer.open()
    assert in_files(model) == 0
    optimizer.close()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
