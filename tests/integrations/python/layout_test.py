# SPDX-License-Identifier: Apache-2.0
"""Parameters that do not lie in the order of their indices: channels_last, transposed, cut out.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys
import weakref

try:
    import pytest
    import torch
    import torch.distributed as dist
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

import ziggurat
import ziggurat.torch
from ziggurat._exchange.parts import _copies, flat

SHAPE = (6, 5, 3, 4)


def plain(values):
    return values.clone(memory_format=torch.contiguous_format)


def channels_last(values):
    return values.clone(memory_format=torch.channels_last)


def transposed(values):
    return values.transpose(0, 3).contiguous().transpose(0, 3)


def cut_out(values):
    wide = torch.zeros(*values.shape[:3], 2 * values.shape[3], dtype=values.dtype)
    wide[..., ::2] = values
    return wide[..., ::2]


LAYOUTS = [channels_last, transposed, cut_out]
OPTIMIZERS = [ziggurat.torch.AdamW, ziggurat.torch.Lion, ziggurat.torch.SGD]


def values(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(SHAPE, dtype=dtype)


def trained(
    lies, gradient=plain, kind=ziggurat.torch.AdamW, dtype=torch.float32, clip=None, **settings
):
    """The parameter after four steps, and its optimizer."""
    param = torch.nn.Parameter(lies(values(1, dtype)))
    other = torch.nn.Parameter(torch.ones(7, dtype=dtype))
    optimizer = kind([param, other], lr=1e-2, **settings)
    for step in range(4):
        if clip is None:
            param.grad = gradient(values(10 + step, dtype))
            other.grad = torch.full((7,), 0.5, dtype=dtype)
        else:  # of what a script assigns, PyTorch takes the norm itself
            ((param * gradient(values(10 + step, dtype))).sum() + other.sum()).backward()
            torch.nn.utils.clip_grad_norm_([param, other], clip)
        optimizer.step()
        optimizer.zero_grad()
    return param, optimizer


def bits(param):
    return plain(param.detach()).view(torch.int32 if param.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("gradient", [plain, *LAYOUTS])
@pytest.mark.parametrize("lies", LAYOUTS)
def test_a_parameter_trains_to_the_same_bits_however_it_lies(lies, gradient, where, tmp_path):
    place = "host" if where == "host" else f"nvme:{tmp_path}/state"
    param, optimizer = trained(lies, gradient, placement=place)
    expected, beside = trained(plain)
    assert torch.equal(bits(param), bits(expected))
    assert param.stride() == lies(values(1)).stride()
    optimizer.close(), beside.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_format", ["fp32", "8bit"])
def test_so_it_does_in_every_type_and_format(kind, dtype, state_format):
    settings = {"kind": kind, "dtype": dtype, "state_format": state_format}
    if kind is ziggurat.torch.SGD and state_format == "8bit":
        settings["state_format"] = "bf16-moments"
    found, expected = (trained(lies, lies, **settings) for lies in (channels_last, plain))
    assert torch.equal(bits(found[0]), bits(expected[0]))


@pytest.mark.parametrize("lies", LAYOUTS)
def test_so_it_does_where_gradients_are_clipped(lies):
    found, expected = (trained(layout, layout, clip=0.1) for layout in (lies, plain))
    assert torch.equal(bits(found[0]), bits(expected[0]))


def test_it_trains_beside_torch_optim():
    param, _ = trained(channels_last, channels_last)
    reference = torch.nn.Parameter(channels_last(values(1)))
    optimizer = torch.optim.AdamW([reference], lr=1e-2)
    for step in range(4):
        reference.grad = channels_last(values(10 + step))
        optimizer.step()
    assert (param - reference).abs().max() < 1e-6


def conv(memory_format):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3))
    return model.to(memory_format=memory_format)


def run(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape).clone(
                memory_format=torch.channels_last if param.dim() == 4 else torch.contiguous_format
            )
        optimizer.step()
        optimizer.zero_grad()


FORMATS = [torch.channels_last, torch.contiguous_format]


@pytest.mark.parametrize("loads", FORMATS)
@pytest.mark.parametrize("saves", FORMATS)
def test_a_checkpoint_has_the_order_of_indices(saves, loads, tmp_path):
    model = conv(saves)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
    run(model, optimizer, 3)
    path = ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)
    moments = optimizer.state_dict()["state"][0]
    assert moments["exp_avg"].shape == model[0].weight.shape
    other = conv(loads)
    resumed = ziggurat.torch.AdamW(other.parameters(), lr=1e-2, model=other)
    ziggurat.torch.load_checkpoint(path, resumed, other)
    run(model, optimizer, 2, begin=3)
    run(other, resumed, 2, begin=3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(bits(a), bits(b))
    assert other[0].weight.is_contiguous(memory_format=loads)


@pytest.mark.parametrize("then", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_a_store_and_a_state_dict_go_on_in_another_layout(first, then, tmp_path):
    place = f"nvme:{tmp_path}/state"
    model = conv(first)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=place)
    run(model, optimizer, 3)
    saved, weights = optimizer.state_dict(), model.state_dict()
    optimizer.close()
    ends = []
    other = conv(then)
    optimizer = ziggurat.torch.AdamW(other.parameters(), lr=1e-2, placement=place)
    optimizer.open(resume=True)
    run(other, optimizer, 2, begin=3)
    optimizer.close()
    ends.append(other)
    other = conv(then)
    other.load_state_dict(weights)
    optimizer = ziggurat.torch.AdamW(other.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved)
    run(other, optimizer, 2, begin=3)
    ends.append(other)
    expected = conv(torch.contiguous_format)
    run(expected, ziggurat.torch.AdamW(expected.parameters(), lr=1e-2), 5)
    for end in ends:
        for a, b in zip(end.parameters(), expected.parameters(), strict=True):
            assert torch.equal(bits(a), bits(b))


def test_a_model_that_changes_its_layout_goes_on():
    model, expected = conv(torch.contiguous_format), conv(torch.contiguous_format)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    beside = ziggurat.torch.AdamW(expected.parameters(), lr=1e-2)
    for begin, layout in enumerate([*FORMATS, *FORMATS]):
        model.to(memory_format=layout)
        run(model, optimizer, 2, begin=2 * begin)
        run(expected, beside, 2, begin=2 * begin)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(bits(a), bits(b))


def test_memory_where_it_does_not_lie_any_more_is_let_go():
    param = torch.nn.Parameter(channels_last(values(1)))
    flat(param)
    copy = weakref.ref(_copies[param])
    param.data = plain(param.data)
    assert torch.equal(flat(param), values(1).reshape(-1))
    assert copy() is None


def test_what_a_script_writes_is_the_parameters():
    param, optimizer = trained(channels_last)
    with torch.no_grad():
        param.fill_(5)
    param.grad = torch.zeros(SHAPE)
    optimizer.step()
    assert (param - 5).abs().max() < 0.1


def assigned(change, kind=ziggurat.torch.AdamW, **settings):
    """Two parameters after four steps, before the third of which `change` assigns one's data; of the
    other a plain copy of the same values is written."""
    torch.manual_seed(1)
    begin = torch.randn(6, 6, 3, 3)
    params = [torch.nn.Parameter(channels_last(begin)), torch.nn.Parameter(plain(begin))]
    square = [torch.nn.Parameter(begin[:, :, 0, 0].clone()) for _ in range(2)]
    optimizers = [
        kind([*pair], lr=1e-2, **settings) for pair in zip(params, square, strict=True)
    ]
    for step in range(4):
        if step == 2:
            for param in (params[0], square[0]):
                param.data = change(param.data)
            with torch.no_grad():
                for param, made in ((params[1], params[0]), (square[1], square[0])):
                    param.copy_(made)
        gradient = values(10 + step)[:1, :1].expand(6, 6, 3, 4)[..., :3]
        for pair, optimizer in zip(zip(params, square, strict=True), optimizers, strict=True):
            for param in pair:
                param.grad = plain(gradient if param.dim() == 4 else gradient[..., 0, 0])
                param.grad += torch.arange(param.numel()).view(param.shape) / 100
            optimizer.step()
            optimizer.zero_grad()
    found = [plain(param.detach()) for param in (*params, *square)]
    for optimizer in optimizers:
        optimizer.close()
    return found


CHANGES = {
    "other values": lambda values: values + 1,
    "transposed in place": lambda values: values.transpose(0, 1),
    "transposed": lambda values: values.transpose(0, 1).contiguous(),
    "other values where it lay": lambda values: plain(values) * 2,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_assigns_as_data_is_the_parameters(change):
    """PyTorch counts no write of it."""
    ours, expected, square, written = assigned(CHANGES[change])
    assert torch.equal(ours, expected) and torch.equal(square, written)


@pytest.mark.parametrize("change", CHANGES)
def test_so_it_is_where_ranks_divide_it(change):
    def run(rank):
        return assigned(CHANGES[change], group=dist.group.WORLD)

    for ours, expected, square, written in on_ranks(2, run):
        assert torch.equal(ours, expected) and torch.equal(square, written)


def reshaped(rank=0, **settings):
    param = torch.nn.Parameter(torch.randn(16, 24, generator=torch.Generator().manual_seed(1)))
    optimizer = ziggurat.torch.AdamW([("w", param)], lr=1e-2, **settings)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        with pytest.raises(ziggurat.InvalidArgument) if optimizer.engine else nullcontext() as said:
            optimizer.step()
        param.grad = None
        param.data = param.data.t()
    return str(said.value)


def test_data_of_another_shape_is_refused_by_name():
    words = "parameter 'w' is fp32 of (24, 16) now, but was fp32 of (16, 24)"
    assert words in reshaped()
    for said in on_ranks(2, lambda rank: reshaped(group=dist.group.WORLD)):
        assert words in said


def among_ranks(way, memory_format):
    """What two ranks make of a model that lies so, and its checkpoint's moments."""
    model = conv(memory_format)
    where = {"model": model} if way == "ddp" else {"group": dist.group.WORLD}
    if way == "ddp":
        where["model"] = model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, **where)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        # Whole numbers, whose sums are the same in whatever order a convolution takes them.
        images = torch.randint(-2, 3, (2, 3, 8, 8)).float()
        model(images.to(memory_format=memory_format)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    params = [plain(param.detach()) for param in model.parameters()]
    optimizer.close()
    return params, state


@pytest.mark.parametrize("way", ["ddp", "group"])
def test_ranks_divide_it_in_the_order_of_indices(way, tmp_path):
    last = on_ranks(2, lambda rank: among_ranks(way, torch.channels_last))
    expected = on_ranks(2, lambda rank: among_ranks(way, torch.contiguous_format))
    for (params, state), (others, other) in zip(last, expected, strict=True):
        for a, b in zip(params, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        torch.testing.assert_close(state, other)
    for a, b in zip(last[0][0], last[1][0], strict=True):
        assert torch.equal(a, b)


def test_elements_that_are_one_in_memory_are_refused_by_name():
    param = torch.nn.Parameter(torch.zeros(1).expand(4))
    optimizer = ziggurat.torch.AdamW([("w", param)], lr=1e-2)
    param.grad = torch.ones(4)
    with pytest.raises(ziggurat.InvalidArgument, match="parameter 'w' is expanded"):
        optimizer.step()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
