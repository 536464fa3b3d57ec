# SPDX-License-Identifier: Apache-2.0
"""Ranks of an offloaded model that part ways: each ends with an error that says who waits where, within seconds.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

try:
    import pytest
    import torch
    from rank_runs import RankProcesses, on_ranks
    from streamed_models import gpt, loss_of, tokens_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._exchange import exchange as exchange_module

WITHIN = 30.0  # seconds from the moment at which ranks part: 2 to 4 on an idle machine, and 30 minutes if nobody looked


def begun(exchange, **given):
    model = ziggurat.torch.offload(gpt(checkpointing="not reentrant"), memory="1MiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, exchange=exchange, **given)
    step(model, optimizer, tokens_of(0))
    return model, optimizer


def step(model, optimizer, tokens):
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


class Broken(Exception):
    pass


def breaks_in_recomputation(model):
    """Lets the second call of a block, in backward, fail."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 2:
            raise Broken("a batch that cannot be computed again")

    return model.blocks[1].register_forward_pre_hook(hook)


def raises(model, optimizer, parted):
    breaks_in_recomputation(model)
    parted()
    step(model, optimizer, tokens_of(1))


def goes_on(model, optimizer, parted):
    """Leaves out a batch whose backward has failed, of which the other ranks have a part: buckets are small."""
    handle = breaks_in_recomputation(model)
    parted()
    try:
        step(model, optimizer, tokens_of(1))
    except Broken:
        optimizer.zero_grad()
    handle.remove()
    for at in range(2, 5):
        step(model, optimizer, tokens_of(at))


def writes_alone(model, optimizer, parted):
    parted()
    with ziggurat.torch.gathered(model.norm.weight), torch.no_grad():
        model.norm.weight.mul_(2)
    step(model, optimizer, tokens_of(1))


def ends_early(model, optimizer, parted):
    parted()
    optimizer.close()


def steps_twice(model, optimizer, parted):
    """Makes a step where the others have not had the backward yet."""
    loss_of(model, tokens_of(1)).backward()
    parted()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model, tokens_of(2))
    optimizer.close()


def run(rank, does, exchange, group, out, told):
    exchange_module.BUCKET_BYTES = 1 << 12 if does is goes_on else exchange_module.BUCKET_BYTES
    model, optimizer = begun(exchange, shard_group=group)
    if rank == 1:
        does(model, optimizer, lambda: Path(out).write_text("parted"))
        time.sleep(8)  # and waits for nobody
    for at in range(1, 100):
        step(model, optimizer, tokens_of(at))
        told(at)


WAYS = {
    raises: r"rank 1\b.*(gone|ended|stopped)|Broken",
    goes_on: r"parted ways|rank 1\b.*(gone|ended|stopped)|a part of its gradients",
    writes_alone: r"parted ways.*the writing of parameter 'norm.weight'",
    ends_early: r"parted ways.*close\(\)|rank 1\b.*(gone|ended|stopped|closed)",
    steps_twice: r"parted ways|rank 1\b.*(gone|ended|stopped|closed)",
}


# Where the rank that parts has made its last call, which is none of its own mistakes.
ENDS_WELL = (ends_early, steps_twice)


