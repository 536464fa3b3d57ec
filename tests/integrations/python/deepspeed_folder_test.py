# SPDX-License-Identifier: Apache-2.0
"""The folders that ziggurat.deepspeed's engine saves in: what a kill, a damaged byte, an absent rank
and an earlier version leave of them, and the memory that they take.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. With the command as
ZIGGURAT_COMMAND it verifies them too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

try:
    import pytest
    import torch
    from deepspeed_runs import batch, loss_of
    from forked_runs import forked_runs
    from small_models import one_thread, small_model  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
from ziggurat._optimizer.state import Groups
from ziggurat.deepspeed import _files
from ziggurat.deepspeed.utils import zero_to_fp32

COMMAND = os.environ.get("ZIGGURAT_COMMAND", "")
MODULE = "mp_rank_00_model_states.pt"
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "threads": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
}


def on_drive(path):
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}


def made(model=None, **more):
    model = small_model() if model is None else model
    return deepspeed.initialize(model=model, config=CONFIG | more)[0]


def train(engine, first, last, rank=0):
    for step in range(first, last):
        engine.backward(loss_of(engine, batch(10 * step + rank)))
        engine.step()


def bits(engine):
    """Values, and the state as torch.optim has it, by name."""
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for index, state in engine.optimizer.state_dict()["state"].items():
        found |= {f"{index}: {name}": value.clone() for name, value in state.items()}
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def state_in(folder):
    """The one checkpoint of the engine's that a tag has."""
    (state,) = folder.glob("ziggurat_state_*/step-*")
    return state


def names_in(folder):
    """What a tag has, each save's own digits left out."""
    return sorted(there.name.rsplit("_", 1)[0] for there in folder.iterdir())


ONE_SAVE = ["mp_rank_00_model", "ziggurat_state_{}"]


def of_step(step):
    return [name.format(step) for name in ONE_SAVE]


def test_the_state_is_a_checkpoint_that_other_tools_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    engine = made()
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    state = state_in(tmp_path / "global_step2")
    found = {}
    for shard in state.glob("*.safetensors"):
        found |= safetensors.load_file(shard)
    for name, param in engine.module.named_parameters():
        expected = engine.optimizer.state_of(param)
        assert torch.equal(found[name], expected["master"])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"optimizer.{moment}.{name}"], expected[moment])
    if COMMAND:
        done = subprocess.run([COMMAND, "ckpt", "verify", state], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# A save that is killed


def saves_twice(folder, before_second):
    """One whole checkpoint of step 1, and `before_second` before the same tag gets that of step 2."""
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="newest")
    train(engine, 1, 2)
    before_second()
    engine.save_checkpoint(folder, tag="newest")


def assert_one_of_both_is_there(folder, expected):
    engine = made()
    engine.load_checkpoint(folder)
    assert engine.global_steps in expected
    assert_same(bits(engine), expected[engine.global_steps])
    return engine.global_steps


def assert_the_next_save_leaves_nothing_else(folder):
    engine = made()
    train(engine, 0, 3)
    engine.save_checkpoint(folder, tag="newest")
    assert names_in(folder / "newest") == of_step(3)
    assert_same(bits(made_from(folder)), bits(engine))


def made_from(folder, **more):
    engine = made(**more)
    engine.load_checkpoint(folder)
    return engine


@pytest.fixture(scope="module")
def expected():
    """The bits of each step."""
    engine, found = made(), {}
    for step in (1, 2):
        train(engine, step - 1, step)
        found[step] = bits(engine)
    return found


class KilledAt:
    """Ends the process at its `number`-th use of a file's name, as Python counts them."""

    def __init__(self, number):
        self._left = number

    def begin(self):
        sys.addaudithook(self._count)

    def _count(self, event, arguments):
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir"):
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def test_a_save_that_is_killed_at_a_file_leaves_the_tag_as_it_was_or_as_it_is_to_be(
    tmp_path, expected
):
    found = []
    with forked_runs() as runs:
        for number in range(100):
            folder = tmp_path / str(number)
            killer = KilledAt(number)
            status = runs.status_of(runs.started(saves_twice, folder, killer.begin))
            found.append(assert_one_of_both_is_there(folder, expected))
            if status == 0:
                break
            assert status == -signal.SIGKILL
            if number % 8 == 0:
                assert_the_next_save_leaves_nothing_else(folder)
    # Every point of it: the old one until some file has its name, the new one from there on.
    assert len(found) > 10 and found == sorted(found) and set(found) == {1, 2}


