# SPDX-License-Identifier: Apache-2.0
"""What is loaded into an offloaded model, and read of it in parts: the values of the same script without offload().

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import io
import re
import sys
import tempfile
from pathlib import Path

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import (
        gpt,
        loss_of,
        memory_of,
        same_with_and_without,
        tokens_of,
        train,
        values_of,
    )
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._checkpoint import background_save
from ziggurat._memory import progress
from ziggurat._memory.file_memory import LARGE_BYTES, empty_in_file
from ziggurat._optimizer.opened import Opened
from ziggurat._optimizer.rounding import rounded
from ziggurat._streaming.streaming import Streaming
from ziggurat.torch import offload

SLOW = 5e5  # bytes a second: a save takes seconds
LACKING = ("narrow.weight", "norm.bias")


@pytest.fixture
def partial(tmp_path):
    """A checkpoint, and what loads it but for two parameters."""
    model = gpt()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model)

    def load(optimizer, model, **arguments):
        found = ziggurat.torch.load_checkpoint(
            tmp_path / "saved",
            optimizer,
            model,
            strict=False,
            rename=lambda name: None if name in LACKING else name,
            **arguments,
        )
        assert set(LACKING) <= set(found.missing)

    return load


def model_to_load():
    model = gpt()
    with torch.no_grad():
        model.norm.bias.fill_(0.25)
    return model


class Terminal(io.StringIO):
    """Standard error, and a clock of which each look takes a second."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self._is_one, self.seconds = is_one, 0

    def isatty(self) -> bool:
        return self._is_one

    def monotonic(self) -> int:
        self.seconds += 1
        return self.seconds


