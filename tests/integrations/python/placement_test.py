# SPDX-License-Identifier: Apache-2.0
"""placement="auto": what a state takes, and what is chosen.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import math
import re
import sys
from pathlib import Path

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._memory import placement as placement_module
from ziggurat._memory.memory import free_bytes, size_of, size_text

MIB, GIB = 1 << 20, 1 << 30


def test_this_machine_has_memory():
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert 0 < free_bytes() < int(total[1]) * 1024


def test_sizes_read_as_the_engines():
    assert [size_text(n) for n in (7, 46.1 * MIB, 84 * GIB)] == ["7.0 B", "46.1 MiB", "84.0 GiB"]
    assert size_text(5000 * GIB) == "4.9 TiB"


def test_sizes_are_read_as_the_engine_reads_them():
    sizes = (7, "7", "64MiB", "384 m", "1.5GiB", "2GB", "1TB", "9 b", ".5 G i B ")
    assert [size_of(s) for s in sizes] == [
        7, 7, 64 * MIB, 384 * MIB, 1.5 * GIB, 2e9, 1e12, 9, GIB / 2
    ]  # fmt: skip
    assert all(math.isnan(size_of(text)) for text in ("", "MiB", "1.2.3", "-1", "3 miles"))


def model_of(*layers):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(*layer) for layer in layers)).bfloat16()


SMALL = (128, 128)


def adamw(trained, placement, **more):
    return ziggurat.torch.AdamW(trained.parameters(), placement=placement, threads=1, **more)


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()


@pytest.mark.parametrize("state_format", ["fp32", "bf16-moments", "8bit", "split", "bf16"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD", "Adagrad"])
@pytest.mark.parametrize("layers", [[(1000, 1000)], [(16, 16)] * 20], ids=["large", "small"])
def test_a_state_takes_what_the_engine_says(layers, name, state_format):
    model = model_of(*layers)
    optimizer = getattr(ziggurat.torch, name)(model.parameters(), state_format=state_format)
    expected = optimizer._choice(model.parameters(), None).state_bytes
    optimizer.open()
    assert optimizer.engine.figures()["host_used_bytes"] == pytest.approx(expected, rel=0.03)
    optimizer.close()


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free, in MiB. A small model takes 384 KiB."""
    return lambda mib: monkeypatch.setattr(placement_module, "free_bytes", lambda: int(mib * MIB))


@pytest.mark.parametrize(
    ("mib", "given", "expected"),
    [(64 * 1024, None, 128.375), (1026, None, 128.25), (1024, None, 0), (64 * 1024, "96MiB", 96)],
    ids=["all is kept", "an eighth", "too little for an eighth", "as given"],
)
def test_a_state_on_a_drive_has_an_eighth_of_free_memory_beside_it(
    mib, given, expected, free, tmp_path
):
    free(mib)
    model = model_of(SMALL)
    optimizer = adamw(model, f"nvme:{tmp_path}/state", host_memory=given)
    optimizer.open()
    budget = optimizer.engine.figures()["host_budget_bytes"] / MIB
    if expected:
        assert budget == pytest.approx(expected, rel=1e-3)
    else:
        assert budget < 64  # what the engine needs
    optimizer.close()


@pytest.mark.parametrize(("mib", "tier"), [(0.76, "host"), (0.74, "nvme")])
def test_half_of_what_is_free_is_for_the_state(mib, tier, free, capfd, tmp_path):
    free(mib)
    model = model_of(SMALL)
    optimizer = adamw(model, f"auto:{tmp_path}/state")
    assert optimizer.placement == f"auto:{tmp_path}/state"
    assert "placement" not in capfd.readouterr().err
    step(model, optimizer)
    step(model, optimizer)
    expected = "host" if tier == "host" else f"nvme:{tmp_path}/state"
    assert optimizer.placement == expected
    assert ("there is no store" in optimizer.engine.describe()) == (tier == "host")
    assert (tmp_path / "state").exists() == (tier == "nvme")
    (line,) = [at for at in capfd.readouterr().err.splitlines() if at.startswith("ziggurat:")]
    assert line == (
        f'ziggurat: placement "{expected}": the state takes 384.0 KiB, and may take up to half of the '
        f"{size_text(int(mib * MIB))} of free memory"
    )
    optimizer.close()