def test_a_save_that_is_killed_as_the_engine_writes_leaves_the_tag_as_it_was(tmp_path, expected):
    with forked_runs() as runs:
        for number, delay in enumerate((0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)):
            folder = tmp_path / str(number)
            read, write = os.pipe()
            child = runs.started(saves_twice, folder, lambda to=write: os.write(to, b"."))
            os.read(read, 1)
            time.sleep(delay)
            runs.status_after_kill(child)
            os.close(read)
            os.close(write)
            assert_one_of_both_is_there(folder, expected)
            assert_the_next_save_leaves_nothing_else(folder)


def test_a_save_that_fails_leaves_the_tag_as_it_was(tmp_path, expected):
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="newest")
    train(engine, 1, 2)
    with pytest.raises(Exception, match="pickle"):
        engine.save_checkpoint(tmp_path, tag="newest", client_state={"no": (lambda: 0)})
    assert assert_one_of_both_is_there(tmp_path, expected) == 1
    engine.save_checkpoint(tmp_path, tag="newest")
    assert assert_one_of_both_is_there(tmp_path, expected) == 2
    assert names_in(tmp_path / "newest") == of_step(2)


# Damage


def change_byte(file, at):
    with file.open("r+b") as changed:
        changed.seek(at)
        byte = changed.read(1)[0]
        changed.seek(at)
        changed.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("what", ["module", "shard", "manifest"])
@pytest.mark.parametrize("drive", [False, True])
def test_a_damaged_byte_is_refused_by_the_files_name(tmp_path, what, has_trained, drive):
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "out", tag="here")
    if what == "module":
        file = tmp_path / "out" / "here" / MODULE
        value = engine.module[2].weight.detach().view(torch.int16).numpy().tobytes()
    else:
        pattern = {"shard": "*.safetensors", "manifest": "manifest.json"}[what]
        file = next(state_in(tmp_path / "out" / "here").glob(pattern))
        moment = engine.optimizer.state_of(engine.module[2].weight)["exp_avg"]
        value = moment.numpy().tobytes() if what == "shard" else b'"files"'
    change_byte(file, file.read_bytes().index(value) + len(value) // 2)
    more = on_drive(tmp_path / "drive") if drive else {}
    other, plain = made(**more), made()
    if has_trained:
        train(other, 0, 4)
        train(plain, 0, 4)
    with pytest.raises(ziggurat.DataLoss, match=file.name):
        other.load_checkpoint(tmp_path / "out", tag="here")
    if has_trained:
        assert_same(bits(other), bits(plain))
        for one in (other, plain):
            train(one, 4, 6)
        other.optimizer.synchronize()
        assert_same(bits(other), bits(plain))
    other.destroy()


def test_a_cut_file_is_refused_by_its_name(tmp_path):
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="here")
    file = tmp_path / "here" / MODULE
    for size in (file.stat().st_size // 2, 1, 0):
        os.truncate(file, size)
        with pytest.raises(ziggurat.DataLoss, match=MODULE):
            made().load_checkpoint(tmp_path, tag="here")


@contextlib.contextmanager
def without_checksums():
    """As a script may tell PyTorch, of its own files."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("PyTorch writes checksums always before 2.6")
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def test_a_file_that_has_no_checksums_is_read(tmp_path):
    """DeepSpeed's, or one that a script has written anew, where checksums are turned off."""
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="here")
    file = tmp_path / "here" / MODULE
    state = torch.load(file, weights_only=False)
    with without_checksums():
        torch.save(state, file)
    assert_same(bits(made_from(tmp_path)), bits(engine))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ziggurat.DataLoss, match=MODULE):
        made().load_checkpoint(tmp_path, tag="here")


