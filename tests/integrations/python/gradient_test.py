# SPDX-License-Identifier: Apache-2.0
"""Lent gradients beside PyTorch's own: whatever is done to `param.grad` gives the same values.

In fp32 without a division, and with one factor at most, the bits are PyTorch's. Factors that are
recorded are multiplied with each other first: each rounds once more or less, 2^-24 of the value.
Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import copy
import gc
import math
import pickle
import sys
import weakref

try:
    import pytest
    import torch
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
from torch.utils.checkpoint import checkpoint
from ziggurat._gradients.gradient import GradientHooks, LentGradient

torch.set_num_threads(1)  # the tensors are small: a second thread only waits
BITS = {"rtol": 0, "atol": 0, "equal_nan": True}


class Small(torch.nn.Module):
    """An embedding that is the output layer as well, blocks to recompute, and one frozen bias."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(17, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 17)
        self.out.weight = self.embed.weight
        self.out.bias.requires_grad_(False)
        self.reentrant = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):  # one is used twice
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = checkpoint(lambda y, b=block: torch.tanh(b(y)), x, use_reentrant=self.reentrant)
        return self.out(self.norm(x))


def loss_of(model: torch.nn.Module, seed: int = 0, rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(17, (rows, 4), generator=generator)
    return torch.nn.functional.cross_entropy(model(tokens)[:, 0].float(), tokens[:, 1])


def pair(dtype: torch.dtype = torch.float32, **made) -> tuple:
    """A model with lent gradients, one without, and the hooks."""
    ours, theirs = Small(**made).to(dtype), Small(**made).to(dtype)
    hooks = GradientHooks()
    hooks.attach(ours.named_parameters())
    return ours, theirs, hooks


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def agree(ours: torch.nn.Module, theirs: torch.nn.Module, **tolerance) -> None:
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        assert isinstance(a.grad, LentGradient)
        torch.testing.assert_close(a.grad.clone(), b.grad, **(tolerance or BITS))


def consumed_values(hooks: GradientHooks, param: torch.Tensor) -> torch.Tensor:
    tensor, scale = hooks.take(param)
    return (torch.zeros_like(param) if tensor is None else tensor * scale).to(param.dtype)


def backward(*models: torch.nn.Module, seeds=(0,), **how) -> None:
    for model in models:
        for seed in seeds:
            loss_of(model, seed).backward(**how)


class Lender(torch.optim.Optimizer):
    """Gradient descent that takes its gradients from the hooks."""

    def __init__(self, named, lr, keep=True):
        named = list(named)
        super().__init__([p for _, p in named], {"lr": lr})
        self.hooks, self.keep = GradientHooks(), keep
        self.hooks.attach(named)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                taken = self.hooks.take(param)
                if taken is not None:
                    if taken.tensor is not None:
                        param.add_(taken.tensor, alpha=-group["lr"] * taken.scale)
                    self.hooks.consumed(param, keep=self.keep)


def test_the_engines_library_is_not_needed():
    assert ziggurat._library.native.library.cache_info().currsize == 0


def test_backwards_tensor_is_lent_and_clipping_does_not_touch_it():
    model, hooks, seen = Small(), GradientHooks(), {}
    for p in trained(model):  # called before the hooks that come later
        p.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad.data_ptr()}))
    hooks.attach(model.named_parameters())
    backward(model)
    before = {p: p.grad.clone() for p in trained(model)}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for p in trained(model):
        tensor, scale = hooks.take(p)
        assert tensor.data_ptr() == seen[p]
        assert torch.equal(tensor, before[p])
        assert 0 < scale < 0.1


READ = {
    "norm": lambda g: g.norm(),
    "norm of a dimension": lambda g: torch.linalg.vector_norm(g, 3, dim=0),
    "norm in fp64": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "count": lambda g: torch.linalg.vector_norm(g, 0),
    "smallest": lambda g: torch.linalg.vector_norm(g, -math.inf),
    "max": lambda g: g.abs().max(),
    "isnan": lambda g: torch.isnan(g).any(),
    "sum": lambda g: float(g.sum()),
    "data": lambda g: g.data + 0,
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to(torch.float64),
    "to itself": lambda g: g.to(g.dtype).cpu().contiguous() * 2,
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "row": lambda g: g[0] * 1,
    "flat": lambda g: torch.cat([g.view(-1), g.flatten()]),
    "views of views": lambda g: torch.stack(g.t()[1:].split(2)[0][0].unbind()),
    "tolist": lambda g: torch.tensor(g.tolist(), dtype=g.dtype),
    "item": lambda g: g[0, 0].item(),
    "numpy": lambda g: torch.from_numpy(g.float().numpy().copy()),
    "both sides": lambda g: g + g * g,
    "added to": lambda g: torch.zeros_like(g).add_(g, alpha=2),
    "copied": lambda g: torch.empty(g.shape).copy_(g),
    "format": lambda g: float(f"{g.abs().max():.6f}"),
    "print": lambda g: float("tensor([[" in str(g) or float("nan")),
}