@pytest.mark.parametrize("is_one", [True, False], ids=["terminal", "file"])
def test_a_terminal_shows_how_far_moving_and_loading_are(tmp_path, monkeypatch, partial, is_one):
    terminal = Terminal(is_one)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "time", terminal)
    model = offload(gpt(), memory="1GiB", placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    optimizer.open()
    optimizer.close()
    plain = gpt()
    partial(ziggurat.torch.AdamW(plain.parameters()), plain)
    shown = [line for line in terminal.getvalue().split("\r\x1b[K") if "to go" in line]
    number = r"[0-9.]+ [KM]?i?B of [0-9.]+ KiB, [0-9.]+ GB/s, [0-9]+ s to go"
    if is_one:
        assert all(re.fullmatch(rf"ziggurat: (moving|reading) parameters .*: {number}", line) for line in shown)
        assert {line.split()[1] for line in shown} == {"moving", "reading"}
        assert "\r\x1b[Kziggurat: offload()" in terminal.getvalue()  # on the line that was wiped
        assert terminal.getvalue().endswith("\r\x1b[K")
    else:
        assert "\r" not in terminal.getvalue()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_what_a_checkpoint_lacks_keeps_its_values(tmp_path, partial, placement):
    def run(offload):
        model = model_to_load()
        offload(model, placement=placement)
        store = tempfile.mkdtemp(dir=tmp_path)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{store}")
        partial(optimizer, model)
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_only", [False, True])
def test_what_a_checkpoint_lacks_is_durable_with_the_rest(tmp_path, partial, weights_only, dtype):
    """The store that a load leaves goes on with the same values, before any step."""

    def run(offload):
        model = model_to_load().to(dtype)
        store = tempfile.mkdtemp(dir=tmp_path)
        results = []
        for loads in (True, False):
            offload(model, placement="nvme")
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{store}")
            if loads:
                partial(optimizer, model, weights_only=weights_only)
            else:
                optimizer.open(resume=True)
            results.append({name: value.clone() for name, value in model.state_dict().items()})
            optimizer.close()
            model = gpt(dtype)  # another process's
        assert results[0]["norm.bias"][0] == 0.25
        for name, value in results[0].items():
            assert torch.equal(value, results[1][name]), name
        return results[1]

    same_with_and_without(lambda offload: {name: value.tolist() for name, value in run(offload).items()})


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("when", ["before it opens", "before a step", "after a step", "to other values"])
def test_the_state_of_another_optimizer_is_loaded(tmp_path, placement, when):
    """PyTorch's, which has no masters of parameters in 16 bits; or an earlier one, whose masters are others."""
    model = gpt(torch.bfloat16)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, theirs, range(2))
    weights = model.state_dict()

    def run(offload):
        model = gpt(torch.bfloat16)
        model.load_state_dict(weights)
        offload(model, placement=placement)
        store = tempfile.mkdtemp(dir=tmp_path)
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-2, placement=f"nvme:{store}" if placement == "nvme" else "host"
        )
        state = theirs.state_dict()
        if when != "before it opens":
            optimizer.open()
        if when in ("after a step", "to other values"):
            train(model, optimizer, range(2, 3))
        if when == "to other values":
            state = optimizer.state_dict()
            train(model, optimizer, range(3, 4))
        optimizer.load_state_dict(state)
        losses = train(model, optimizer, range(4, 7))
        ziggurat.torch.save_checkpoint(f"{store}/saved", optimizer, model)
        steps = [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
        optimizer.close()
        return losses, steps, [value.tolist() for value in model.state_dict().values()]

    same_with_and_without(run)


def test_a_state_that_was_given_in_part_is_given_whole_by_the_next_try(monkeypatch):
    model = gpt(torch.bfloat16)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, theirs, range(2))
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(theirs.state_dict())
    write_state, calls = Opened.write_state, []

    def failing(*given):
        calls.append(given)
        if len(calls) == 5:
            raise MemoryError
        write_state(*given)

    monkeypatch.setattr(Opened, "write_state", failing)
    with pytest.raises(MemoryError):
        optimizer.open()
    optimizer.open()
    assert {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {2}
    for param, entry in theirs.state.items():
        assert torch.equal(optimizer.state[param]["exp_avg"], entry["exp_avg"].float())
    optimizer.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_close_without_room_needs_a_store_that_has_the_parameters(tmp_path, monkeypatch, steps):
    """Nothing is in it before the first step, so that nothing could be resumed."""
    model = gpt()
    offload(model, memory=memory_of(model), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{tmp_path}/state")
    optimizer.open()
    train(model, optimizer, range(steps))
    optimizer.synchronize()
    with monkeypatch.context() as small:
        small.setattr("ziggurat._streaming.streaming.free_bytes", lambda: 1000)
        if steps == 0:
            with pytest.raises(ziggurat.ResourceExhausted, match="they are in no store"):
                optimizer.close()
        else:
            optimizer.close()
    if steps == 0:
        optimizer.close()
    else:
        with pytest.raises(ziggurat.InvalidArgument, match="and resume"):
            model.norm.weight.sum()


def test_modules_within_units_are_saved_and_loaded_too():
    model = gpt()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    optimizer.open()
    with_params = [(name, module) for name, module in model.named_modules() if module._parameters]
    assert len(with_params) > 4
    for name, module in with_params:
        found = module.state_dict()
        prefix = f"{name}." if name else ""
        assert all(torch.equal(value, plain[prefix + key]) for key, value in found.items())
    for _, module in with_params:
        found = module.state_dict()
        module.load_state_dict({key: torch.full_like(value, 0.5) for key, value in found.items()})
    assert all((value == 0.5).all() for name, value in values_of(model).items())
    with pytest.raises(ziggurat.InvalidArgument, match="is used outside"):
        model.norm.weight.detach()
    optimizer.close()


def test_a_save_in_the_background_refuses_before_it_copies(tmp_path, monkeypatch):
    """Copies of a frozen base are made for it, and are copied again to be saved."""
    model = gpt()
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    frozen_bytes = sum(param.nbytes for param in model.blocks.parameters())
    offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(
        (param for param in model.parameters() if param.requires_grad), lr=1e-2, model=model
    )
    train(model, optimizer, range(1))
    copied = []
    copy_of = Streaming.copy_of
    monkeypatch.setattr(Streaming, "copy_of", lambda *given: copied.append(given[1].name) or copy_of(*given))
    monkeypatch.setattr(background_save, "memory_share", lambda: 2 * frozen_bytes - 1)
    with pytest.raises(ziggurat.InvalidArgument, match="save without background"):
        ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model, background=True)
    assert not copied
    monkeypatch.setattr(background_save, "memory_share", lambda: 4 * frozen_bytes)
    ziggurat.torch.save_checkpoint(tmp_path / "saved", optimizer, model, background=True).wait()
    assert set(copied) == {name for name, param in model.named_parameters() if not param.requires_grad}
    optimizer.close()


def tensors_in(checkpoint):
    """The bytes of the files with tensors, by their names."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [("host", torch.float32), ("nvme", torch.bfloat16), ("params=nvme,grads=nvme", torch.float32)],
)
def test_a_save_in_the_background_has_the_values_of_its_call(placement, dtype, tmp_path):
    """Also of what is frozen, and of a parameter that was written and becomes its master with the next step."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    model = gpt(dtype)
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    offload(model, memory=memory_of(model), placement=placement)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = ziggurat.torch.AdamW(trained, lr=1e-2, model=model, placement=f"nvme:{tmp_path}/state")
    train(model, optimizer, range(2))
    with ziggurat.torch.gathered(model.widen.weight), torch.no_grad():
        model.widen.weight.mul_(0.5)
    expected = values_of(model)
    waited = ziggurat.torch.save_checkpoint(tmp_path / "waited", optimizer, model)
    save = ziggurat.torch.save_checkpoint(
        tmp_path / "beside", optimizer, model, background=True, bandwidth=SLOW
    )
    train(model, optimizer, range(2, 4))
    assert not save.done, "the save was over before the steps, so they prove nothing"
    beside = save.wait()
    assert tensors_in(beside) == tensors_in(waited)
    saved = {}
    for shard in Path(beside).glob("*.safetensors"):
        saved |= load_file(shard)
    for name, value in expected.items():
        if name in saved:  # of two that are tied the first is
            assert torch.equal(rounded(saved[name].float(), dtype), value), name
    optimizer.close()


def test_a_loop_of_resume_saves_the_values_of_its_steps(tmp_path):
    def loop(name, **saves):
        model = gpt()
        offload(model, memory=memory_of(model), placement="nvme")
        optimizer = ziggurat.torch.AdamW(
            model.parameters(), lr=1e-2, model=model, placement=f"nvme:{tmp_path}/{name}"
        )
        loader = torch.utils.data.DataLoader(torch.arange(6), shuffle=False)
        resume = ziggurat.torch.Resume(optimizer, None, loader, **saves)
        for step in resume:
            if not saves and step in (2, 4):  # as many are made
                ziggurat.torch.save_checkpoint(tmp_path / "waited", optimizer, model)
            loss_of(model, tokens_of(step.item())).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()

    loop("one")
    loop("other", checkpoint_every=2, checkpoint_dir=tmp_path / "beside")
    for name in ("step-000000002", "step-000000004"):
        assert tensors_in(tmp_path / "beside" / name) == tensors_in(tmp_path / "waited" / name)


def test_a_folder_in_which_no_file_can_be_mapped_is_named(tmp_path, monkeypatch):
    def from_file(*_):
        raise RuntimeError("unable to mmap: No such device (19)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", from_file)
    with pytest.raises(ziggurat.ResourceExhausted, match=f"in {tmp_path} .*shared mappings .*No such device"):
        empty_in_file(str(tmp_path), torch.empty(LARGE_BYTES))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
