# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed 0.19.8 itself: our optimizers go on with what its ranks saved.

DeepSpeed runs on the CPU, its ranks in processes of their own. Run by pytest; as a script it exits
with 77 where PyTorch, pytest or DeepSpeed is missing.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

try:
    import deepspeed_operations
    import foreign_runs
    import pytest
    import torch
    import torch.distributed as dist
    from foreign_runs import AFTER, BEFORE, LR, groups_of, loss_of, new_model
    from foreign_test import Hostile
    from long_cases import in_long_run, long, long_case
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

if importlib.util.find_spec("deepspeed") is None:
    print("skipped: DeepSpeed is not installed")
    sys.exit(77)

import ziggurat.torch
from ziggurat.torch import load_foreign_checkpoint

CASES = ["1-fp32", "2-fp32", "3-fp32", "1-bf16", "2-bf16", "3-bf16"]
# Where DeepSpeed puts things otherwise.
VARIANTS = ["0-fp32", "1-bf16-summed", "2-bf16-aligned", "2-fp32-robin", "3-bf16-torch"]
# For these it compiles operations that the others do not need, for a minute each.
COMPILED = ["0-fp32-device", "2-fp32-adagrad", "2-fp32-device"]
LION = ["2-fp32-lion", "3-fp32-lion"]
THREE_RANKS = ["2-bf16", "3-bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# fp32: both round the last bit or two in each of the ten steps: 3e-7 of a loss was seen. bf16:
# DeepSpeed averages the ranks' gradients in bf16 and we sum them in fp32, and a master between two
# bf16 numbers goes to the nearest, ties away from zero here and to even there: 1e-3 was seen. The
# same weights with moments that begin anew are 3e-2 off in the second step.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}

PATIENCE = 600.0  # for a minute's work, on a machine that has other work


def deepspeeds(*command):
    """Runs it; once more where it hangs, since that is not what is tested here."""
    more = deepspeed_operations.ENVIRONMENT | {"PATIENCE": str(PATIENCE / 2)}
    for again in (True, False):
        deepspeed_operations.remove_left_locks()
        done = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=os.environ | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said = done.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            said = f"{done.communicate()[0]}\nTimeout"
        if done.returncode == 0:
            return
        assert again and "Timeout" in said, said[-6000:]
        warnings.warn(f"DeepSpeed hung, and is run once more: {said[-3000:]}", stacklevel=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{ranks: the folder of theirs}, each with its universal ones."""
    deepspeed_operations.build("CPUAdam", "ShareMemComm")
    if in_long_run():
        deepspeed_operations.build("CPUAdagrad", "CPULion", "FusedAdam")
    folders = {}
    for ranks, cases in ((2, CASES), (3, THREE_RANKS)):
        more = [*VARIANTS, *(COMPILED + LION if in_long_run() else [])] if ranks == 2 else []
        folder = folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        deepspeeds(*launcher, "--", foreign_runs.__file__, folder, *cases, *more)
        for case in cases:
            tag = (folder / case / "latest").read_text()
            given = ("--input_folder", folder / case / tag)
            made = ("--output_folder", folder / f"{case}-universal" / tag)
            converter = ("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
            deepspeeds(*converter, *given, *made)
    return folders


def of_case(case, **where):
    """A model of other weights, and an optimizer."""
    _, dtype, *variant = case.split("-")
    model = new_model(DTYPES[dtype], seed=2)
    kind = {"adagrad": "Adagrad", "lion": "Lion"}.get("".join(variant), "AdamW")
    lr = 1e-3 if kind == "Lion" else LR
    return model, getattr(ziggurat.torch, kind)(groups_of(model), lr=lr, **where)


def go_on(model, optimizer):
    """The losses of the steps behind the checkpoint, of both ranks' batches in one process."""
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        both = [loss_of(model, step, rank) for rank in range(2)]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in both) / 2)
    return losses


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_deepspeed_going_on(case, placement, checkpoints, tmp_path):
    folder = checkpoints[2]
    where = "host" if placement == "host" else f"nvme:{tmp_path}"
    model, optimizer = of_case(case, placement=where)
    found = load_foreign_checkpoint(optimizer, model, folder / case)
    assert found.missing == found.unexpected == []
    assert [group["weight_decay"] for group in found.param_groups] == [foreign_runs.DECAY, 0.0]
    theirs = json.loads((folder / f"{case}.json").read_text())
    assert go_on(model, optimizer) == pytest.approx(theirs, rel=TOLERANCE[case.split("-")[1]])
    optimizer.close()


@pytest.mark.parametrize("case", [*VARIANTS, *map(long_case, COMPILED)])
def test_the_losses_are_those_of_deepspeeds_other_layouts(case, checkpoints):
    model, optimizer = of_case(case)
    load_foreign_checkpoint(optimizer, model, checkpoints[2] / case)
    theirs = json.loads((checkpoints[2] / f"{case}.json").read_text())
    assert go_on(model, optimizer) == pytest.approx(theirs, rel=TOLERANCE[case.split("-")[1]])