@pytest.mark.parametrize("state", ["lent", "scaled", "sum", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", READ)
def test_reading_gives_the_values_and_changes_nothing(read, dtype, state):
    ours, _, hooks = pair(dtype)
    backward(ours, seeds=(0, 1) if state == "sum" else (0,))
    param = ours.blocks[0].weight
    if state == "scaled":
        param.grad.mul_(0.3)
    if state == "zero":
        ours.zero_grad(set_to_none=False)
    tensor, scale = hooks.take(param)
    plain = torch.zeros_like(param) if tensor is None else (tensor * scale).to(dtype)
    plain = plain.detach()
    result, expected = READ[read](param.grad), READ[read](plain)
    assert not isinstance(result, LentGradient)
    # A norm is scaled after it is computed, the values before.
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 0}
    norms = "norm" in read and state in ("scaled", "sum")
    torch.testing.assert_close(result, expected, **(near if norms else BITS))
    again = hooks.take(param)
    assert again.tensor is tensor and again.scale == scale


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_by_norm(foreach, order, seeds, max_norm):
    ours, theirs, hooks = pair()
    backward(ours, theirs, seeds=seeds)
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm, order, foreach=foreach)
        for m in (ours, theirs)
    ]
    assert torch.equal(*norms)
    agree(ours, theirs)
    # Again, now of gradients that have a scale: as it is with an accumulation after clipping.
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, order) for m in (ours, theirs)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    backward(ours, theirs, seeds=(3,))
    agree(ours, theirs, rtol=1e-6, atol=1e-8)
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(consumed_values(hooks, a), b.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clipping_of_16_bits(foreach, dtype):
    ours, theirs, _ = pair(dtype)
    backward(ours, theirs)
    for m in (ours, theirs):
        for p in trained(m):
            p.grad.mul_(2.0**-3)
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, foreach=foreach)
        for m in (ours, theirs)
    ]
    assert norms[0].dtype == norms[1].dtype == dtype
    torch.testing.assert_close(*norms, rtol=2**-7, atol=0)
    agree(ours, theirs, rtol=2**-7, atol=1e-7)


def test_a_norm_that_fits_16_bits_only_after_the_scale():
    param, hooks = torch.nn.Parameter(torch.zeros(100, dtype=torch.float16)), GradientHooks()
    hooks.attach([("p", param)])
    param.backward(torch.full((100,), 3e4, dtype=torch.float16))
    param.grad.div_(1024)
    assert param.grad.norm().item() == pytest.approx(3e5 / 1024, rel=1e-2)


def test_clipping_names_what_is_not_finite():
    ours, _, _ = pair()
    backward(ours)
    ours.norm.bias.grad[0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="a newer PyTorch has it")
def test_clipping_in_two_calls():
    ours, theirs, _ = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained(m)])
        torch.nn.utils.clip_grads_with_norm_(m.parameters(), 0.1, norm)
    agree(ours, theirs)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_clipping_by_value(foreach, seeds):
    ours, theirs, hooks = pair()
    backward(ours, theirs, seeds=seeds)
    for m in (ours, theirs):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(m.parameters(), 0.003, foreach=foreach)
    agree(ours, theirs)
    assert max(consumed_values(hooks, p).abs().max() for p in trained(ours)) == torch.tensor(0.003)


SCALE = {
    "div_": lambda g: g.div_(4),
    "div_ in place": lambda g: g.__itruediv__(8.0),
    "mul_": lambda g: g.mul_(0.1),
    "mul_ tensor": lambda g: g.mul_(torch.tensor(0.7, dtype=torch.float64)),
    "imul": lambda g: g.__imul__(3),
    "data": lambda g: g.data.mul_(0.1),
    "detach": lambda g: g.detach().mul_(0.1),
    "foreach number": lambda g: torch._foreach_mul_([g], 0.1),
    "foreach numbers": lambda g: torch._foreach_mul_([g], [0.1]),
    "foreach tensors": lambda g: torch._foreach_mul_([g], [torch.tensor(0.1)]),
    "foreach div": lambda g: torch._foreach_div_([g], 2.0),
}


