# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload(device=) among ranks with a GPU each, over the double of the CUDA runtime: the bits of ranks
on the CPU, of which each keeps slices, and mistakes that it has to see.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload()
takes.
"""

import contextlib
import itertools
import sys

try:
    import pytest
    from cuda_double import Gpu  # first, as it chooses the library
    import torch
    from long_cases import long
    from rank_runs import on_ranks
    from streamed_models import VOCABULARY, gpt, loss_of, tokens_of, train, values_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._units.units import divide
from ziggurat.torch import gathered, offload


def trained(rank, world, gpu, home, dtype, folder, **given):
    """Returns what a run finds on its way, and the values at its end: with gradients that are summed, clipped, read
    and written, and a parameter that is written."""
    model = gpt(dtype)
    division = divide(model, "auto")
    division.set_ranks(world)
    device = {} if gpu is None else {"device": "cuda:0"}
    offload(model, memory=division.smallest()[0], placement=home, **device)
    if gpu is not None:
        gpu.computes(model)
    placement = "host" if folder is None else f"nvme:{folder}"
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1, placement=placement, **given)

    def own_loss(model, tokens):
        return loss_of(model, (tokens + rank) % VOCABULARY)

    found = train(model, optimizer, range(2), accumulate=2, clip=0.5, loss_of=own_loss)
    weight = model.blocks[1].mlp[0].weight
    with gathered(weight), torch.no_grad():
        weight.mul_(0.5)
    own_loss(model, tokens_of(7)).backward()
    found += [param.grad.double().sum().item() for param in model.parameters()]
    weight.grad.add_(0.125)
    own_loss(model, tokens_of(8)).backward()
    optimizer.step()
    optimizer.zero_grad()
    found += train(model, optimizer, range(2, 3), loss_of=own_loss)
    state = values_of(model)
    figures = optimizer.figures()
    assert figures["exchange_bytes"] <= figures["exchange_planned_bytes"]
    optimizer.close()
    assert all(param.device.type == "cpu" for param in model.parameters())
    return found, state


def on_both(rank, world, home, dtype, folder, given):
    """One run on the CPU, and one on a GPU."""
    path = None if folder is None else f"{folder}/cpu"
    expected = trained(rank, world, None, home, dtype, path, **given)
    with Gpu(3 + rank) as gpu:
        found = trained(rank, world, gpu, home, dtype, path and f"{folder}/gpu", **given)
    return expected, found, gpu.sections, gpu.findings


CASES = [
    (2, "host", torch.float32, {}),
    (2, "params=nvme,grads=nvme", torch.bfloat16, {"exchange": "ziggurat"}),
    pytest.param(3, "nvme", torch.bfloat16, {}, marks=long),
    pytest.param(2, "nvme", torch.bfloat16, {"quantized_weights": True}, marks=long),
    pytest.param(4, "host", torch.float32, {"shard_group": 2}, marks=long),
    pytest.param(4, "nvme", torch.bfloat16, {"hpz": 2, "quantized_gradients": 8}, marks=long),
]


@pytest.mark.parametrize(("world", "home", "dtype", "given"), CASES)
def test_ranks_with_a_gpu_each_have_the_bits_of_the_cpu(world, home, dtype, given, tmp_path):
    folder = str(tmp_path) if "nvme" in home else None
    for (losses, state), (own_losses, own_state), sections, findings in on_ranks(
        world, on_both, world, home, dtype, folder, given
    ):
        assert findings == []
        assert sections > 100
        assert own_losses == losses
        assert all(torch.equal(own_state[name], values) for name, values in state.items())


def on_gpu(model, world, gpu):
    """Returns the optimizer of a model that is brought to a rank's GPU."""
    division = divide(model, "auto")
    division.set_ranks(world)
    offload(model, memory=division.smallest()[0], device="cuda:0")
    gpu.computes(model)
    return ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)


def with_a_mistake(rank, world, mistake):
    """What a rank's machine sees of a mistake. In a forward alone, since a rank that ends with an error in a backward
    would let the other one wait."""
    with Gpu(6, mistake) as gpu:
        model = gpt()
        optimizer = on_gpu(model, world, gpu)
        with contextlib.suppress(ziggurat.ZigguratError), torch.no_grad():
            loss_of(model, tokens_of(0))
        torch.distributed.barrier()
        with contextlib.suppress(ziggurat.ZigguratError):
            optimizer.close()
    return None, gpu.findings


def test_a_missing_wait_is_seen():
    for _, findings in on_ranks(2, with_a_mistake, 2, "no waits"):
        assert any("nothing orders it after" in one for one in findings)


def alone(rank, world, gpu_rank):
    """Only one rank evaluates, and the others give it their slices meanwhile."""
    found = []
    with Gpu(11 + rank) as gpu:
        model = gpt()
        optimizer = on_gpu(model, world, gpu)
        for step in range(2):
            train(model, optimizer, range(step, step + 1))
            if rank == gpu_rank:
                with torch.no_grad():
                    found += [loss_of(model, tokens_of(n)).item() for n in range(3)]
        optimizer.close()
    return found, gpu.findings


def test_one_rank_evaluates_alone():
    first, second = on_ranks(2, alone, 2, 0), on_ranks(2, alone, 2, 1)
    assert first[0][0] == second[1][0] != []
    for _, findings in itertools.chain(first, second):
        assert findings == []


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