@pytest.mark.parametrize(
    ("does", "exchange", "group"),
    [
        *((does, "torch", None) for does in WAYS),
        (goes_on, "ziggurat", None),
        (writes_alone, "ziggurat", None),
        (goes_on, "torch", 2),  # of four ranks
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_ranks_that_part_end_and_say_where(does, exchange, group):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        with RankProcesses(2 * (group or 1), run, does, exchange, group, out) as ranks:
            until = time.monotonic() + 120
            while not Path(f"{out}-1").exists() and time.monotonic() < until:
                time.sleep(0.01)
            for rank, code, words in ranks.end(within=time.monotonic() + WITHIN):
                if rank == 1 and does in ENDS_WELL:
                    continue
                assert code not in (None, 0), f"rank {rank} ended with {code}:\n{words[-3000:]}"
                assert re.search(WAYS[does], words.replace("\n", " ")), f"rank {rank}:\n{words[-3000:]}"


def leaves_one_out(rank):
    model, optimizer = begun("torch")
    if rank == 1:  # nothing was sent when its backward failed
        handle = breaks_in_recomputation(model)
        with pytest.raises(Broken):
            step(model, optimizer, tokens_of(1))
        handle.remove()
        optimizer.zero_grad()
    for at in range(2, 5):
        step(model, optimizer, tokens_of(at))
    found = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer.close()
    return found


def test_a_batch_that_fails_before_anything_is_sent_may_be_left_out():
    one, other = on_ranks(2, leaves_one_out)
    assert all(torch.equal(other[name], values) for name, values in one.items())


def refused_on_each(rank, does, match):
    """Each rank gets the error, and the model is as before."""
    model, optimizer = begun("torch")
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises(ziggurat.torch.InvalidArgument, match=match):
        does(rank, model, optimizer)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def writes_its_own(rank, model, _):
    torch.manual_seed(rank)
    with ziggurat.torch.gathered(model.norm.weight), torch.no_grad():
        torch.nn.init.normal_(model.norm.weight)


def saves_alone(rank, model, optimizer):
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            ziggurat.torch.save_checkpoint(folder, optimizer, model)
        else:
            step(model, optimizer, tokens_of(1))


@pytest.mark.parametrize(
    ("does", "match"),
    [
        (writes_its_own, "have written different values into parameter 'norm.weight'"),
        (saves_alone, r"rank 0 is at save_checkpoint\(\).*rank 1 at the end of a backward"),
    ],
)
def test_what_ranks_do_differently_is_refused_on_each(does, match):
    on_ranks(2, refused_on_each, does, match)


def begins_with_its_own(rank):
    model = gpt()
    model.narrow.weight.requires_grad_(False)
    with torch.no_grad():
        model.narrow.weight.add_(rank)
    model = ziggurat.torch.offload(model, memory="1MiB")
    optimizer = ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(ziggurat.torch.InvalidArgument, match="the parameters of rank 1 differ from those of rank 0"):
        loss_of(model, tokens_of(0))
    optimizer.close()


def test_a_frozen_parameter_that_differs_is_refused():
    on_ranks(2, begins_with_its_own)


def freezes_its_own(rank):
    model = gpt()
    model.blocks[rank].requires_grad_(False)
    model = ziggurat.torch.offload(model, memory="1MiB")
    optimizer = ziggurat.torch.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(ziggurat.torch.InvalidArgument, match="rank 1 trains parameter 'blocks.0.*which rank 0 does not"):
        loss_of(model, tokens_of(0))
    optimizer.close()


def test_ranks_that_train_other_parameters_are_refused():
    on_ranks(2, freezes_its_own)


def finds_no_room(rank):
    model = ziggurat.torch.offload(gpt(), memory="640KiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, tokens_of(rank))
    if rank == 1:
        with pytest.raises(ziggurat.ResourceExhausted, match="has no room"):
            with ziggurat.torch.gathered(model.parameters()):
                pass
    step(model, optimizer, tokens_of(rank))
    optimizer.close()


def test_a_unit_without_room_is_refused_and_the_others_go_on():
    on_ranks(2, finds_no_room)


def takes_turns(rank, interleaved):
    model, optimizer = begun("torch")
    given = [(tokens_of(10 * rank + at),) for at in range(2 + rank)]  # another number on each rank
    if interleaved:
        ziggurat.torch.micro_batches(model, [(one[:, :-1],) for (one,) in given], mean_of)
    else:
        for at, (one,) in enumerate(given):
            with optimizer.no_sync() if at + 1 < len(given) else contextlib.nullcontext():
                mean_of(model(one[:, :-1]), None).backward()
    optimizer.step()
    found = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer.close()
    return found


def mean_of(output, _):
    return output.square().mean()


def test_micro_batches_are_those_of_a_loop_that_sends_once():
    for loop, turns in zip(on_ranks(2, takes_turns, False), on_ranks(2, takes_turns, True), strict=True):
        assert all(torch.equal(turns[name], values) for name, values in loop.items())


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
