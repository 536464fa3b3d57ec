# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload(): the bits of the same script without it, and what is refused.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import sys

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import DEPTH, gpt, loss_of, tokens_of, train
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
    print(f"skipped: PyTorch {torch.__version__} cannot exchange the memory of a storage")
    sys.exit(77)

import ziggurat
import ziggurat.torch
from ziggurat._streaming import streaming_of
from ziggurat._units import ROOT, divide
from ziggurat.torch import gathered, offload


def memory_for(model: torch.nn.Module, budget: str = "smallest") -> int:
    division = divide(model, "auto")
    all_bytes = sum(unit.size_bytes for unit in division.units)
    smallest = division.smallest()[0]
    return {"smallest": smallest, "half": max(smallest, all_bytes // 2), "all": all_bytes}[budget]


def pinned(model: torch.nn.Module) -> list[str]:
    streaming, _ = streaming_of(next(model.parameters()))
    return [unit.name for unit in streaming.units if unit.pins]


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    values = {}
    for name, param in model.named_parameters():
        with gathered(param):
            values[name] = param.detach().clone()
    return values


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(model, folder, offloaded=None, placement="host", **arguments):
    """Trains the model, offloaded into `offloaded` of memory if that is given. Returns its losses
    and its parameters."""
    if offloaded is not None:
        assert offload(model, memory=memory_for(model, offloaded), placement=placement) is model
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=f"nvme:{folder}" if folder else "host"
    )
    losses = train(model, optimizer, range(3), **arguments)
    if offloaded is not None:
        assert not pinned(model)
        assert "away" in repr(next(model.parameters()))
    values = values_of(model)
    optimizer.close()
    assert same(values, dict(model.named_parameters()))  # close() has given them back
    return losses, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", ["smallest", "half", "all"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_bits_are_those_without_it(dtype, budget, placement, tmp_path):
    plain = trained(gpt(dtype), tmp_path / "plain")
    ours = trained(gpt(dtype), tmp_path / "ours", budget, placement)
    assert ours[0] == plain[0]
    assert same(ours[1], plain[1])


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bits_with_checkpointing_accumulation_and_clipping(checkpointing, accumulate):
    arguments = {"accumulate": accumulate, "clip": 1.0}
    plain = trained(gpt(checkpointing=checkpointing), None, **arguments)
    ours = trained(gpt(checkpointing=checkpointing), None, "smallest", **arguments)
    assert ours[0] == plain[0]
    assert same(ours[1], plain[1])


def test_units_are_blocks_and_layers_outside():
    division = divide(gpt(), "auto")
    blocks = [f"blocks.{i}" for i in range(DEPTH)]
    assert [u.name for u in division.units] == [ROOT, "embedding", "narrow", *blocks, "widen"]
    named = divide(gpt(), ["blocks.1", "blocks.2"])
    assert [unit.name for unit in named.units] == [ROOT, "blocks.1", "blocks.2"]
    told = divide(gpt(), lambda name, module: name.startswith("blocks.1.mlp."))
    assert [unit.name for unit in told.units] == [ROOT, "blocks.1.mlp.0", "blocks.1.mlp.2"]


def test_too_little_memory_says_what_works():
    model = gpt()
    smallest = memory_for(model)
    with pytest.raises(
        ziggurat.InvalidArgument,
        match=rf"smallest that works is {smallest}, for unit '\(root\)' with \d+ bytes, unit "
        r"'blocks\.0' with \d+ bytes, the next, unit 'blocks\.1'",
    ):
        offload(model, memory=smallest - 1)
    offload(model, memory=smallest)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
