# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ziggurat.deepspeed's engine on ranks of which one saves alone, or that do not see
the same: hosts with folders of their own, or what is thought to be.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import datetime
import os
import shutil
import sys
import tempfile
import time

try:
    import pytest
    import torch
    import torch.distributed as dist
    from deepspeed_rank_runs import (
        BF16,
        assert_same_state,
        batch,
        bits,
        made,
        same,
        states_loaded_by,
        train,
    )
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
from ziggurat.deepspeed import _files, _meeting
from ziggurat.torch import load_foreign_checkpoint

MODULE = "mp_rank_00_model_states.pt"
OF_HOSTS = {"checkpoint": {"use_node_local_storage": True}}


def engine_of(**more):
    """Each of its micro-steps is a step."""
    return made(gradient_accumulation_steps=1, **more)


def steps(engine, rank, first, last):
    train(engine, lambda step: batch(rank, step), first, last)


def state(engine):
    """In the engine, as torch.optim has it."""
    return engine.optimizer.state_dict()["state"]


def state_at_the_end(engine):
    """The same, on all ranks: one that has ended gives nothing of its part any more."""
    its = state(engine)
    dist.barrier()
    return its


def what_raises(kind, do):
    with pytest.raises(kind) as found:
        do()
    return str(found.value)


# Rank 0 alone


def scale_one(engine):
    with torch.no_grad():
        engine.module[2].weight.mul_(0.5)


def replace_one(engine):
    engine.module[2].weight.data = engine.module[2].weight.data * 0.5


def set_a_master(engine):
    weight = engine.module[2].weight
    deepspeed.utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.1234567))


def load_a_state(engine):
    saved = engine.optimizer.state_dict()
    for its in saved["state"].values():
        its["exp_avg"] = its["exp_avg"] * 0.5
        if "master" in its:
            its["master"] = its["master"] + 2e-6
    engine.optimizer.load_state_dict(saved)


def take_over_weights(engine):
    weights = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    with tempfile.NamedTemporaryFile() as file:
        torch.save({"model": weights}, file.name)
        load_foreign_checkpoint(engine.optimizer, engine.module, file.name, strict=False)


def set_a_moment(engine):
    weight = engine.module[2].weight
    deepspeed.utils.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.1), "exp_avg")


CHANGES = [
    (scale_one, BF16),
    (replace_one, BF16),
    (set_a_master, BF16),
    (load_a_state, BF16),
    (take_over_weights, BF16),
    (load_a_state, {}),  # without masters, which are the parameters
    (set_a_moment, {}),
]


@pytest.mark.parametrize(("change", "dtype"), CHANGES)
def test_rank_0_alone_saves_nothing_that_other_ranks_have_not_taken_over(tmp_path, change, dtype):
    """What a script changes between two steps, each rank's next step takes over."""

    def run(rank):
        _meeting._PATIENCE = datetime.timedelta(seconds=0.5)
        engine = engine_of(**dtype)
        steps(engine, rank, 0, 2)
        change(engine)
        if rank == 0:
            for _ in range(2):  # what is refused has taken nothing over
                with pytest.raises(ziggurat.InvalidArgument, match="but only some do"):
                    engine.save_checkpoint(tmp_path, tag="of-one")
            assert not list(tmp_path.rglob(MODULE))
        dist.barrier()
        steps(engine, rank, 2, 3)
        if rank == 0:
            engine.save_checkpoint(tmp_path, tag="of-one")
        dist.barrier()
        _meeting._PATIENCE = datetime.timedelta(seconds=60)
        whole = engine_of(**dtype)
        steps(whole, rank, 0, 2)
        change(whole)
        whole.save_checkpoint(tmp_path, tag="of-all")
        for tag, made_steps in (("of-one", 3), ("of-all", 2)):
            other = engine_of(**dtype)
            other.load_checkpoint(tmp_path, tag=tag)
            steps(other, rank, made_steps, 3)
            assert same(bits(other), bits(engine))
            assert_same_state(state(other), state(engine))

    on_ranks(2, run)