def test_bits_are_those_of_the_placement_that_is_chosen(free, tmp_path):
    def trained(placement):
        model = model_of(SMALL)
        optimizer = adamw(model, placement, model=model)
        for _ in range(3):
            step(model, optimizer)
        optimizer.close()
        return [p.detach().view(torch.int16) for p in model.parameters()]

    free(100)
    on_host = trained(f"auto:{tmp_path}/one")
    free(0)
    on_nvme = trained(f"auto:{tmp_path}/two")
    for results in (on_host, on_nvme):
        for ours, named in zip(results, trained("host"), strict=True):
            assert torch.equal(ours, named)


def test_without_a_directory_a_state_must_fit(free):
    model = model_of(SMALL)
    free(0.5)
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=r'placement="auto": the state takes 384.0 KiB, .* 512.0 KiB .* Give placement="nvme:/path"',
    ):
        step(model, adamw(model, "auto"))
    free(100)
    optimizer = adamw(model, "auto")
    step(model, optimizer)
    assert optimizer.placement == "host"


def test_a_state_that_was_opened_has_its_memory_and_the_next_choice_sees_that():
    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    model = model_of((4000, 1000))
    optimizer = adamw(model, "auto")
    before = resident()
    optimizer.open()
    assert resident() - before > 0.95 * optimizer.engine.figures()["host_used_bytes"]


def test_a_store_that_is_there_is_a_run_to_go_on_with(free, capfd, tmp_path):
    free(0)
    placement = f"auto:{tmp_path}/state"
    model = model_of(SMALL)
    first = adamw(model, placement)
    step(model, first)
    first.close()
    free(100)
    with pytest.raises(ziggurat.InvalidArgument, match="there is a store already"):
        adamw(model, placement).open()
    capfd.readouterr()
    again = adamw(model, placement)
    again.open(resume=True)
    assert again.engine.generation == 1
    assert again.placement == f"nvme:{tmp_path}/state"


def test_a_directory_that_has_no_store_is_none(free, tmp_path):
    free(100)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes.txt").write_text("mine")
    optimizer = adamw(model_of(SMALL), f"auto:{tmp_path}/state")
    optimizer.open()
    assert optimizer.placement == "host"


def test_what_goes_on_after_a_kill_needs_the_drive_however_much_memory_is_free(free, tmp_path):
    free(100)
    optimizer = adamw(model_of(SMALL), f"auto:{tmp_path}/one")
    ziggurat.torch.Resume(optimizer)
    assert optimizer.placement == f"nvme:{tmp_path}/one"
    optimizer = adamw(model_of(SMALL), f"auto:{tmp_path}/two", state="store")
    assert optimizer.placement == f"nvme:{tmp_path}/two"
    optimizer = adamw(model_of(SMALL), "auto")
    with pytest.raises(
        ziggurat.InvalidArgument, match=r'Resume: with placement="auto" .* "auto:/path"'
    ):
        ziggurat.torch.Resume(optimizer)
    with pytest.raises(ziggurat.InvalidArgument, match=r'open\(resume=True\): .* "auto:/path"'):
        optimizer.open(resume=True)
    with pytest.raises(ziggurat.InvalidArgument, match='placement="host" makes none'):
        adamw(model_of(SMALL), "auto", state="store")


def test_a_budget_that_is_too_small_for_host_memory_leaves_the_drive(free, capfd, tmp_path):
    free(10_000)
    large = model_of((1000, 1000))
    optimizer = adamw(large, f"auto:{tmp_path}/state", host_memory="8MiB")
    optimizer.open()
    assert optimizer.placement == f"nvme:{tmp_path}/state"
    assert "host_memory 8.0 MiB is too small for the state" in capfd.readouterr().err
    optimizer = adamw(large, "auto", host_memory="8MiB")
    with pytest.raises(ziggurat.ResourceExhausted, match="host_memory 8.0 MiB is too small"):
        optimizer.open()


@pytest.mark.parametrize("mib", [100, 0.5])
def test_parameters_that_are_added_go_where_the_first_are(mib, free, tmp_path):
    free(mib)
    model = model_of(SMALL, SMALL)
    optimizer = ziggurat.torch.AdamW(model[0].parameters(), placement=f"auto:{tmp_path}/state")
    step(model[0], optimizer)
    chosen = optimizer.placement
    free(100 - mib)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    step(model, optimizer)
    assert optimizer.placement == chosen
    assert (tmp_path / "state" / "added-1").exists() == (chosen != "host")
    optimizer.close()


@pytest.mark.parametrize("placement", ["disk", "nvme:", "auto:", "host:/x", ""])
def test_a_placement_that_is_none_is_told_what_there_is(placement):
    with pytest.raises(ziggurat.InvalidArgument, match='"host", "nvme:/path" .* "auto:/path"'):
        adamw(model_of(SMALL), placement)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
