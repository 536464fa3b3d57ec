# SPDX-License-Identifier: Apache-2.0
"""Ranks of an offloaded model that part ways: each ends with an error that says who waits where, within seconds.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

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
from ziggurat import _exchange

WITHIN = 30.0  # seconds from the moment at which ranks part: 2 to 4 on an idle machine, and 30 minutes if nobody looked


def begun(exchange):
    model = ziggurat.torch.offload(gpt(checkpointing="not reentrant"), memory="1MiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, exchange=exchange)
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


def run(rank, does, exchange, out, told):
    _exchange.BUCKET_BYTES = 1 << 12 if does is goes_on else _exchange.BUCKET_BYTES
    model, optimizer = begun(exchange)
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


@pytest.mark.parametrize("exchange", ["torch", "ziggurat"])
@pytest.mark.parametrize("does", WAYS, ids=lambda does: does.__name__)
def test_ranks_that_part_end_and_say_where(does, exchange):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        with RankProcesses(2, run, does, exchange, out) as ranks:
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


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
