# SPDX-License-Identifier: Apache-2.0
"""Padded batches in PyTorch's nn.TransformerEncoder, offloaded: where it computes with nested tensors, the
values of padding are zeros, and without it they are others.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import io
import sys

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import same_with_and_without
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._units.units import divide

nn = torch.nn
WIDTH, LENGTH = 64, 10
LENGTHS = torch.tensor([LENGTH, 6, 3])
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


class Padded(nn.Module):
    """Calls `encode(inner, x)` with padded sequences; its output is the mean over all positions."""

    def __init__(self, inner, encode, frozen=False):
        super().__init__()
        self.inner, self.encode, self.frozen = inner.requires_grad_(not frozen), encode, frozen
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        if self.frozen:
            self.inner.eval()
        return self.head(self.encode(self.inner, x).mean(1))


def masked(inner, x):
    return inner(x, src_key_padding_mask=PADDING)


def transformed(inner, x):
    return inner(x, x[:, :4], src_key_padding_mask=PADDING)


MODELS = {
    "encoder": lambda: Padded(nn.TransformerEncoder(layer(), 5), masked),
    "encoder of one layer": lambda: Padded(nn.TransformerEncoder(layer(), 1), masked),
    "encoder, frozen": lambda: Padded(nn.TransformerEncoder(layer(), 5), masked, frozen=True),
    "encoder and decoder": lambda: Padded(
        nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True), transformed
    ),
    "layer": lambda: Padded(layer(), masked),
}
UNITS = {
    "auto": "auto",
    "whole": ["inner"],
    "inner layers": lambda name, module: type(module) is nn.Linear and name.startswith("inner."),
}


def found_by(model, optimizer):
    found = []
    for step in range(3):
        x = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.item(), *model.eval()(x).flatten().tolist()]
    return found


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_without_it(name, units):
    def run(offload):
        torch.manual_seed(1)
        model = MODELS[name]()
        memory = divide(model, UNITS[units]).smallest()[0]
        model = offload(model, units=UNITS[units], memory=memory)
        return found_by(model, ziggurat.torch.AdamW(model.parameters(), lr=1e-2))

    same_with_and_without(run)


def test_a_compiled_model_goes_the_other_way_as_without_it():
    def run(offload):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = offload(MODELS["encoder"]())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        return found_by(torch.compile(model, backend="eager"), optimizer)

    same_with_and_without(run)


def test_the_first_layer_is_away_again():
    torch.manual_seed(1)
    model = MODELS["encoder"]()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    found_by(ziggurat.torch.offload(model, memory=divide(model, "auto").smallest()[0]), optimizer)
    with pytest.raises(ziggurat.InvalidArgument, match="'inner.layers.0.linear1.weight' of unit 'inner.layers.0'"):
        model.inner.layers[0].linear1.weight.sum()


def test_a_layer_is_one_unit():
    wide = nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True)
    model = Padded(nn.TransformerEncoder(wide, 1), masked)
    assert [unit.name for unit in divide(model, "auto").units] == ["(root)", "inner.layers.0"]
    assert [unit.name for unit in divide(wide, "auto").units] == ["(root)"]
    assert [unit.name for unit in divide(model, UNITS["inner layers"]).units] == ["(root)"]


class Within(nn.Module):
    """A unit with an encoder inside."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return 2 * self.encoder(x)


def test_an_encoder_within_a_unit_stays_what_it_is():
    encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    model = nn.Sequential(Within(encoder), nn.Linear(WIDTH, 1))
    model[0].compile(fullgraph=True, backend="eager")
    ziggurat.torch.offload(model, memory="16MiB", units=["0"])
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(2, LENGTH, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(encoder) is nn.TransformerEncoder
    optimizer.close()
    torch.save(encoder, io.BytesIO())


def test_an_encoder_with_a_forward_of_its_own_needs_no_layers():
    class Blocks(nn.TransformerEncoder):
        def __init__(self):
            nn.Module.__init__(self)
            self.blocks = nn.ModuleList(layer() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = nn.Sequential(Blocks(), nn.Linear(WIDTH, 1))
    ziggurat.torch.offload(model, memory="16MiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, LENGTH, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.close()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