def test_a_rank_that_gives_no_folder_leaves_no_other_waiting(tmp_path):
    def run(rank):
        _meeting._PATIENCE = datetime.timedelta(seconds=0.5)
        engine = engine_of(**BF16)
        steps(engine, rank, 0, 1)
        if rank == 0:
            engine.save_checkpoint(tmp_path, tag="a")
        else:
            what_raises(ziggurat.InvalidArgument, lambda: engine.save_checkpoint("", tag="a"))
        steps(engine, rank, 1, 2)

    on_ranks(2, run)


def test_rank_0_alone_saves_what_all_have_taken_over_for_a_checkpoint(tmp_path):
    def run(rank):
        engine = engine_of(**BF16)
        steps(engine, rank, 0, 2)
        scale_one(engine)
        load_a_state(engine)
        engine.save_checkpoint(tmp_path, tag="of-all")
        _meeting._PATIENCE = datetime.timedelta(seconds=0.5)
        dist.barrier()
        if rank == 0:
            engine.save_checkpoint(tmp_path, tag="of-one")

    on_ranks(2, run)
    of_one = states_loaded_by(1, tmp_path, **BF16)
    (tmp_path / "latest").write_text("of-all")
    assert_same_state(states_loaded_by(1, tmp_path, **BF16), of_one)


def change_last_element(src, dst):
    dst.load_state_dict(src)
    with torch.no_grad():
        dst[2].weight[-1, -1] = 0.5


def test_what_a_custom_load_function_changes_is_changed_on_all_ranks(tmp_path):
    """Wherever in a parameter it is, whose masters are all its values then."""

    def save(rank):
        engine = engine_of(train_micro_batch_size_per_gpu=8, **BF16)
        steps(engine, rank, 0, 3)
        engine.save_checkpoint(tmp_path / "saved")
        return bits(engine)

    def loaded():
        engine = engine_of(**BF16)
        engine.load_checkpoint(tmp_path / "saved", custom_load_fn=change_last_element)
        return engine

    def load(rank):
        ranks = dist.get_world_size()
        engine = loaded()
        engine.save_checkpoint(tmp_path / f"of-{ranks}")
        _meeting._PATIENCE = datetime.timedelta(seconds=0.5)
        other = loaded()
        if ranks > 1 and rank == 0:
            with pytest.raises(ziggurat.InvalidArgument, match="but only some do"):
                other.save_checkpoint(tmp_path / "alone")
        return bits(engine)

    expected = [value.clone() for value in on_ranks(1, save)[0]]
    expected[1][-1, -1] = 0.5  # of change_last_element()
    for ranks in (1, 2):
        for found in on_ranks(ranks, load):
            assert same(found, expected)
    one, two = (states_loaded_by(1, tmp_path / f"of-{ranks}", **BF16) for ranks in (1, 2))
    assert_same_state(two, one)


# Loads where ranks do not find the same


def saved_at(folder, steps_made, **arguments):
    def save(rank):
        engine = engine_of()
        steps(engine, rank, 0, steps_made)
        engine.save_checkpoint(folder, **arguments)

    on_ranks(2, save)


def refused_on_both(folder_of, **arguments):
    """What two ranks say of it: fresh ones, and ones that have trained and go on as they were."""

    def run(rank):
        said = []
        for trained in (0, 2):
            engine, plain = engine_of(), engine_of()
            for one in (engine, plain):
                steps(one, rank, 0, trained)
            said.append(
                what_raises(
                    ziggurat.ZigguratError,
                    lambda: engine.load_checkpoint(folder_of(rank), **arguments),
                )
            )
            assert engine.global_steps == trained
            for one in (engine, plain):
                steps(one, rank, trained, trained + 2)
            assert same(bits(engine), bits(plain))
            assert_same_state(state(engine), state(plain))
        return said

    return on_ranks(2, run)


def test_a_rank_that_finds_no_checkpoint_keeps_no_other_waiting(tmp_path):
    saved_at(tmp_path / "0", 1)
    for said in refused_on_both(lambda rank: tmp_path / f"{rank}"):
        for words in said:
            assert "rank 0 has found tag" in words
            assert "rank 1 has found no `latest`" in words


