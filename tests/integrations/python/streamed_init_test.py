# SPDX-License-Identifier: Apache-2.0
"""Models that are built in ziggurat.torch.streamed_init(), whose large tensors are in files.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import gc
import os
import re
import resource
import sys
import threading
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._checkpoint import checkpoint
from ziggurat._streaming import streamed_init as streamed_init_module
from ziggurat._streaming import streaming
from ziggurat.torch import streamed_init

MIB = 1 << 20
LARGE = 1024  # a matrix of LARGE x LARGE takes 4 MiB in fp32


def every_layer() -> torch.nn.Module:
    """Layers whose initial values are drawn, computed, copied, and left as they are."""
    return torch.nn.Sequential(
        torch.nn.Linear(LARGE, LARGE),
        torch.nn.LayerNorm(LARGE),
        torch.nn.Embedding(LARGE, LARGE, padding_idx=3),
        torch.nn.TransformerEncoderLayer(512, 4),
        torch.nn.Conv2d(512, 512, 3),
        torch.nn.LSTM(512, 512),
        torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(600, 600)),
        torch.nn.ParameterList([torch.nn.Parameter(torch.randn(LARGE, LARGE).t())]),
    )


def in_files() -> list[int]:
    """Returns the sizes of this process's memory that is in files without names."""
    gc.collect()  # modules may have one another
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*\(deleted\)$", maps, re.M)
    return [int(end, 16) - int(begin, 16) for begin, end in found]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_values_and_draws_are_as_without_it(tmp_path, dtype, rounds, monkeypatch):
    monkeypatch.setattr(streamed_init_module, "_OPEN_BYTES", 6 * MIB)  # few of the layers' tensors
    torch.manual_seed(7)
    plain = every_layer().to(dtype)
    plain_draws = torch.rand(3)
    torch.manual_seed(7)
    with streamed_init(tmp_path, dtype=dtype if rounds else None):
        streamed = every_layer().to(dtype)
    assert torch.equal(torch.rand(3), plain_draws)
    ours = streamed.state_dict()
    differ = [name for name, value in plain.state_dict().items() if not same(value, ours[name])]
    assert differ == []
    assert ours.keys() == plain.state_dict().keys()


def test_large_tensors_are_in_files_without_names_for_as_long_as_they_are_used(tmp_path):
    before = in_files()
    with streamed_init(tmp_path):
        model = torch.nn.Linear(LARGE, LARGE)
        assert os.listdir(tmp_path) == []
    assert sorted(in_files()) == sorted([*before, 4 * MIB])  # the bias stays in memory
    with torch.no_grad():
        model.weight.fill_(3)
    assert model(torch.ones(1, LARGE)).mean().item() == pytest.approx(3 * LARGE, rel=1e-3)
    del model
    assert in_files() == before


def test_what_another_type_replaces_is_free_at_once(tmp_path):
    with streamed_init(tmp_path):
        model = torch.nn.Linear(LARGE, LARGE).bfloat16()
    assert in_files() == [2 * MIB]
    assert model.weight.dtype == torch.bfloat16


def test_the_block_changes_nothing_outside_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    found = []
    with pytest.raises(ZeroDivisionError), streamed_init(tmp_path):
        other = threading.Thread(target=lambda: found.append(torch.empty(LARGE, LARGE)))
        other.start()
        other.join()
        raise ZeroDivisionError
    after = torch.empty(LARGE, LARGE)
    assert in_files() == []
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"
    del found, after


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ziggurat.InvalidArgument, match=r"nowhere.*No such file or directory: give a directory"):
        with streamed_init(tmp_path / "nowhere"):
            pass


def test_other_kinds_of_tensors_are_as_without_it(tmp_path):
    with streamed_init(tmp_path):
        dense = torch.eye(LARGE)
        sparse = dense.to_sparse()
        assert torch.equal(sparse.coalesce().to_dense(), dense)
        assert torch.equal(dense.to_sparse_csr() @ dense, dense)
        assert torch.equal(dense.to_mkldnn().to_dense(), dense)
        layer = torch.nn.Embedding(LARGE, LARGE, sparse=True)
        layer(torch.tensor([1, 2])).sum().backward()
        assert layer.weight.grad.is_sparse


