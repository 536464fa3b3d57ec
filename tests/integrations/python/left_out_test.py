# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model whose frozen base stays in its file: they have what is trained, and the rest if it was written.

Run by pytest; as a script it exits with 77 where PyTorch, safetensors or pytest is missing, or
PyTorch is older than offload() takes.
"""

import os
import shutil
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from frozen_files_test import BLOCK_BYTES, DEPTH, built, in_files, loaded, saved, steps_of, train  # noqa: F401
    from safetensors.torch import load_file, save_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._checkpoint import background_save
from ziggurat.torch import load_checkpoint, offload, save_checkpoint

BASE = [f"{block}.base.weight" for block in range(DEPTH)]


def held(checkpoint: Path) -> set[str]:
    """Returns the names of the parameters whose values the checkpoint has."""
    names = {name for file in Path(checkpoint).glob("*.safetensors") for name in load_file(file)}
    return {name for name in names if not name.startswith("optimizer.")}


def begun(model, offloads=True):
    """Returns a new optimizer of what is trained."""
    if offloads:
        offload(model, memory=memory_of(model))
    return ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.fixture
def run(saved, tmp_path):  # noqa: F811
    """A checkpoint of a model's second step, and the losses of the two that come then."""
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    checkpoint = save_checkpoint(tmp_path / "checkpoints", optimizer, model)
    losses = steps_of(model, optimizer)
    optimizer.close()
    return checkpoint, losses


@pytest.mark.parametrize("offloads", [True, False])
def test_a_base_in_its_file_is_left_out_and_training_goes_on_with_the_bits(run, saved, tmp_path, offloads):  # noqa: F811
    checkpoint, losses = run
    assert held(checkpoint) == {name for name, _ in built().named_parameters()} - set(BASE)
    assert sum(file.stat().st_size for file in Path(checkpoint).rglob("*")) < BLOCK_BYTES
    elsewhere = shutil.copy(saved, tmp_path / "copy.safetensors")  # it may lie elsewhere
    model = loaded(Path(elsewhere))
    optimizer = begun(model, offloads)
    found = load_checkpoint(checkpoint, optimizer, model)
    assert (found.step, found.missing, found.unexpected, found.notes) == (2, [], [], [])
    told = found.resume["left_in_files"]
    assert (told["parameters"], told["files"]) == (DEPTH, [str(saved)])
    assert steps_of(model, optimizer) == losses
    if offloads:
        assert in_files(model) == DEPTH * BLOCK_BYTES
    optimizer.close()


def test_a_save_in_the_background_needs_no_memory_for_it(saved, tmp_path, monkeypatch):  # noqa: F811
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    monkeypatch.setattr(background_save, "memory_share", lambda: BLOCK_BYTES)
    save = save_checkpoint(tmp_path / "checkpoints", optimizer, model, background=True)
    steps_of(model, optimizer)
    assert held(save.wait()).isdisjoint(BASE)
    optimizer.close()


def first(weight):
    weight.view(-1)[0] = 7  # on a page that another tensor's values begin


def within(weight):
    weight[500, 500] = 7


def behind(weight):
    weight.data[1000, 3] = 7  # which PyTorch does not count


@pytest.mark.parametrize("write", [first, within, behind])
def test_what_was_written_is_saved(saved, tmp_path, write):  # noqa: F811
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    with torch.no_grad():
        write(model[3].base.weight)
    checkpoint = save_checkpoint(tmp_path / "checkpoints", optimizer, model)
    # The first page is another parameter's last, whose values are saved with it.
    assert BASE[3] in held(checkpoint) and len(held(checkpoint) & set(BASE)) <= (2 if write is first else 1)
    losses = steps_of(model, optimizer)
    expected = model[3].base.weight.clone()
    optimizer.close()
    model = loaded(saved)
    optimizer = begun(model)
    load_checkpoint(checkpoint, optimizer, model)
    assert steps_of(model, optimizer) == losses
    assert torch.equal(model.state_dict()[BASE[3]], expected)
    again = save_checkpoint(tmp_path / "again", optimizer, model)
    assert held(again) & set(BASE) == held(checkpoint) & set(BASE)
    optimizer.close()


def test_what_is_given_other_memory_is_saved(saved, tmp_path):  # noqa: F811
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    model[1].base.weight.data = torch.ones_like(model[1].base.weight)
    assert held(save_checkpoint(tmp_path / "checkpoints", optimizer, model)) & set(BASE) == {BASE[1]}
    optimizer.close()


def test_what_is_in_a_file_without_a_name_is_saved(tmp_path):
    """No later run could read it there."""
    with ziggurat.torch.streamed_init(tmp_path):
        model = built()
    _, optimizer = train(model, tmp_path)
    assert in_files(model) == DEPTH * BLOCK_BYTES
    assert set(BASE) <= held(save_checkpoint(tmp_path / "checkpoints", optimizer, model))
    optimizer.close()