def test_what_is_saved_has_checksums_whatever_the_script_does_without(tmp_path):
    engine = made()
    train(engine, 0, 1)
    with without_checksums():
        engine.save_checkpoint(tmp_path, tag="here")
        assert not torch.serialization.get_crc32_options()
    file = tmp_path / "here" / MODULE
    value = engine.module[2].weight.detach().view(torch.int16).numpy().tobytes()
    change_byte(file, file.read_bytes().index(value) + 8)
    with pytest.raises(ziggurat.DataLoss, match=f"{MODULE} is damaged in record .*data/"):
        made().load_checkpoint(tmp_path, tag="here")


def test_no_changed_byte_of_a_file_is_another_error_or_other_values(tmp_path):
    """Of its table of records too, which has no checksum: it is refused, or means the same."""
    file = tmp_path / "file.pt"
    values = {"values": torch.arange(10.0), "text": "x"}
    _files.write(file, values)
    whole = file.read_bytes()
    refused = 0
    for at in range(len(whole)):
        file.write_bytes(whole)
        change_byte(file, at)
        try:
            found = _files.read(file)
        except ziggurat.DataLoss as error:
            assert str(file) in str(error)
            refused += 1
        else:
            assert torch.equal(found["values"], values["values"]) and found["text"] == "x"
    assert refused > len(whole) // 4


# What does not fit


def test_a_state_that_does_not_fit_is_refused_by_the_parameters_name(tmp_path):
    engine = made()
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    other = made(optimizer={"type": "Adagrad", "params": {"lr": 1e-2}})
    with pytest.raises(ziggurat.InvalidArgument, match="'0.weight' has .*exp_avg.*, but no sum"):
        other.load_checkpoint(tmp_path)
    wider = small_model()
    wider[5] = torch.nn.Linear(130, 62)
    with pytest.raises(ziggurat.InvalidArgument, match=r"'5.weight' has the shape \(61, 130\)"):
        made(wider).load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)


def test_another_optimizer_takes_over_what_it_has_too(tmp_path):
    engine = made()
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    for name, moments in (("Adam", ("exp_avg", "exp_avg_sq")), ("Lion", ("exp_avg",))):
        params = {"lr": 1e-2} | ({"adam_w_mode": False} if name == "Adam" else {})
        other = made(optimizer={"type": name, "params": params})
        other.load_checkpoint(tmp_path)
        state, expected = bits(other), bits(engine)
        for moment in (*moments, "step", "master"):
            assert torch.equal(state[f"1: {moment}"], expected[f"1: {moment}"])
        train(other, 2, 3)


def test_moments_of_8_bits_come_back_as_those_of_a_state_dict(tmp_path):
    """As the values that they stand for, so that any number of ranks takes them."""
    engine = made(state_format="8bit", scheduler=None)
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    other, plain = (made(state_format="8bit", scheduler=None) for _ in range(2))
    other.load_checkpoint(tmp_path)
    plain.module.load_state_dict(engine.module.state_dict())
    plain.optimizer.load_state_dict(engine.optimizer.state_dict())
    for one in (other, plain):
        train(one, 3, 5)
    assert_same(bits(other), bits(plain))
    fp32 = made()
    fp32.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert_same(bits(fp32), bits(engine))


@pytest.mark.parametrize("state_format", ["bf16-moments", "split", "bf16"])
def test_every_format_of_state_comes_back_with_its_bits(tmp_path, state_format):
    engine = made(state_format=state_format)
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    other = made(state_format=state_format)
    other.load_checkpoint(tmp_path)
    assert_same(bits(other), bits(engine))
    for one in (engine, other):
        train(one, 3, 5)
    assert_same(bits(other), bits(engine))


def test_a_run_goes_back_to_before_its_first_step(tmp_path):
    engine = made()
    engine.save_checkpoint(tmp_path)
    assert names_in(tmp_path / "global_step0") == ONE_SAVE[:1]
    train(engine, 0, 2)
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.state_dict()["state"] == {}
    train(engine, 0, 2)
    plain = made()
    train(plain, 0, 2)
    assert_same(bits(engine), bits(plain))