@long
@pytest.mark.parametrize("case", LION)
def test_lion_goes_on(case, checkpoints):
    """For two steps: then the sign of a sum that is almost zero differs, and a weight by 2 lr."""
    model, optimizer = of_case(case)
    load_foreign_checkpoint(optimizer, model, checkpoints[2] / case)
    theirs = json.loads((checkpoints[2] / f"{case}.json").read_text())
    assert go_on(model, optimizer)[:2] == pytest.approx(theirs[:2], rel=TOLERANCE["fp32"])


@pytest.mark.parametrize("case", ["2-fp32", "3-bf16"])
def test_ranks_with_our_engine_go_on_where_deepspeeds_stopped(case, checkpoints):
    place = checkpoints[2] / case

    def run(rank):
        import ziggurat.deepspeed as ours

        model = new_model(seed=2)
        config = foreign_runs.config_of(case)
        engine = ours.initialize(model=model, model_parameters=groups_of(model), config=config)[0]
        load_foreign_checkpoint(engine.optimizer, engine.module, place)
        losses = []
        for step in range(BEFORE, BEFORE + AFTER):
            loss = loss_of(engine, step, rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    losses = [sum(both) / 2 for both in zip(*on_ranks(2, run), strict=True)]
    theirs = json.loads((checkpoints[2] / f"{case}.json").read_text())
    assert losses == pytest.approx(theirs, rel=TOLERANCE[case.split("-")[1]])


def test_the_losses_could_tell_a_difference(checkpoints):
    """Moments that begin anew change them by more than is tolerated."""
    for case in CASES:
        model, optimizer = of_case(case)
        load_foreign_checkpoint(optimizer, model, checkpoints[2] / case)
        begun = ziggurat.torch.AdamW(groups_of(model), lr=LR)
        theirs = json.loads((checkpoints[2] / f"{case}.json").read_text())
        most = max(abs(a / b - 1) for a, b in zip(go_on(model, begun), theirs, strict=True))
        assert most > 4 * TOLERANCE[case.split("-")[1]], case


def universal(folder, name):
    """What the converter made of a parameter, read as DeepSpeed's own loader does."""
    read = {}
    for file in (folder / "zero" / name).glob("*.pt"):
        found = torch.load(file, weights_only=True)
        read[file.stem] = found["param"] if isinstance(found, dict) else found
    return read


@pytest.mark.parametrize("layout", ["ranks", "universal"])
@pytest.mark.parametrize(("ranks", "case"), [(2, c) for c in CASES] + [(3, c) for c in THREE_RANKS])
def test_the_bits_are_those_that_deepspeeds_converter_finds(ranks, case, layout, checkpoints):
    place = checkpoints[ranks] / (f"{case}-universal" if layout == "universal" else case)
    model, optimizer = of_case(case)
    found = load_foreign_checkpoint(optimizer, model, place)
    assert found.missing == found.unexpected == []
    folder = next((checkpoints[ranks] / f"{case}-universal").glob("global_step*"))
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        wanted, state = universal(folder, name), optimizer.state_of(param)
        master = state["master"] if "master" in state else param.detach()
        assert torch.equal(master, wanted["fp32"].view(param.shape)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], wanted[key].view(param.shape)), (name, key)
        assert state["step"] == BEFORE
        assert torch.equal(param.to(torch.bfloat16), master.to(param.dtype).to(torch.bfloat16))
    first = new_model(torch.bfloat16 if "bf16" in case else torch.float32, seed=1)
    assert torch.equal(model.frozen.weight, first.frozen.weight)
    assert torch.equal(model.scale, new_model(seed=1).scale)
    assert model.head.weight is model.embed.weight
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize("case", ["2-bf16", "3-bf16"])
def test_another_number_of_ranks_goes_on(case, checkpoints):
    place = checkpoints[3] / case

    def load(rank):
        model, optimizer = of_case(case, group=dist.group.WORLD)
        load_foreign_checkpoint(optimizer, model, place)
        states = [optimizer.state_of(param) for param in optimizer._order]
        for step in range(3):
            loss_of(model, step, 0).backward()  # equal gradients have one's mean
            optimizer.step()
            optimizer.zero_grad()
        return states, [p.detach().clone() for p in model.parameters()]

    model, alone = of_case(case)
    load_foreign_checkpoint(alone, model, place)
    states = [alone.state_of(param) for param in alone._order]
    for step in range(3):
        loss_of(model, step, 0).backward()
        alone.step()
        alone.zero_grad()
    for its, weights in on_ranks(2, load):
        for one, other in zip(its, states, strict=True):
            assert all(torch.equal(one[key], value) for key, value in other.items())
        for one, other in zip(weights, model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.fixture
def copied(checkpoints, tmp_path):
    """Copies that may be damaged."""

    def copy(case):
        place = tmp_path / case
        shutil.copytree(checkpoints[2] / case, place)
        return next(place.glob("global_step*"))

    return copy


def load(place, case="2-fp32", **arguments):
    model, optimizer = of_case(case)
    return load_foreign_checkpoint(optimizer, model, place, **arguments)


KINDS = {
    "2-fp32": ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "3-fp32": [
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    "2-fp32-universal": [
        "mp_rank_00_model_states.pt",
        "zero/optimizer_state.pt",
        "zero/middle.weight/fp32.pt",
        "zero/middle.weight/exp_avg_sq.pt",
        "zero/middle.weight/step.pt",
    ],
}


@pytest.mark.parametrize(("case", "name"), [(c, name) for c in KINDS for name in KINDS[c]])
def test_a_file_that_would_run_code_is_refused(case, name, copied, tmp_path):
    folder, marker = copied(case), tmp_path / "it_ran"
    found = torch.load(folder / name, weights_only=False) if "zero/m" not in name else {}
    torch.save({**found, "loss_scaler": Hostile(marker)}, folder / name)
    words = rf"{folder / name} holds a posix\.system.*would run code"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        load(folder)
    assert not marker.exists()


def test_what_a_script_saved_beside_is_named(copied):
    folder = copied("2-fp32")
    path = folder / "mp_rank_00_model_states.pt"
    found = torch.load(path, weights_only=True)
    torch.save({**found, "progress": Path("here")}, path)
    words = rf"{path} holds a pathlib[\w.]*Path.*add_safe_globals"
    with pytest.raises(ziggurat.InvalidArgument, match=words):
        load(folder)


def test_files_that_are_missing_or_of_another_checkpoint_are_named(copied):
    folder = copied("2-fp32")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ziggurat.DataLoss, match=r"saved by 2 ranks, but has the .* files of 1"):
        load(folder)
    folder = copied("3-fp32")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ziggurat.DataLoss, match="of rank 1, but none of rank 0"):
        load(folder)
    folder = copied("3-bf16")
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    found = torch.load(path, weights_only=False)
    groups = found["optimizer_state_dict"]["fp32_flat_groups"]
    found["optimizer_state_dict"]["fp32_flat_groups"] = [group[:-9].clone() for group in groups]
    torch.save(found, path)
    with pytest.raises(ziggurat.DataLoss, match=r"elements in the ranks' files, but \d+ by its shape"):
        load(folder)
    found["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(0) for _ in groups]
    torch.save(found, path)
    other = folder / path.name.replace("rank_1", "rank_0")
    found = torch.load(other, weights_only=False)
    found["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(0) for _ in groups]
    torch.save(found, other)
    with pytest.raises(ziggurat.DataLoss, match="was on NVMe when it was saved"):
        load(folder)


def test_masters_of_other_weights_are_refused(checkpoints, copied, tmp_path):
    folder = copied("2-bf16")
    path = folder / "mp_rank_00_model_states.pt"
    found = torch.load(path, weights_only=True)
    found["module"]["norm.weight"] = found["module"]["norm.weight"].flip(0)
    torch.save(found, path)
    with pytest.raises(ziggurat.DataLoss, match="does not round to the weight in "):
        load(folder, "2-bf16")
    load(folder, "2-bf16", strict=False)
    # DeepSpeed's converter, of a run whose parameters lie in another order than it believes.
    given = next((checkpoints[2] / "2-fp32-robin").glob("global_step*"))
    converter = ("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
    made = tmp_path / "universal"
    deepspeeds(*converter, "--input_folder", given, "--output_folder", made)
    with pytest.raises(ziggurat.DataLoss, match=r"norm\.\w+.*round_robin_gradients"):
        load(made)


def test_names_and_shapes_that_do_not_fit_are_named(checkpoints):
    place = checkpoints[2] / "3-fp32"
    model = new_model()
    model.extra = torch.nn.Linear(3, 3)
    model.middle = torch.nn.Linear(37, 36)
    optimizer = ziggurat.torch.AdamW(groups_of(model), lr=LR)
    with pytest.raises(ziggurat.InvalidArgument, match=r"middle\.weight is \(37, 37\)"):
        load_foreign_checkpoint(optimizer, model, place)
    model.middle = torch.nn.Linear(37, 37)
    optimizer = ziggurat.torch.AdamW(groups_of(model), lr=LR)
    with pytest.raises(ziggurat.InvalidArgument, match=r"missing: extra\.weight: exp_avg"):
        load_foreign_checkpoint(optimizer, model, place)
    found = load_foreign_checkpoint(optimizer, model, place, strict=False)
    assert {"extra.weight", "extra.bias: exp_avg"} <= set(found.missing)
    assert optimizer.state_of(model.middle.weight)["step"] == BEFORE
    assert optimizer.state_of(model.extra.weight) == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", "tensor-parallel ranks.*ds_to_universal"),
        ("layer_00-model_00-model_states.pt", "pipeline stages and experts"),
    ],
)
def test_layouts_that_are_not_read_are_named(name, words, copied):
    folder = copied("2-fp32")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    with pytest.raises(ziggurat.Unimplemented, match=words):
        load(folder)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
