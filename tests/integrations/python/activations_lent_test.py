# SPDX-License-Identifier: Apache-2.0
"""offload(activations=): whoever keeps what backward was lent, or writes it, changes nobody else's values, and nobody
waits for it.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import contextlib
import functools
import os
import subprocess
import sys

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
from ziggurat._activations import activations
from ziggurat._activations.activations import Activations
from ziggurat._activations.stash import Stash

COUNT = 100_000


class Given(torch.autograd.Function):
    """Whose backward gives `p` what it has saved as its gradient."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x)
        return (x * p).sum()

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0]


@pytest.fixture(autouse=True)
def all_pass_through_the_stash(monkeypatch):
    monkeypatch.setattr(activations, "IN_PLACE", 0)


def of_no_model(folder):
    return Activations(lambda: functools.partial(Stash, str(folder)), 8 << 20, set)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_second_backward_finds_what_the_first_one_found(tmp_path, is_trained):
    """The first gradient is what was saved, and the others are added to it in place."""
    kept = of_no_model(tmp_path)
    weight, p = torch.ones(COUNT, requires_grad=is_trained), torch.nn.Parameter(torch.ones(COUNT))
    with kept.kept():
        x = torch.arange(COUNT) * weight
        y = Given.apply(x, p)
    for times in (1, 2, 3):
        y.backward(retain_graph=times < 3)
        assert torch.equal(p.grad, times * torch.arange(COUNT).float())
    assert kept.figures()["put_bytes"] >= x.nbytes


def test_a_forward_that_goes_on_after_a_backward_saves_anew(tmp_path):
    kept, p = of_no_model(tmp_path), torch.nn.Parameter(torch.ones(COUNT))
    with kept.kept():
        x = torch.arange(COUNT) * 1.0
        Given.apply(x, p).backward()
        y = Given.apply(x, p)
        p.grad.add_(1)  # where it was lent
        x = None
    assert kept.figures()["lent_bytes"] == 4 * COUNT
    lent, p.grad = p.grad, None
    y.backward()
    assert torch.equal(p.grad, torch.arange(COUNT).float())
    assert torch.equal(lent, torch.arange(COUNT).float() + 1)


def test_an_error_while_an_item_is_filled_keeps_no_memory(tmp_path):
    """Also if somebody keeps the error, as a notebook does."""
    stash, kept = Stash(str(tmp_path), 1 << 20), []

    def interrupted(address):
        raise KeyboardInterrupt

    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            try:
                stash.put(1 << 20, interrupted)
            except KeyboardInterrupt as error:
                kept.append(error)
                raise
    assert len(kept) == 3
    assert stash.put(1 << 20, lambda address: None) is not None


AT_EXIT = """
import atexit

def read():
    print("at exit", p.grad.sum().item())

atexit.register(read)  # before others, and so it is called after them

import sys
import torch
from activations_lent_test import COUNT, Given, of_no_model
from ziggurat._activations import activations

activations.IN_PLACE = 0
p = torch.nn.Parameter(torch.ones(COUNT))
kept = of_no_model(sys.argv[1])
with kept.kept():
    y = Given.apply(torch.ones(COUNT) * 1.0, p)
y.backward()
print("lent", int(kept.figures()["lent_bytes"]))
"""


def test_what_is_lent_can_be_read_while_the_interpreter_exits(tmp_path):
    places = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(ziggurat.__file__))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout.split("\n")[:2], run.stderr) == (0, [f"lent {4 * COUNT}", f"at exit {COUNT}.0"], "")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