@pytest.mark.parametrize("scale", SCALE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_is_recorded(scale, dtype):
    ours, theirs, hooks = pair(dtype)
    backward(ours, theirs)
    for m in (ours, theirs):
        for p in trained(m):
            SCALE[scale](p.grad)
    assert all(hooks.take(p).scale != 1 for p in trained(ours))
    # On a CPU, a number that multiplies a list is rounded to 16 bits first.
    rounded = dtype == torch.bfloat16 and "foreach number" in scale
    agree(ours, theirs, rtol=2**-7 if rounded else 0, atol=0)


def test_factors_multiply_and_a_quotient_is_near():
    ours, theirs, _ = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        for p in trained(m):
            p.grad.div_(3).mul_(0.7)
    agree(ours, theirs, rtol=4e-7, atol=0)


def test_a_factor_that_changes_later_does_not():
    ours, theirs, _ = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        factor = torch.tensor(0.5)
        for p in trained(m):
            p.grad.mul_(factor)
        factor.fill_(7)
    agree(ours, theirs)


WRITE = {
    "clamp_": lambda g: g.clamp_(-0.01, 0.01),
    "sign_": lambda g: g.sign_(),
    "sub_": lambda g: g.sub_(g.mean(dim=1, keepdim=True)),
    "mask": lambda g: g.mul_(torch.ones_like(g).tril()),
    "by itself": lambda g: g.mul_(g),
    "row": lambda g: g.__setitem__(0, 0.0),
    "mask of rows": lambda g: g.__setitem__(g > 0, 0.0),
    "column": lambda g: g[:, 1].mul_(3),
    "part of a part": lambda g: g.t()[2:].split(3)[1].zero_(),
    "data of a row": lambda g: g.data[1].fill_(1.5),
    "flat": lambda g: g.view(-1).add_(1.0),
    "masked_fill_": lambda g: g.masked_fill_(g < 0, 0.0),
    "nan_to_num_": lambda g: g.nan_to_num_(0.0),
    "copy_": lambda g: g.copy_(torch.arange(64.0).view(8, 8)),
    "number": lambda g: g.add_(0.25),
    "noise": lambda g: g.add_(torch.arange(64.0).view(8, 8), alpha=0.5),
    "one for all": lambda g: g.add_(torch.arange(8.0)),
    "foreach": lambda g: torch._foreach_clamp_max_([g], 0.001),
    "addcmul_": lambda g: g.addcmul_(g, torch.ones_like(g)),
    "out": lambda g: torch.mul(g, 2, out=g),
}


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@pytest.mark.parametrize("write", WRITE)
def test_what_writes_is_kept(write, seeds):
    ours, theirs, hooks = pair()
    backward(ours, theirs, seeds=seeds)
    for m in (ours, theirs):
        grad = m.blocks[0].weight.grad
        grad.mul_(0.3)
        WRITE[write](grad)
    agree(ours, theirs)
    expected = theirs.blocks[0].weight.grad
    torch.testing.assert_close(consumed_values(hooks, ours.blocks[0].weight), expected, **BITS)
    backward(ours, theirs)
    agree(ours, theirs)


def test_an_operation_that_does_not_tell_what_it_writes():
    library = torch.library.Library("ziggurat_gradient_test", "DEF")
    library.define("double(Tensor[] x) -> Tensor")
    library.impl("double", lambda x: x[0].mul_(2).clone(), "CPU")
    ours, theirs, _ = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        for p in trained(m):
            p.grad.mul_(0.3)
            torch.ops.ziggurat_gradient_test.double([p.grad])
    agree(ours, theirs)


def test_what_cannot_be_kept_raises_and_names_the_parameter():
    ours, theirs, _ = pair()
    backward(ours, theirs)
    grad = ours.blocks[0].weight.grad
    for bad in (grad.t_, lambda: grad.resize_(3), lambda: grad.set_(torch.ones(2))):
        with pytest.raises(ziggurat.Unimplemented, match=r"_.* of parameter 'blocks.0.weight'"):
            bad()
    for bad in (grad.data_ptr, grad.untyped_storage, lambda: torch.from_dlpack(grad)):
        with pytest.raises(ziggurat.Unimplemented, match="'blocks.0.weight' has no storage"):
            bad()
    with pytest.raises(ValueError, match="read-only"):
        grad.numpy()[0] = 1
    agree(ours, theirs)
    with (
        pytest.warns(UserWarning, match="resized"),
        pytest.raises(ziggurat.InvalidArgument, match="'blocks.0.weight'"),
    ):
        torch.add(torch.ones(3), 1, out=grad)
    assert grad.clone().shape == (8, 8)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler(bad, clip):
    ours, theirs = Small(), Small()
    optimizers = [
        Lender(ours.named_parameters(), 0.1),
        torch.optim.SGD(theirs.parameters(), 0.1),
    ]
    scales = []
    for m, optimizer in zip((ours, theirs), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(4):
            scaler.scale(loss_of(m, step)).backward()
            if bad is not None and step == 2:
                m.norm.weight.grad[3] = bad
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            before = m.norm.weight.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(before, m.norm.weight) == (bad is not None and step == 2)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales[:4] == scales[4:]
    # A power of two and the rate are exact factors; the clip's is rounded once more.
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if clip else 0, atol=1e-8 if clip else 0)


def test_unscaling_sees_a_plain_gradient_too():
    for bad in (None, "plain", "lent"):
        ours, theirs, hooks = pair()
        backward(ours, theirs)
        optimizers = []
        for m in (ours, theirs):
            m.norm.bias.grad = torch.full((8,), 3.0)
            if bad is not None:
                (m.norm.bias if bad == "plain" else m.norm.weight).grad[1] = math.nan
            optimizers.append(torch.optim.SGD(m.parameters(), 0.1))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizers[-1])
            found = scaler._found_inf_per_device(optimizers[-1])
            assert [f.item() for f in found.values()] == [float(bad is not None)]
        for a, b in zip(trained(ours), trained(theirs), strict=True):
            torch.testing.assert_close(a.grad.clone(), b.grad, **BITS)


