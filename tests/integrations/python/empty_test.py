# SPDX-License-Identifier: Apache-2.0
"""Parameters without an element, which models have where a size of their configuration is 0: they
train, are saved and come back beside the others.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing. With the command as
ZIGGURAT_COMMAND, it reads their checkpoint too.
"""

import copy
import os
import subprocess
import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from torch.nn.parallel import DistributedDataParallel

import ziggurat.torch
from ziggurat.torch import load_checkpoint, save_checkpoint

COMMAND = os.environ.get("ZIGGURAT_COMMAND", "")
KINDS = {"AdamW": {}, "Lion": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}


class Model(torch.nn.Module):
    """Rows that are put behind the batch, of which there are none."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(1)
        super().__init__()
        self.first = torch.nn.Linear(5, 6)
        self.rows = torch.nn.Parameter(torch.empty(0, 6))
        self.last = torch.nn.Linear(6, 2)
        self.to(dtype)

    def forward(self, values):
        return self.last(torch.cat([self.first(values), self.rows]))


def train(model, optimizer, steps, first=0, rank=0):
    for step in range(first, first + steps):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 5).to(next(model.parameters()).dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def made(kind="AdamW", dtype=torch.float32, **where):
    model = Model(dtype)
    optimizer = getattr(ziggurat.torch, kind)(model.parameters(), lr=1e-2, **KINDS[kind], **where)
    return model, optimizer


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(values(one), values(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_their_shape_and_their_steps(kind, dtype, tmp_path):
    model, optimizer = made(kind, dtype)
    train(model, optimizer, 2)
    path = save_checkpoint(tmp_path, optimizer, model)
    train(model, optimizer, 2, first=2)
    other, then = made(kind, dtype)
    loaded = load_checkpoint(path, then, other)
    assert loaded.missing == loaded.unexpected == []
    assert then.state_of(other.rows)["step"] == 2
    train(other, then, 2, first=2)
    assert same(model, other)
    assert then.state_of(other.rows)["step"] == 4


@pytest.mark.skipif(not COMMAND, reason="no command")
def test_the_command_reads_such_a_checkpoint_and_leaves_them_out(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = made()
    train(model, optimizer, 1)
    path = save_checkpoint(tmp_path, optimizer, model)
    subprocess.run([COMMAND, "ckpt", "verify", path], check=True, capture_output=True)
    to_hf = [COMMAND, "ckpt", "to-hf", path, str(tmp_path / "hf")]
    subprocess.run(to_hf, check=True, capture_output=True)
    weights = safetensors.load_file(tmp_path / "hf/model.safetensors")
    assert weights.keys() == model.state_dict().keys() - {"rows"}


def test_a_checkpoint_of_before_they_were_trained_lacks_their_state(tmp_path):
    model = Model()
    model.rows.requires_grad_(False)
    optimizer = ziggurat.torch.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = save_checkpoint(tmp_path, optimizer, model)
    other, then = made()
    assert load_checkpoint(path, then, other, strict=False).missing == [
        "rows: exp_avg",
        "rows: exp_avg_sq",
    ]


def test_weights_alone_are_loaded(tmp_path):
    model, optimizer = made()
    train(model, optimizer, 1)
    path = save_checkpoint(tmp_path, optimizer, model)
    other, then = made()
    load_checkpoint(path, then, other, weights_only=True)
    assert same(model, other)
    assert then.state_dict()["state"] == {}


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD"])
def test_torch_optim_goes_on_from_their_state_and_we_from_its(kind):
    model, optimizer = made(kind)
    train(model, optimizer, 2)
    theirs, ours = Model(), Model()
    other = getattr(torch.optim, kind)(theirs.parameters(), lr=1e-2, **KINDS[kind])
    for target in (theirs, ours):
        target.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    again = getattr(ziggurat.torch, kind)(ours.parameters(), lr=1e-2, **KINDS[kind])
    again.load_state_dict(copy.deepcopy(other.state_dict()))  # torch.optim writes in its own
    train(theirs, other, 2, first=2)
    train(ours, again, 2, first=2)
    for one, reference in zip(values(ours), values(theirs), strict=True):
        torch.testing.assert_close(one, reference, rtol=0, atol=1e-6)


def test_a_store_goes_on_with_them(tmp_path):
    model, optimizer = made(placement=f"nvme:{tmp_path}/state")
    train(model, optimizer, 2)
    optimizer.close()
    other, then = made(placement=f"nvme:{tmp_path}/state")
    then.open(resume=True)
    assert same(model, other)
    train(other, then, 2, first=2)
    reference, beside = made()
    train(reference, beside, 4)
    assert same(reference, other)


@pytest.mark.parametrize("way", ["group", "ddp"])
def test_ranks_exchange_their_gradients_and_save_them(way, tmp_path):
    def run(rank):
        def divided():
            model = Model()
            wrapped = DistributedDataParallel(model) if way == "ddp" else model
            told = {"model": wrapped} if way == "ddp" else {"group": dist.group.WORLD}
            return model, wrapped, ziggurat.torch.AdamW(model.parameters(), lr=1e-2, **told)

        model, wrapped, optimizer = divided()
        train(wrapped, optimizer, 2, rank=rank)
        path = save_checkpoint(tmp_path, optimizer, wrapped)
        other, then_wrapped, then = divided()
        load_checkpoint(path, then, then_wrapped)
        steps = float(then.state_of(other.rows)["step"])
        reference, beside = Model(), None
        ddp = DistributedDataParallel(reference)
        beside = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        train(ddp, beside, 2, rank=rank)
        return steps, values(other), values(reference)

    for steps, found, expected in on_ranks(2, run):
        assert steps == 2
        for one, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(one, reference, rtol=0, atol=1e-6)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
