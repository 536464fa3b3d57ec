# SPDX-License-Identifier: Apache-2.0
"""What many small parameters cost: calls into the engine are a step's, not a parameter's.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from collections import Counter

import ziggurat._library.native
import ziggurat._pytorch.names
import ziggurat.torch


@pytest.fixture
def calls(monkeypatch):
    made = Counter()
    call = ziggurat._library.native.call

    def counted(name, *arguments, **words):
        made[name] += 1
        return call(name, *arguments, **words)

    monkeypatch.setattr(ziggurat._library.native, "call", counted)
    return made


class Many(torch.nn.Module):
    """A module for each parameter."""

    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 1, bias=False) for _ in range(count))

    def forward(self, values):
        return torch.cat([layer(values) for layer in self.layers]).sum()


def calls_of_a_step(calls, count, place, waits=False, **ranks):
    model = Many(count)
    params = list(model.parameters())
    for i, param in enumerate(params):  # alike on every rank
        torch.nn.init.constant_(param, i)
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 1e-3}]
    told = {"model": model} if waits else {}
    optimizer = ziggurat.torch.AdamW(groups, lr=1e-2, placement=place, **told, **ranks)
    made = []
    for _ in range(3):
        model(torch.ones(3)).backward()
        calls.clear()
        optimizer.step()
        optimizer.zero_grad()
        del calls["ziggurat_runtime_create"]  # there may be one of another optimizer
        made.append(dict(calls))
    optimizer.close()
    return made


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_step_of_many_parameters_makes_the_calls_of_a_step_of_few(calls, where, tmp_path):
    few, many = (
        calls_of_a_step(calls, count, "host" if where == "host" else f"nvme:{tmp_path}/{count}")
        for count in (4, 40)
    )
    assert few == many
    assert few[-1] == {
        "ziggurat_discard_gradients": 1,
        "ziggurat_lend_gradients": 1,
        "ziggurat_step": 1,
        "ziggurat_wait": 1,
    }


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_with_the_model_a_step_makes_as_many(calls, where, tmp_path):
    """On NVMe each module waits for its own, in the forward, and not in the step."""
    few, many = (
        calls_of_a_step(
            calls, count, "host" if where == "host" else f"nvme:{tmp_path}/{count}", waits=True
        )
        for count in (4, 40)
    )
    assert few == many
    assert few[-1]["ziggurat_lend_gradients"] == few[-1]["ziggurat_step"] == 1


def test_among_ranks_too(monkeypatch):
    """With state in memory; on a drive each waits for its slices as it sends them."""

    def run(rank):
        made = Counter()
        call = ziggurat._library.native.call

        def counted(name, *arguments, **words):
            made[name] += 1
            return call(name, *arguments, **words)

        monkeypatch.setattr(ziggurat._library.native, "call", counted)
        found = []
        for count in (4, 40):
            found.append(calls_of_a_step(made, count, "host", group=dist.group.WORLD)[-1])
        return found

    for few, many in on_ranks(2, run):
        assert few == many
        assert few["ziggurat_wait"] == few["ziggurat_step"] == 1


def named_in(groups, monkeypatch):
    """Names that are looked at for an optimizer that gets a parameter a group."""
    looked_at = []
    alone = ziggurat._pytorch.names.names_alone

    def counted(names, **how):
        looked_at.append(len(names))
        return alone(names, **how)

    monkeypatch.setattr("ziggurat._optimizer.optimizer.names_alone", counted)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(groups)]
    optimizer = ziggurat.torch.AdamW([("w0", params[0])], lr=1e-2)
    for i, param in enumerate(params[1:], 1):
        optimizer.add_param_group({"params": [(f"w{i}", param)]})
    torch.stack(params).sum().backward()
    optimizer.step()
    optimizer.close()
    return sum(looked_at)


def test_a_group_costs_what_is_in_it_and_no_look_at_those_before(monkeypatch):
    assert named_in(20, monkeypatch) == 20
    assert named_in(80, monkeypatch) == 80


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