def test_a_file_that_was_removed_no_longer_counts(saved, tmp_path):  # noqa: F811
    model = loaded(saved)
    _, optimizer = train(model, tmp_path)
    saved.unlink()
    assert set(BASE) <= held(save_checkpoint(tmp_path / "checkpoints", optimizer, model))
    optimizer.close()


def test_a_model_of_another_file_is_refused_by_name(run, saved, tmp_path):  # noqa: F811
    checkpoint, losses = run
    values = load_file(saved)
    values[BASE[2]] = values[BASE[2]] * 1.5
    save_file(values, tmp_path / "other.safetensors")
    model = loaded(tmp_path / "other.safetensors")
    optimizer = begun(model)
    with pytest.raises(ziggurat.InvalidArgument, match=rf"are others: 2.base.weight \({saved}\); build the model"):
        load_checkpoint(checkpoint, optimizer, model)
    found = load_checkpoint(checkpoint, optimizer, model, strict=False)
    assert found.notes == [f"the model keeps values that are not those of the run: 2.base.weight ({saved})"]
    assert steps_of(model, optimizer) != losses
    optimizer.close()


def test_a_file_that_is_cut_is_an_error_for_a_save_too(saved, tmp_path):  # noqa: F811
    """A read would end the process."""

    def run() -> None:
        model = loaded(saved)
        optimizer = begun(model)
        optimizer.open()
        os.truncate(saved, saved.stat().st_size // 2 + 100)
        for use in (lambda: model(torch.ones(2, 1024)), lambda: save_checkpoint(tmp_path / "checkpoints", optimizer, model)):
            with pytest.raises(ziggurat.DataLoss, match=r"'\d.base.weight' cannot be read from .* the file has \d+ bytes now"):
                use()

    with forked_runs() as runs:
        assert runs.status_of(runs.started(run), within=120) == 0


@pytest.mark.parametrize("offloads", [True, False])
def test_a_file_that_is_cut_is_an_error_for_a_load_too(run, saved, offloads):  # noqa: F811
    checkpoint, _ = run

    def load() -> None:
        model = loaded(saved)
        optimizer = begun(model, offloads)
        os.truncate(saved, saved.stat().st_size // 2 + 100)
        with pytest.raises(ziggurat.DataLoss, match=r"'\d.base.weight' cannot be read from .*: give the file"):
            load_checkpoint(checkpoint, optimizer, model)

    with forked_runs() as runs:
        assert runs.status_of(runs.started(load), within=120) == 0


def test_a_load_makes_no_array_that_training_refuses(run):
    checkpoint, _ = run
    model = built()
    for block in model:
        block.base.requires_grad_(False)
    alias = model[0].base.weight.detach()
    optimizer = begun(model, offloads=False)
    load_checkpoint(checkpoint, optimizer, model)
    optimizer.close()
    optimizer = begun(model)
    steps_of(model, optimizer)
    optimizer.close()
    assert torch.equal(model[0].base.weight, built()[0].base.weight)
    del alias


def test_names_and_shapes_are_compared_as_those_of_all_others(run, saved):  # noqa: F811
    checkpoint, losses = run
    model = loaded(saved)
    model[4].base = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
    wrong = r"other shapes: 4.base.weight is \(1024, 1024\) in .*base.safetensors, but \(16, 16\) in the model"
    with pytest.raises(ziggurat.InvalidArgument, match=wrong):
        load_checkpoint(checkpoint, begun(model, offloads=False), model)
    model[4].base = torch.nn.Identity()
    with pytest.raises(ziggurat.InvalidArgument, match="unexpected: 4.base.weight"):
        load_checkpoint(checkpoint, begun(model, offloads=False), model)
    model = torch.nn.ModuleDict({"renamed": loaded(saved)})
    optimizer = begun(model, offloads=False)
    load_checkpoint(checkpoint, optimizer, model, rename=lambda name: f"renamed.{name}")
    assert steps_of(model["renamed"], optimizer) == losses
    optimizer.close()


def test_a_base_that_is_trained_now_begins_anew_if_that_is_wanted(run, saved):  # noqa: F811
    checkpoint, _ = run
    model = loaded(saved)
    model[0].base.requires_grad_(True)
    optimizer = begun(model)
    with pytest.raises(ziggurat.InvalidArgument, match="missing: 0.base.weight: exp_avg"):
        load_checkpoint(checkpoint, optimizer, model)
    load_checkpoint(checkpoint, optimizer, model, strict=False)
    assert torch.equal(model.state_dict()[BASE[0]], built()[0].base.weight)
    steps_of(model, optimizer)
    optimizer.close()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