def test_what_a_custom_load_function_changes_is_a_master_itself(tmp_path):
    """All other parameters keep the masters of the checkpoint."""
    engine = made()
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)

    def load(src, dst):
        dst.load_state_dict(src)
        with torch.no_grad():
            dst[2].bias.fill_(0.5)

    def loaded():
        other = made()
        other.load_checkpoint(tmp_path, custom_load_fn=load)
        return other

    other = loaded()
    train(other, 2, 3)
    # The same by way of the state dict.
    plain = made()
    load(engine.module.state_dict(), plain.module)
    plain.optimizer.load_state_dict(engine.optimizer.state_dict())
    for group, its in zip(plain.optimizer.param_groups, loaded().optimizer.param_groups):
        group["lr"] = its["lr"]
    plain.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
    train(plain, 2, 3)
    assert_same(bits(other), bits(plain))


def test_a_parameter_that_is_frozen_by_now_keeps_its_state(tmp_path):
    engine = made()
    train(engine, 0, 2)
    engine.module[2].requires_grad_(False)
    train(engine, 2, 3)
    engine.save_checkpoint(tmp_path)
    model = small_model()
    model[2].requires_grad_(False)
    other = made(model)
    other.load_checkpoint(tmp_path)
    for one in (engine, other):
        one.module[2].requires_grad_(True)
        train(one, 3, 5)
    assert_same(bits(other), bits(engine))


# What fails behind that


def on_a_full_drive(monkeypatch):
    """From here on no engine can be opened."""

    def full(*_, **__):
        raise ziggurat.ResourceExhausted("no space left")

    monkeypatch.setattr("ziggurat._optimizer.opening.Opened", full)


@pytest.mark.parametrize("drive", [False, True])
def test_an_optimizer_whose_state_was_given_up_in_vain_is_closed(tmp_path, monkeypatch, drive):
    """A step that began anew, or a save of nothing, would take what was trained away unseen."""
    more = on_drive(tmp_path / "drive") if drive else {}
    engine = made(**more)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "out", tag="newest")
    expected = bits(engine)
    with monkeypatch.context() as patched:
        on_a_full_drive(patched)
        with pytest.raises(ziggurat.ResourceExhausted, match="no space left"):
            engine.load_checkpoint(tmp_path / "out")
    closed = "the optimizer was closed and has no state any more"
    with pytest.raises(ziggurat.InvalidArgument, match=closed):
        train(engine, 2, 3)
    with pytest.raises(ziggurat.InvalidArgument, match=closed):
        engine.save_checkpoint(tmp_path / "out", tag="newest")
    with pytest.raises(ziggurat.InvalidArgument, match=closed):
        engine.load_checkpoint(tmp_path / "out")
    engine.zero_grad()
    engine.destroy()
    # Another one takes the model's gradients over, and goes on.
    again = made(engine.module, **more)
    again.load_checkpoint(tmp_path / "out")
    again.optimizer.synchronize()
    assert_same(bits(again), expected)
    train(again, 2, 3)
    plain = made_from(tmp_path / "out")
    train(plain, 2, 3)
    again.optimizer.synchronize()
    assert_same(bits(again), bits(plain))
    again.destroy()


def test_a_destroyed_engine_saves_nothing_in_place_of_a_checkpoint(tmp_path):
    engine = made()
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="newest")
    engine.destroy()
    with pytest.raises(ziggurat.InvalidArgument, match="the optimizer was closed"):
        engine.save_checkpoint(tmp_path, tag="newest")
    assert names_in(tmp_path / "newest")[-1:] == ["ziggurat_state_2"]


