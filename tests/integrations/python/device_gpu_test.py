# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients on an accelerator that is there, beside the same loops on the CPU.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch sees no
accelerator.
"""

import sys

try:
    import pytest
    import torch
    from device_cases import CASES, Lab, assert_same, run, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch

THERE = [name for name in ("cuda", "xpu") if getattr(torch, name).is_available()]
if not THERE:
    print("skipped: PyTorch sees no accelerator")
    sys.exit(77)
DEVICE = THERE[0]


@pytest.mark.parametrize(("placement", "waits"), [("host", False), ("host", True), ("nvme", True)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bits_are_those_of_the_cpu(case, placement, waits, tmp_path):
    expected = run(case, Lab("cpu", tmp_path / "cpu"))
    found = run(case, Lab(DEVICE, tmp_path / "device", waits, placement))
    assert_same(found, expected)


def test_staging_is_pinned(tmp_path):
    lab = Lab(DEVICE, tmp_path)
    model = lab.model()
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(2))
    opened = optimizer._opened[0]
    for index, param in enumerate(opened.params):
        assert param.device.type == DEVICE
        assert opened._places[index].values(index, param).is_pinned()
    optimizer.close()


def test_state_dicts_are_torchs_both_ways(tmp_path):
    lab = Lab(DEVICE, tmp_path)
    ours, theirs = lab.model().float(), lab.model().float()
    optimizer = lab.optimizer(ours)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for number in range(6):
        for model, each in ((ours, optimizer), (theirs, torchs)):
            for name, layer in model.layers.items():
                layer.weight.grad = lab.gradient(number, name).float()
            each.step()
        if number == 2:
            state, other = optimizer.state_dict(), torchs.state_dict()
            torchs.load_state_dict(state)
            optimizer.load_state_dict(other)
            for param in theirs.parameters():
                assert torchs.state[param]["exp_avg"].device == param.device
    optimizer.close()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=3e-7)


def test_a_wide_model_trains(tmp_path):
    """Large enough that copies are under way while modules compute."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, model=model)
    inputs = torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    assert losses[-1] < losses[0] / 2


def deep() -> torch.nn.Module:
    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*blocks).bfloat16()


@pytest.mark.skipif(DEVICE != "cuda", reason="units are brought to NVIDIA's GPUs")
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_units_have_the_bits_of_a_model_that_is_there(placement, tmp_path):
    def trained(name, moved):
        model = moved(deep())
        state = "host" if placement == "host" else f"nvme:{tmp_path / name}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, placement=state)
        found = []
        for step in range(6):
            inputs = torch.randn(32, 512, generator=torch.Generator().manual_seed(step))
            inputs = inputs.to(DEVICE, torch.bfloat16)
            loss = (model(inputs) - inputs).float().square().mean()
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return found, [param.detach().cpu() for param in model.parameters()]

    units = [str(number) for number in range(6)]
    kept = {"memory": "2MiB", "placement": placement, "units": units, "device": "cuda:0"}
    losses, values = trained("there", lambda model: model.to(DEVICE))
    ours = trained("units", lambda model: ziggurat.torch.offload(model, **kept))
    assert ours[0] == losses
    assert all(torch.equal(one, other) for one, other in zip(ours[1], values, strict=True))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