def test_accumulation_has_pytorchs_bits_in_fp32():
    ours, theirs, hooks = pair()
    backward(ours, theirs, seeds=range(4))
    agree(ours, theirs)
    assert all(torch.equal(hooks.take(a).tensor, a.grad.clone()) for a in trained(ours))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulation_of_16_bits_is_in_fp32_and_reuses_its_memory(dtype):
    ours, theirs, hooks = pair(dtype)
    addresses = []
    for _ in range(3):
        backward(ours, theirs, seeds=range(4))
        agree(ours, theirs, rtol=2**-5, atol=2**-7)
        ones = [
            torch.autograd.grad(loss_of(theirs, seed), trained(theirs)) for seed in range(4)
        ]
        for param, parts in zip(trained(ours), zip(*ones, strict=True), strict=True):
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            assert torch.equal(hooks.take(param).tensor, expected)
        addresses.append([hooks.take(p).tensor.data_ptr() for p in trained(ours)])
        for param in trained(ours):
            hooks.consumed(param)
        del param
        ours.zero_grad()
        theirs.zero_grad()
    assert addresses[0] == addresses[1] == addresses[2]


def test_memory_that_a_step_still_reads_is_not_reused():
    ours, _, hooks = pair(torch.bfloat16)
    backward(ours, seeds=(0, 1))
    taken = [hooks.take(p).tensor for p in trained(ours)]
    values = [t.clone() for t in taken]
    ours.zero_grad()  # the step has not said that it is done
    backward(ours, seeds=(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(taken, values, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    ours, theirs, _ = pair(recompute=reentrant)
    backward(ours, theirs, seeds=(0, 1))
    agree(ours, theirs)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [(True,), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("scaled", [False, True])
def test_create_graph(graph, scaled):
    ours, theirs, hooks = pair()
    for m in (ours, theirs):
        for seed, create in enumerate(graph):
            with torch.no_grad():
                for p in trained(m) if scaled and seed else []:
                    p.grad.mul_(0.5)
            loss_of(m, seed).backward(create_graph=create)
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(consumed_values(hooks, a), b.grad.detach(), **BITS)
        assert a.grad.requires_grad == b.grad.requires_grad
    if graph[-1]:
        penalties = []
        for m in (ours, theirs):
            penalty = sum(p.grad.square().sum() for p in trained(m))
            penalties.append(torch.autograd.grad(penalty, trained(m)))
        for a, b in zip(*penalties, strict=True):
            torch.testing.assert_close(a, b, **BITS)
    for p in (*trained(ours), *trained(theirs)):
        p.grad = None  # gradient and parameter refer to each other


@pytest.mark.parametrize("by", ["model", "optimizer", "foreach"])
def test_zero_grad(by):
    ours, theirs, hooks = pair()
    for m in (ours, theirs):
        optimizer = torch.optim.SGD(m.parameters(), 0.1, foreach=by == "foreach")
        zero_grad = m.zero_grad if by == "model" else optimizer.zero_grad
        backward(m, seeds=(0, 1))
        zero_grad(set_to_none=True)
        assert all(p.grad is None for p in m.parameters())
        assert m is theirs or all(hooks.take(p) is None for p in m.parameters())
        backward(m, seeds=(2,))
        zero_grad(set_to_none=False)
    agree(ours, theirs)
    assert all(p.grad.is_zero and hooks.take(p) == (None, 1.0) for p in trained(ours))
    for m in (ours, theirs):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    agree(ours, theirs)
    backward(ours, theirs, seeds=(3, 4))
    agree(ours, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_detaching_and_zeroing_in_the_old_way(mode):
    ours, theirs, hooks = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        for p in trained(m):
            with mode():
                p.grad.detach_()
                p.grad.zero_()
                p.grad.mul_(math.inf)
    agree(ours, theirs)
    assert consumed_values(hooks, ours.norm.bias).isnan().all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="it looks for the storage of gradients"
)
def test_compiled():
    ours, theirs, hooks = pair()
    for m in (ours, theirs):
        compiled = torch.compile(m, backend="aot_eager")
        for rows in (5, 3, 5):  # the second is compiled beside gradients
            loss_of(compiled, rows=rows).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    agree(ours, theirs)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
def test_training_is_sgds(keep, backwards):
    ours, theirs = Small(), Small()
    optimizers = [
        Lender(ours.named_parameters(), 0.1, keep=keep),
        torch.optim.SGD(theirs.parameters(), 0.1),
    ]
    for step in range(3):
        for m, optimizer in zip((ours, theirs), optimizers, strict=True):
            backward(m, seeds=range(10 * step, 10 * step + backwards))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(ours.norm.weight, Small().norm.weight)


def test_pytorchs_optimizers_take_lent_gradients():
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for foreach in (True, False):
            ours, theirs, _ = pair()
            for m in (ours, theirs):
                optimizer = kind(m.parameters(), lr=0.1, foreach=foreach)
                for seed in range(3):
                    backward(m, seeds=(seed, seed + 1))
                    optimizer.step()
                    optimizer.zero_grad()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(a, b)


def test_a_consumed_gradient_that_is_kept_accumulates_as_pytorchs():
    ours, theirs, hooks = pair()
    backward(ours, theirs)
    for p in trained(ours):
        hooks.take(p)
        hooks.consumed(p, keep=True)
    agree(ours, theirs)
    backward(ours, theirs, seeds=(1,))
    agree(ours, theirs)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_consumed_gradient_is_not_read_and_backward_starts_anew(create_graph):
    ours, theirs, hooks = pair()
    backward(ours, seeds=(0, 1))
    ours.norm.bias.grad = torch.ones(8)
    assert all(hooks.take(p) is not None for p in trained(ours))
    for p in trained(ours):
        hooks.consumed(p, keep=False)
    grad = ours.norm.bias.grad
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(ours.parameters())
    scaler.scale(torch.ones(()))
    for bad in (
        grad.norm,
        lambda: grad.mul_(2),
        lambda: grad.add_(1),
        lambda: grad.add_(torch.ones(8)),
        lambda: grad.clamp_(0, 1),
        lambda: grad + 1,
        lambda: grad[0] + 1,
        lambda: torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
    ):
        with pytest.raises(RuntimeError, match="consumed this gradient of parameter '"):
            bad()
    assert "consumed" in repr(grad)
    assert all(hooks.take(p) is None for p in trained(ours))
    backward(ours, theirs, seeds=(2,), create_graph=create_graph)
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(consumed_values(hooks, a), b.grad.detach(), **BITS)
    for p in trained(ours):
        hooks.consumed(p, keep=False)
    ours.zero_grad(set_to_none=False)
    assert all(p.grad.is_zero for p in trained(ours))
    for p in (*trained(ours), *trained(theirs)):
        p.grad = None


@pytest.mark.parametrize("written", [False, True])
def test_a_gradient_that_came_after_is_not_consumed(written):
    ours, theirs, hooks = pair()
    backward(ours)
    for p in trained(ours):
        hooks.take(p)
        p.grad = torch.ones_like(p) if written else None
    if written:
        for p in trained(theirs):
            p.grad = torch.ones_like(p)
    else:
        backward(ours, theirs, seeds=(1,))
    for p in trained(ours):
        hooks.consumed(p, keep=False)
    backward(ours, theirs, seeds=(2,))
    agree(ours, theirs)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_that_the_user_wrote():
    ours, theirs, hooks = pair()
    for m in (ours, theirs):
        m.blocks[0].weight.grad = torch.arange(64.0).view(8, 8).t()
        m.norm.bias.grad = torch.full((8,), 0.5)
    tensor, scale = hooks.take(ours.blocks[0].weight)
    assert tensor.is_contiguous() and scale == 1
    assert torch.equal(tensor, theirs.blocks[0].weight.grad)
    backward(ours, theirs)
    agree(ours, theirs)
    ours.norm.bias.grad = ours.norm.bias.grad * 2
    assert torch.equal(hooks.take(ours.norm.bias).tensor, theirs.norm.bias.grad * 2)
    ours.norm.bias.grad = ours.blocks[0].weight.grad[1]
    assert torch.equal(hooks.take(ours.norm.bias).tensor, theirs.blocks[0].weight.grad[1])
    hooks.consumed(ours.norm.bias, keep=False)
    assert torch.equal(ours.blocks[0].weight.grad.clone(), theirs.blocks[0].weight.grad)
    with pytest.raises(ziggurat.InvalidArgument, match="not attached"):
        hooks.take(torch.nn.Parameter(torch.ones(3)))


def test_a_gradient_that_is_not_contiguous_is_made_so_once():
    convolution = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    hooks = GradientHooks()
    hooks.attach(convolution.named_parameters())
    torch.manual_seed(2)
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    (expected,) = torch.autograd.grad(convolution(x).square().sum(), [convolution.weight])
    assert not expected.is_contiguous()
    convolution(x).square().sum().backward()
    grad = convolution.weight.grad
    assert torch.equal(grad.flatten(1), expected.flatten(1))
    first, again = hooks.take(convolution.weight), hooks.take(convolution.weight)
    assert first.tensor.is_contiguous() and first.tensor is again.tensor
    assert torch.equal(first.tensor, expected)


def test_sparse_gradients_are_refused_by_name():
    embedding, hooks = torch.nn.Embedding(5, 3, sparse=True), GradientHooks()
    hooks.attach([("tokens", embedding.weight)])
    with pytest.raises(ziggurat.Unimplemented, match="'tokens' has a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ziggurat.Unimplemented, match="'tokens' has a sparse gradient"):
        hooks.take(embedding.weight)


def test_arrivals_are_told_by_index():
    model, arrived = Small(), []
    hooks = GradientHooks(arrived.append)
    hooks.attach(model.named_parameters())
    hooks.attach(model.named_parameters())
    indices = {p: i for i, p in enumerate(model.parameters())}
    backward(model)
    assert sorted(arrived) == [indices[p] for p in trained(model)]
    arrived.clear()
    model.out.bias.requires_grad_(True)
    hooks.attach(model.named_parameters())
    backward(model)
    assert sorted(arrived) == list(range(len(indices)))
    hooks.detach()
    backward(model)
    assert len(arrived) == len(indices)
    model.zero_grad()
    backward(model)
    assert not any(isinstance(p.grad, LentGradient) for p in model.parameters())
    hooks.attach(model.named_parameters())
    backward(model)
    assert len(arrived) == 2 * len(indices)


def test_nothing_is_kept_alive():
    model = Small()
    hooks = GradientHooks()
    hooks.attach(model.named_parameters())
    backward(model, seeds=(0, 1))
    gone = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert all(p() is None for p in gone)
    model = Small()
    hooks.attach(model.named_parameters())
    del hooks
    gc.collect()
    backward(model)
    assert all(type(p.grad) is torch.Tensor for p in trained(model))


def test_a_model_changes_its_type_with_gradients():
    ours, theirs, hooks = pair()
    backward(ours, theirs)
    for m in (ours, theirs):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        m.double()
    for a, b in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(consumed_values(hooks, a), b.grad, **BITS)


def test_a_parameter_without_dimensions_or_elements():
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0,), (1,))]
    hooks = GradientHooks()
    hooks.attach([(str(i), p) for i, p in enumerate(params)])
    sum(p.square().sum() for p in params).backward()
    assert f"{params[0].grad:.2f}" == "2.00"
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(params)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    params[2].grad.mul_(params[0].grad)
    scale = scaler.get_scale()
    assert [g.item() for g in (params[0].grad, params[2].grad)] == [2 / scale, 4 / scale**2]


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