def test_a_rank_that_lacks_the_tag_keeps_no_other_waiting(tmp_path):
    saved_at(tmp_path / "0", 1)
    of_0, of_1 = refused_on_both(lambda rank: tmp_path / f"{rank}", tag="global_step1")
    for words in of_0:
        assert words.startswith("load_checkpoint() was given up, because rank 1 failed: ")
        assert f"{tmp_path}/1/global_step1/{MODULE} does not exist" in words
    for words in of_1:
        assert f"{tmp_path}/1/global_step1/{MODULE} does not exist" in words


@pytest.mark.parametrize("same_tag", [False, True])
def test_ranks_that_find_other_saves_load_neither(tmp_path, same_tag):
    """As after a kill in the midst of saves on two hosts."""
    for rank in range(2):
        saved_at(tmp_path / f"{rank}", 1 + rank, tag="newest" if same_tag else None)
    tags = ["newest", "newest"] if same_tag else ["global_step1", "global_step2"]
    for said in refused_on_both(lambda rank: tmp_path / f"{rank}"):
        for words in said:
            for rank in range(2):
                assert f'rank {rank} has found tag "{tags[rank]}" of step {1 + rank}' in words
            assert "Give a tag= whose save all ranks have" in words


def test_two_saves_of_one_tag_and_step_are_not_one_save(tmp_path):
    for rank in range(2):
        saved_at(tmp_path / f"{rank}", 2)
    for said in refused_on_both(lambda rank: tmp_path / f"{rank}"):
        for words in said:
            assert words.count('has found tag "global_step2" of step 2 (ziggurat_state_2_') == 2


