# SPDX-License-Identifier: Apache-2.0
"""Public reports of this field, tried here: docs/field-reports.md tells of each by its number.

Those that have a test elsewhere are named there. Run by pytest; as a script it exits with 77 where
PyTorch or pytest is missing.
"""

import math
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch

KINDS = {"AdamW": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}


def beside(kind, params_of, steps=3, clip=None):
    """The parameters that ours and torch.optim's make of the same gradients."""
    ends = []
    for library in (ziggurat.torch, torch.optim):
        groups, params = params_of()
        optimizer = getattr(library, kind)(groups, lr=1e-2, **KINDS[kind])
        for step in range(steps):
            torch.manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape) if param.requires_grad else None
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([param.detach().clone() for param in params])
    return zip(*ends, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_1_a_group_that_ends_with_an_empty_tensor(kind):
    def params():
        torch.manual_seed(7)
        made = [torch.nn.Parameter(torch.randn(33)), torch.nn.Parameter(torch.empty(0, 10))]
        return made, made

    for ours, theirs in beside(kind, params, clip=1.0):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_2_groups_of_nothing_but_empty_or_frozen_tensors():
    def params():
        torch.manual_seed(7)
        made = [torch.nn.Parameter(torch.randn(9)), torch.nn.Parameter(torch.empty(0))]
        made.append(torch.nn.Parameter(torch.ones(5), requires_grad=False))
        return [{"params": [made[0]]}, {"params": [made[1]], "lr": 0.5}, {"params": [made[2]]}], made

    for ours, theirs in beside("AdamW", params):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_4_every_size_around_the_widths_of_registers(dtype):
    sizes = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1000, 1023]
    sizes += [1024, 1025, 2047, 2049, 4097, 5001]
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in sizes]
    exact = [torch.nn.Parameter(param.detach().float()) for param in params]
    ours = ziggurat.torch.AdamW(params, lr=1e-2)
    theirs = torch.optim.AdamW(exact, lr=1e-2)
    for step in range(3):
        for param, other in zip(params, exact, strict=True):
            torch.manual_seed(step)
            param.grad = torch.randn(param.shape).to(dtype)
            other.grad = param.grad.float()
        ours.step(), theirs.step()
    spacing = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param.float(), other, rtol=spacing, atol=spacing)


@pytest.mark.parametrize("when", [0, 1])
def test_6_weights_that_are_loaded_after_the_optimizer_was_made(when):
    layer = torch.nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = ziggurat.torch.AdamW(layer.parameters(), lr=1e-3)
    for step in range(3):
        if step == when:
            fives = {name: torch.full_like(value, 5) for name, value in layer.state_dict().items()}
            layer.load_state_dict(fives)
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all((param - 5).abs().max() < 0.1 for param in layer.parameters())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_11_clipping_scales_what_it_says(norm_type):
    ends = []
    for library in (ziggurat.torch, torch.optim):
        torch.manual_seed(2)
        layer = torch.nn.Linear(8, 8)
        optimizer = library.AdamW(layer.parameters(), lr=1e-2)
        layer(torch.randn(4, 8)).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1, norm_type)
        after = torch.nn.utils.clip_grad_norm_(layer.parameters(), math.inf, norm_type)
        optimizer.step()
        ends.append([norm, after, *(param.detach() for param in layer.parameters())])
        assert abs(float(after) - 0.1) < 1e-4
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def tied():
    torch.manual_seed(8)
    model = torch.nn.Sequential()
    model.emb = torch.nn.Embedding(11, 6)
    model.head = torch.nn.Linear(6, 11, bias=False)
    model.head.weight = model.emb.weight
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, model=model)
    return model, optimizer


def test_8_a_tied_embedding_is_saved_once_and_stays_tied(tmp_path):
    model, optimizer = tied()
    model.head(model.emb(torch.arange(11))).square().mean().backward()
    optimizer.step()
    optimizer.synchronize()
    path = ziggurat.torch.save_checkpoint(tmp_path, optimizer, model)
    manifest = (Path(path) / "manifest.json").read_text()
    assert '"emb.weight"' in manifest and "head" not in manifest
    loaded, again = tied()
    with torch.no_grad():
        loaded.emb.weight.zero_()
    ziggurat.torch.load_checkpoint(path, again, loaded)
    assert loaded.head.weight is loaded.emb.weight
    assert torch.equal(loaded.emb.weight, model.emb.weight)


@pytest.mark.parametrize("state_format", ["fp32", "bf16-moments", "split", "8bit", "bf16"])
def test_12_small_decays_of_16_bit_parameters_add_up(state_format):
    param = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = ziggurat.torch.AdamW(
        [param], lr=1e-3, weight_decay=0.1, state_format=state_format
    )
    for _ in range(400):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert abs(float(param.float().mean()) - 0.9999**400) < 2**-8


def test_12_a_decay_vanishes_in_bf16_where_state_is_rounded_to_nearest():
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = ziggurat.torch.AdamW(
        [param], lr=1e-3, weight_decay=0.1, state_format="bf16", state_rounding="nearest"
    )
    for _ in range(20):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(64, dtype=torch.bfloat16))


def test_14_four_micro_batches_a_step_are_one_batch():
    ends = []
    for library in (ziggurat.torch, torch.optim):
        torch.manual_seed(3)
        layer = torch.nn.Linear(6, 6)
        optimizer = library.AdamW(layer.parameters(), lr=1e-2)
        for _ in range(3):
            for _ in range(4):
                (layer(torch.randn(5, 6)).square().mean() / 4).backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([param.detach() for param in layer.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_sparse_gradient_that_is_empty_is_zeros():
    table = torch.nn.Embedding(4, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = ziggurat.torch.SGD(table.parameters(), lr=1.0)
    table.weight.grad = torch.zeros(4, 3).to_sparse(1)
    optimizer.step()
    assert torch.equal(table.weight.detach(), before)


def test_a_step_inside_what_is_compiled():
    layer = torch.nn.Linear(3, 3)
    optimizer = ziggurat.torch.AdamW(layer.parameters(), lr=1e-2)
    before = layer.weight.detach().clone()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        layer(torch.ones(2, 3)).sum().backward()
        compiled()
        optimizer.zero_grad()
    assert optimizer.engine.generation == 2
    assert not torch.equal(layer.weight.detach(), before)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