def test_a_state_that_waits_for_its_first_step_stays_where_a_load_fails(tmp_path, monkeypatch):
    engine = made(scheduler=None)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    waiting, plain = made(scheduler=None), made(scheduler=None)
    for one in (waiting, plain):
        one.module.load_state_dict(engine.module.state_dict())
        one.optimizer.load_state_dict(engine.optimizer.state_dict())
    with monkeypatch.context() as patched:
        on_a_full_drive(patched)
        with pytest.raises(ziggurat.ResourceExhausted, match="no space left"):
            waiting.load_checkpoint(tmp_path)
    for one in (waiting, plain):
        train(one, 2, 4)
    assert_same(bits(waiting), bits(plain))


@pytest.mark.parametrize("has_state", [False, True])
def test_groups_and_schedules_that_do_not_fit_are_refused_before_anything_changes(
    tmp_path, has_state
):
    engine = made(scheduler=None)
    if has_state:
        train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)

    def in_two_groups():
        model = small_model(torch.bfloat16)
        groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        config = {k: v for k, v in CONFIG.items() if k not in ("optimizer", "scheduler")}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    for make, error, words in (
        (in_two_groups, ValueError, "different number of parameter groups"),
        (made, ziggurat.InvalidArgument, "load_lr_scheduler_states=False"),
    ):
        other, plain = make(), make()
        for one in (other, plain):
            train(one, 5, 7)
        with pytest.raises(error, match=words):
            other.load_checkpoint(tmp_path)
        assert_same(bits(other), bits(plain))


# What earlier versions saved


def saved_in_the_first_format(engine, folder, files):
    """As releases before this one did: {number: state} in files of torch.save's, some in each."""
    folder.mkdir(parents=True)
    state = engine.optimizer.state_dict()["state"]
    names = [f"ziggurat_state_{engine.global_steps}_0_of_1_{i}.pt" for i in range(files)]
    for i, name in enumerate(names):
        torch.save({n: its for n, its in state.items() if n % files == i}, folder / name)
    of_params = {param: name for name, param in engine.module.named_parameters()}
    client_state = {"epoch": 2}
    own = {
        "module": engine.module_state_dict(),
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "loss_scale": engine._scale.state_dict(),
        "ziggurat": {
            "format": 1,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "world_size": engine.world_size,
            "frozen": [],
            "client_state": client_state,
            "param_groups": Groups(engine.optimizer).state_dict()["param_groups"],
            "names": [of_params[param] for _, param, _ in engine.optimizer._named()],
            "files": names,
        },
    }
    torch.save({**client_state, **own}, folder / MODULE)
    (folder.parent / "latest").write_text(folder.name)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("drive", [False, True])
def test_a_folder_of_the_first_format_is_gone_on_from(tmp_path, files, has_trained, drive):
    engine = made()
    train(engine, 0, 3)
    saved_in_the_first_format(engine, tmp_path / "out" / "global_step3", files)
    other = made(**(on_drive(tmp_path / "drive") if drive else {}))
    if has_trained:
        train(other, 5, 7)
    path, found = other.load_checkpoint(tmp_path / "out")
    assert (path, found) == (str(tmp_path / "out" / "global_step3" / MODULE), {"epoch": 2})
    for name, value in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "out"
    ).items():
        param = engine.module.get_parameter(name)
        assert torch.equal(value, deepspeed.utils.safe_get_full_fp32_param(param))
    # Saved before a step, it is in this format with the same bits.
    other.save_checkpoint(tmp_path / "out")
    assert names_in(tmp_path / "out" / "global_step3") == of_step(3)
    again = made_from(tmp_path / "out")
    for one in (engine, other, again):
        train(one, 3, 5)
    other.optimizer.synchronize()
    assert_same(bits(other), bits(engine))
    assert_same(bits(again), bits(engine))
    other.destroy()


def test_a_damaged_file_of_the_first_format_is_refused_by_its_name(tmp_path):
    engine = made()
    train(engine, 0, 1)
    saved_in_the_first_format(engine, tmp_path / "here", 2)
    file = next((tmp_path / "here").glob("ziggurat_state_*_1.pt"))
    change_byte(file, file.stat().st_size // 2)
    with pytest.raises(ziggurat.DataLoss, match=file.name):
        made().load_checkpoint(tmp_path, tag="here")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