def damage(file, value):
    content = bytearray(file.read_bytes())
    content[content.index(value) + len(value) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("what", ["module", "master", "exp_avg"])
def test_a_damaged_byte_that_one_rank_alone_reads_is_refused_on_both(tmp_path, what):
    def save(rank):
        engine = engine_of(**BF16)
        steps(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path / "0", tag="newest")
        value = state(engine)[1].get(what, engine.module[2].weight.detach().view(torch.int16))
        return value.reshape(-1)[-64:].clone()

    value = on_ranks(2, save)[0].numpy().tobytes()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    files = (tmp_path / "1").rglob(MODULE if what == "module" else "*.safetensors")
    (file,) = (one for one in files if value in one.read_bytes())
    damage(file, value)

    def run(rank):
        said = []
        for trained in (0, 2):
            engine = engine_of(**BF16)
            steps(engine, rank, 5, 5 + trained)
            before, values = state(engine), bits(engine)
            said.append(
                what_raises(
                    ziggurat.ZigguratError,
                    lambda: engine.load_checkpoint(tmp_path / f"{rank}", tag="newest"),
                )
            )
            assert_same_state(state(engine), before)
            assert not trained or same(bits(engine), values)
        return said

    of_0, of_1 = on_ranks(2, run)
    assert all(file.name in words for words in of_1)
    assert "rank 1 failed: DataLoss" in of_0[1]


def test_a_custom_load_function_that_fails_on_one_rank_keeps_no_other_waiting(tmp_path):
    saved_at(tmp_path, 1)

    def run(rank):
        def load(src, dst):
            if rank == 1:
                raise KeyError("not mine")
            dst.load_state_dict(src)

        engine = engine_of()
        steps(engine, rank, 0, 2)
        before = state(engine)
        words = what_raises(
            (KeyError, ziggurat.Unavailable),
            lambda: engine.load_checkpoint(tmp_path, custom_load_fn=load),
        )
        assert_same_state(state(engine), before)
        return words

    of_0, of_1 = on_ranks(2, run)
    assert "rank 1 failed: KeyError: 'not mine'" in of_0
    assert of_1 == "'not mine'"


def test_parameters_that_differ_are_refused_while_the_state_is_still_there(tmp_path):
    saved_at(tmp_path, 1)

    def run(rank):
        def load(src, dst):
            dst.load_state_dict(src)
            with torch.no_grad():
                dst[2].bias.add_(rank)

        engine = engine_of()
        steps(engine, rank, 0, 2)
        before = state(engine)
        with pytest.raises(ziggurat.InvalidArgument, match="of rank 1 differ from those of rank 0"):
            engine.load_checkpoint(tmp_path, custom_load_fn=load)
        assert_same_state(state(engine), before)

    on_ranks(2, run)


# Hosts with storage of their own


def on_two_hosts(rank, folder_of):
    """Rank 0 on one, the others on another, whose folder is the working directory of each."""
    host, local = (0, 0) if rank == 0 else (1, rank - 1)
    os.environ["LOCAL_RANK"] = str(local)
    folder = folder_of(host)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return host


def names_in(folder):
    """What a tag has, each save's own digits left out."""
    return sorted(there.name.rsplit("_", 1)[0] for there in folder.iterdir())


def of_step(step):
    return ["mp_rank_00_model", f"ziggurat_state_{step}"]


def test_a_folder_that_hosts_share_without_saying_so_gets_one_checkpoint(tmp_path):
    def run(rank):
        host = on_two_hosts(rank, lambda host: tmp_path)
        engine = engine_of(**OF_HOSTS)
        engine.save_checkpoint("out", tag="newest")
        dist.barrier()
        assert names_in(tmp_path / "out" / "newest") == ["mp_rank_00_model"]
        for step in range(3):
            steps(engine, rank, step, step + 1)
            engine.save_checkpoint("out", tag="newest", client_state={"host": host})
            dist.barrier()
            assert names_in(tmp_path / "out" / "newest") == of_step(step + 1)
            dist.barrier()
        other = engine_of(**OF_HOSTS)
        _, found = other.load_checkpoint("out")
        assert found == {"host": 0}
        assert_same_state(state(other), state(engine))
        return state_at_the_end(engine)

    expected = on_ranks(3, run)[0]
    for ranks in (1, 2):
        assert_same_state(states_loaded_by(ranks, tmp_path / "out"), expected)


def test_no_host_goes_on_before_all_have_saved(tmp_path):
    def run(rank):
        host = on_two_hosts(rank, lambda host: tmp_path / f"{host}")
        engine = engine_of(**OF_HOSTS)
        steps(engine, rank, 0, 1)
        if rank == 1:
            prepare = _files.prepare
            _files.prepare = lambda *of: time.sleep(0.5) or prepare(*of)
        publish = _files.publish

        def published(new, path):
            if path.name == MODULE:
                # All that takes its place on any host is durable.
                for its in range(2):
                    folder = tmp_path / f"{its}" / "out" / "global_step1"
                    assert any(MODULE in there.name for there in folder.iterdir())
            publish(new, path)

        _files.publish = published
        engine.save_checkpoint("out")
        for its in range(2):
            assert (tmp_path / f"{its}" / "out" / "latest").read_text() == "global_step1"
            assert names_in(tmp_path / f"{its}" / "out" / "global_step1") == of_step(1)
        dist.barrier()
        return host

    assert on_ranks(3, run) == [0, 1, 1]


def test_a_host_that_cannot_save_leaves_the_tag_on_all_as_it_was(tmp_path):
    def run(rank):
        on_two_hosts(rank, lambda host: tmp_path / f"{host}")
        engine = engine_of(**OF_HOSTS)
        steps(engine, rank, 0, 1)
        engine.save_checkpoint("out", tag="newest")
        expected = state(engine)
        steps(engine, rank, 1, 2)
        prepare = _files.prepare

        def full(path, content):
            raise OSError("no space left")

        if rank == 1:
            _files.prepare = full
        words = what_raises(
            (OSError, ziggurat.Unavailable), lambda: engine.save_checkpoint("out", tag="newest")
        )
        assert "no space left" in words
        _files.prepare = prepare
        dist.barrier()
        other = engine_of(**OF_HOSTS)
        other.load_checkpoint("out")
        assert other.global_steps == 1
        assert_same_state(state(other), expected)
        dist.barrier()
        engine.save_checkpoint("out", tag="newest")
        dist.barrier()
        for host in range(2):
            assert names_in(tmp_path / f"{host}" / "out" / "newest") == of_step(2)

    on_ranks(3, run)


def test_hosts_save_what_was_written_between_two_steps(tmp_path):
    def run(rank):
        on_two_hosts(rank, lambda host: tmp_path / f"{host}")
        engine = engine_of(**BF16, **OF_HOSTS)
        steps(engine, rank, 0, 2)
        scale_one(engine)
        engine.save_checkpoint("out")
        other = engine_of(**BF16, **OF_HOSTS)
        other.load_checkpoint("out")
        for one in (engine, other):
            steps(one, rank, 2, 4)
        assert same(bits(other), bits(engine))
        assert_same_state(state(other), state(engine))

    on_ranks(3, run)


def test_hosts_with_storage_of_their_own_are_one_tag(tmp_path):
    def run(rank):
        on_two_hosts(rank, lambda host: tmp_path / f"{host}")
        engine = engine_of(**OF_HOSTS)
        steps(engine, rank, 0, 1)
        engine.save_checkpoint("out", tag=f"of-{rank}")
        assert (tmp_path / "1" / "out" / "latest").read_text() == "of-0"

    on_ranks(3, run)


@pytest.mark.parametrize("hosts", [1, 2])
def test_rank_0_alone_saves_where_there_is_one_host(tmp_path, hosts):
    def run(rank):
        _meeting._PATIENCE = _meeting._LONG_PATIENCE = datetime.timedelta(seconds=0.5)
        if hosts == 2:
            on_two_hosts(rank, lambda host: tmp_path)
        engine = engine_of(**OF_HOSTS)
        steps(engine, rank, 0, 1)
        if rank == 0 and hosts == 1:
            engine.save_checkpoint(tmp_path / "out")
        if rank == 0 and hosts == 2:
            with pytest.raises(ziggurat.Unavailable, match=r"the ranks \[1, 2\] have not called"):
                engine.save_checkpoint(tmp_path / "out")
        dist.barrier()
        return state_at_the_end(engine)

    expected = on_ranks(3, run)[0]
    if hosts == 1:
        assert_same_state(states_loaded_by(2, tmp_path / "out"), expected)


def test_folders_that_ranks_do_not_share_are_refused_where_they_should(tmp_path):
    def run(rank):
        engine = engine_of()
        steps(engine, rank, 0, 1)
        words = what_raises(
            ziggurat.ZigguratError, lambda: engine.save_checkpoint(tmp_path / f"{rank}")
        )
        assert "give all ranks one folder that they share" in words
        assert not list(tmp_path.rglob(MODULE)) and not list(tmp_path.rglob("latest"))
        dist.barrier()

    on_ranks(2, run)


def test_a_save_that_one_rank_cannot_name_keeps_no_other_waiting(tmp_path):
    def run(rank):
        engine = engine_of()
        words = what_raises(
            ziggurat.ZigguratError, lambda: engine.save_checkpoint(tmp_path if rank else "", "tag")
        )
        assert "give both" in words
        dist.barrier()

    on_ranks(2, run)


def test_what_earlier_releases_saved_on_hosts_is_loaded(tmp_path):
    """They gave each host's state another name, and no save a name of its own."""

    def save(rank):
        engine = engine_of(train_micro_batch_size_per_gpu=8)
        steps(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path / "0")
        return state_at_the_end(engine)

    (expected,) = on_ranks(1, save)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    for host in range(2):
        folder = tmp_path / f"{host}" / "global_step2"
        saved = torch.load(folder / MODULE, weights_only=False)
        (its,) = folder.glob("ziggurat_state_*")
        its.rename(its.with_name(f"ziggurat_state_2_of-{host}"))
        del saved["ziggurat"]["save"]
        saved["ziggurat"]["state"]["folder"] = f"ziggurat_state_2_of-{host}"
        torch.save(saved, folder / MODULE)

    def load(rank):
        engine = engine_of()
        engine.load_checkpoint(tmp_path / f"{rank}")
        assert_same_state(state(engine), expected)

    on_ranks(2, load)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