def test_the_folder_is_the_one_that_was_named(tmp_path, monkeypatch):
    (tmp_path / "it").mkdir()
    monkeypatch.chdir(tmp_path)
    with streamed_init("it"):
        monkeypatch.chdir("/")
        kept = torch.empty(LARGE, LARGE)
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
    assert f"{tmp_path}/it" in Path("/proc/self/maps").read_text()
    del kept


def build_under_a_limit(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with pytest.raises(ziggurat.ResourceExhausted, match=r"4\.0 MiB in .*File too large"):
        with streamed_init(folder):
            torch.nn.Linear(LARGE, LARGE)
    torch.nn.Linear(LARGE, LARGE)


def test_a_drive_without_room_is_an_error_that_says_so(tmp_path):
    with forked_runs() as runs:
        assert runs.status_of(runs.started(build_under_a_limit, tmp_path), within=60) == 0


def losses(model: torch.nn.Module) -> list[float]:
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        loss = model(torch.rand(2, LARGE, generator=made).to(model[0].weight.dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    optimizer.close()
    return found


def small_blocks() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(LARGE, 512), torch.nn.GELU(), torch.nn.Linear(512, LARGE))
    return torch.nn.Sequential(*layers).bfloat16()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_model_in_files_trains_to_the_same_losses(tmp_path, offloaded):
    plain = losses(small_blocks())
    with streamed_init(tmp_path):
        model = small_blocks()
    assert in_files()
    if offloaded:
        ziggurat.torch.offload(model, memory=memory_of(model))
    assert losses(model) == plain


def test_a_state_dict_that_memory_has_no_room_for_is_in_files(tmp_path, monkeypatch):
    model = small_blocks()
    ziggurat.torch.offload(model, memory=memory_of(model), placement="nvme")
    optimizer = ziggurat.torch.AdamW(model.parameters(), placement=f"nvme:{tmp_path}/state")
    optimizer.open()
    in_memory = model.state_dict()
    assert in_files() == []
    monkeypatch.setattr(streaming, "free_bytes", lambda: MIB)
    copied = model.state_dict()
    assert in_files() == [MIB, MIB]  # the biases stay in memory
    assert copied.keys() == in_memory.keys()
    assert all(same(value, in_memory[name]) for name, value in copied.items())
    monkeypatch.undo()
    optimizer.close()


def test_a_checkpoint_copies_frozen_parameters_into_files_that_memory_has_no_room_for(tmp_path, monkeypatch):
    def made():
        model = small_blocks()
        model[0].requires_grad_(False)
        ziggurat.torch.offload(model, memory=memory_of(model))
        return model, ziggurat.torch.AdamW(model.parameters())

    copies = []
    save = checkpoint.save_natively
    monkeypatch.setattr(checkpoint, "save_natively", lambda *given: (copies.append(in_files()), save(*given)))
    model, optimizer = made()
    optimizer.open()
    frozen_bytes = sum(param.nbytes for param in model[0].parameters())
    for free in (2 * frozen_bytes, 2 * frozen_bytes - 1):
        monkeypatch.setattr(checkpoint, "free_bytes", lambda free=free: free)
        ziggurat.torch.save_checkpoint(tmp_path / str(free), optimizer, model)
        other, its = made()
        with torch.no_grad():
            other[0].weight.zero_()
        ziggurat.torch.load_checkpoint(tmp_path / str(free), its, other)
        theirs = other.state_dict()
        assert all(same(value, theirs[name]) for name, value in model.state_dict().items())
        its.close()
    assert copies == [[], [MIB]]  # the bias stays in memory
    assert in_files() == []
    optimizer.close()


@pytest.fixture
def rounding(tmp_path, monkeypatch):
    """The block of a model that is going to be bf16, in which one large tensor at a time is in fp32."""
    monkeypatch.setattr(streamed_init_module, "_OPEN_BYTES", 1)
    monkeypatch.setattr(streamed_init_module, "_IN_USE", 1)
    return streamed_init(tmp_path, dtype=torch.bfloat16)


def test_a_model_takes_two_bytes_a_parameter_from_the_first_draw_on(rounding):
    with rounding:
        model = torch.nn.Sequential(*(torch.nn.Linear(LARGE, LARGE, bias=False) for _ in range(4)))
        assert in_files() == [2 * MIB] * 3  # the last is still fp32, in memory
        model.bfloat16()
        assert in_files() == [2 * MIB] * 4
    assert in_files() == [2 * MIB] * 4
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())


def test_tensors_may_be_drawn_again_and_constants_read(rounding):
    torch.manual_seed(2)
    expected = [torch.randn(LARGE, LARGE), torch.full((LARGE, LARGE), 1.5) + 0.25]
    torch.manual_seed(2)
    with rounding:
        drawn = torch.zeros(LARGE, LARGE)
        constant = torch.full((LARGE, LARGE), 1.5)
        drawn.normal_()
        constant.add_(0.25)
        turned = torch.ones(LARGE, 512).t()
        made = [one.to(torch.bfloat16) for one in (drawn, constant, turned[:512])]
        del drawn, constant, turned
    assert all(map(same, made, [one.bfloat16() for one in expected]))
    assert torch.equal(made[2], torch.ones(512, LARGE, dtype=torch.bfloat16))


def test_a_use_of_what_was_rounded_is_an_error(rounding):
    with pytest.raises(ziggurat.InvalidArgument, match=r"aten\.mul_\S* uses a tensor of \(1024, 1024\).*leave dtype out"):
        with rounding:
            one, other = (torch.randn(LARGE, LARGE) for _ in range(2))
            one.mul_(2)
    assert other.isfinite().all()
    with pytest.raises(RuntimeError):
        one.sum()


@pytest.mark.parametrize("fill", ["load_state_dict", "fill_"])
def test_what_is_overwritten_with_its_own_values_is_not_lost(rounding, fill):
    # load_state_dict() puts the error's message into one of its own
    with pytest.raises(Exception, match=r"uses a tensor of \(1024, 1024\)"):
        with rounding, torch.no_grad():
            model = torch.nn.ModuleList(torch.nn.Linear(LARGE, LARGE, bias=False) for _ in range(2))
            if fill == "load_state_dict":
                model.load_state_dict(model.state_dict())
            else:
                model[0].weight.fill_(model[0].weight[0, 0])


def test_tensors_are_made_like_what_was_rounded(rounding):
    with rounding:
        rounded, _ = (torch.randn(LARGE, LARGE) for _ in range(2))
        made = [torch.empty_like(rounded), torch.zeros_like(rounded), rounded.new_empty(LARGE, LARGE)]
        made = [one.fill_(2).to(torch.bfloat16) for one in made]
        del rounded, _
    assert all(one.eq(2).all() for one in made)


@pytest.mark.parametrize("draw", [torch.nn.init.trunc_normal_, torch.nn.init.orthogonal_])
def test_draws_have_their_own_temporaries_of_any_size(tmp_path, monkeypatch, draw):
    monkeypatch.setattr(streamed_init_module, "_OPEN_BYTES", 1)

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(2))
        for layer in layers:
            draw(layer.weight)
        return [layer.weight for layer in layers.bfloat16()]

    expected = drawn()
    with streamed_init(tmp_path, dtype=torch.bfloat16):
        made = drawn()
    assert all(map(same, made, expected))


def test_a_model_that_was_not_converted_is_an_error(rounding):
    with pytest.raises(ziggurat.InvalidArgument, match=r"2 tensors are still fp32.*model\.to\(torch\.bfloat16\) within"):
        with rounding:
            kept = [torch.randn(LARGE, LARGE) for _ in range(3)]
    del kept


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
