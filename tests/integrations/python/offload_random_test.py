# SPDX-License-Identifier: Apache-2.0
"""Models of random shapes, offloaded into the smallest memory that works: random steps, evaluations
and writes, with the bits of the same without offload().

offload_random_test.py [FIRST COUNT]: these seeds, by hand. Run by pytest, or as a script, which
exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import random
import sys

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._units import divide
from ziggurat.torch import gathered, offload

SEEDS = range(12)


class Layer(torch.nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        inner = draw.choice([3, 40, 256, 700, 1500])
        self.norm = torch.nn.LayerNorm(width)
        self.wide, self.narrow = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
        self.factors = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(draw.choice([1, width])))
            for _ in range(draw.randint(0, 4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(torch.relu(self.wide(self.norm(x))))
        for factor in self.factors:
            y = y * torch.tanh(factor)
        return x + y


class Layers(torch.nn.Module):
    """Its root may be larger than all else, and then lies in the middle of the memory at times."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([16, 64, 200])
        self.first = torch.nn.Linear(8, width)
        self.layers = torch.nn.ModuleList(Layer(draw, width) for _ in range(draw.randint(2, 7)))
        if draw.random() < 0.3:
            self.layers.append(self.layers[0])
        self.bias = torch.nn.Parameter(0.01 * torch.randn(draw.choice([1, 20_000]), width))
        self.last = torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.bias.mean(0)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def drawn_input(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_some(model: torch.nn.Module, draw: random.Random) -> list[float]:
    before = []
    for param in draw.sample(list(model.parameters()), 2):
        with gathered(param), torch.no_grad():
            before.append(param.double().sum().item())
            param.mul_(0.9)
    return before


def run(seed: int, folder, offloads: bool) -> list[float]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    model = Layers(draw).to(dtype)
    for param in model.parameters():
        param.requires_grad_(draw.random() > 0.15)
    tier = draw.choice(["host", "nvme"])
    where = "host" if tier == "host" and draw.random() < 0.5 else f"nvme:{folder}"
    formats = ["fp32"] if dtype == torch.float32 else ["fp32", "split", "bf16-moments"]
    if offloads:
        offload(model, memory=divide(model, "auto").smallest()[0], placement=tier)
    optimizer = ziggurat.torch.AdamW(
        model.parameters(), lr=1e-2, placement=where, state_format=draw.choice(formats)
    )
    found = []
    for call in range(16):
        what, x = draw.random(), drawn_input(100 * seed + call, dtype)
        if what < 0.2:
            with torch.no_grad():
                found.append(model(x).sum().item())
        elif what < 0.3:
            found += write_some(model, draw)
        else:
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.item())
        if draw.random() < 0.4:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return found + [param.double().sum().item() for param in model.parameters()]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_without_it(seed, tmp_path):
    assert run(seed, tmp_path / "ours", True) == run(seed, tmp_path / "plain", False)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        SEEDS = range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2]))
        import tempfile

        for number in SEEDS:
            with tempfile.TemporaryDirectory() as own:
                assert run(number, f"{own}/1", True) == run(number, f"{own}/2", False), number
        sys.exit(0)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
