# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.chunked_cross_entropy(): loss and gradients of PyTorch's cross_entropy, and the memory that it takes.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import re
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from torch.nn.functional import cross_entropy, linear
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from ziggurat import InvalidArgument, Unimplemented
from ziggurat._memory import memory
from ziggurat.torch import chunked_cross_entropy

VOCABULARY, WIDTH = 83, 24
MIB = 1 << 20

# By how much of their norm: in fp32 sums have another order; in 16 bits the gradients of the logits, the
# products and the result are rounded once each, in PyTorch as here.
GRADIENTS_DIFFER = {torch.float32: 1e-6, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}


def given(dtype=torch.float32, tokens=(3, 7)):
    """Returns hidden, weight, bias and labels, of which some are ignored."""
    torch.manual_seed(1)
    hidden = torch.randn(*tokens, WIDTH).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCABULARY, WIDTH)).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, tokens)
    labels[0, 2:5] = -100
    return hidden, weight, bias, labels


def whole(hidden, weight, labels, bias=None, logit_scale=1.0, softcap=None, **settings):
    """The loss of whole logits, whose type becomes fp32 before softmax, as in transformers."""
    logits = logit_scale * linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), **settings)


def difference(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("changes", [{}, {"logit_scale": 0.5}, {"logit_scale": 2.0, "softcap": 5.0}])
@pytest.mark.parametrize("dtype", GRADIENTS_DIFFER)
def test_loss_and_gradients_are_those_of_the_whole(dtype, changes, chunk):
    hidden, weight, bias, labels = given(dtype)
    expected = whole(hidden, weight, labels, bias, **changes)
    gradients = torch.autograd.grad(expected, (hidden, weight, bias))
    loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk, **changes)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight, bias)), gradients, strict=True):
        assert ours.dtype == dtype
        assert difference(ours, theirs) < GRADIENTS_DIFFER[dtype]


def test_gradients_are_derivatives():
    hidden, weight, bias, labels = given(torch.float64)

    def loss(hidden, weight, bias):
        settings = {"bias": bias, "chunk": 5, "logit_scale": 0.7, "softcap": 3.0}
        return chunked_cross_entropy(hidden, weight, labels, **settings)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_a_large_vocabulary_with_large_logits():
    """fp32 sums of many words, and logits whose exponentials would overflow."""
    torch.manual_seed(1)
    hidden, weight = 30 * torch.randn(40, 16), torch.randn(50257, 16)
    labels = torch.randint(len(weight), (40,))
    expected = whole(hidden.double(), weight.double(), labels)
    assert chunked_cross_entropy(hidden, weight, labels, chunk=7).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)])
def test_what_the_sum_is_divided_by(num_items):
    hidden, weight, _, labels = given()
    total = whole(hidden, weight, labels, reduction="sum")
    total_gradient = torch.autograd.grad(total, weight)[0]
    for settings, divisor in (
        ({"reduction": "sum"}, 1),
        ({"num_items_in_batch": num_items}, 7),
        ({}, int((labels != -100).sum())),
    ):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=4, **settings)
        assert loss.item() == pytest.approx(total.item() / divisor, rel=1e-6)
        # What the loss is multiplied by afterwards, as for accumulation
        gradient = torch.autograd.grad(loss / 4, weight)[0]
        torch.testing.assert_close(gradient, total_gradient / divisor / 4, rtol=1e-5, atol=1e-8)


def test_labels_that_are_ignored():
    hidden, weight, _, labels = given()
    other = labels.where(labels != -100, 3)
    assert torch.equal(
        chunked_cross_entropy(hidden, weight, labels), chunked_cross_entropy(hidden, weight, other, ignore_index=3)
    ) == bool((labels != 3).all())
    nothing = torch.full_like(labels, -100)
    loss = chunked_cross_entropy(hidden, weight, nothing)
    assert loss.isnan() and cross_entropy(torch.randn(21, VOCABULARY), nothing.flatten()).isnan()
    loss.backward()
    assert not hidden.grad.any() and not weight.grad.any()
    assert chunked_cross_entropy(hidden, weight, nothing, num_items_in_batch=5) == 0


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted_are_made(wanted):
    hidden, weight, _, labels = given()
    expected = torch.autograd.grad(whole(hidden, weight, labels), (hidden, weight))
    hidden.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    with Products() as products:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=len(labels.flatten()))
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            loss.backward()
    assert products.count == 1 + sum(wanted)
    for one, gradient, wants in zip((hidden, weight), expected, wanted, strict=True):
        assert (one.grad is not None) == wants
        assert not wants or difference(one.grad, gradient) < 1e-6
    with torch.no_grad(), Products() as products:
        assert torch.equal(chunked_cross_entropy(hidden, weight, labels, chunk=21), loss)
    assert products.count == 1


@pytest.mark.parametrize("hidden_type", [torch.bfloat16, torch.float32])
def test_under_autocast(hidden_type):
    _, weight, bias, labels = given()
    hidden = given()[0].detach().to(hidden_type).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(hidden, weight, labels, bias)
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    params = (hidden, weight, bias)
    gradients = zip(torch.autograd.grad(loss, params), torch.autograd.grad(expected, params), strict=True)
    for one, (ours, theirs) in zip(params, gradients, strict=True):
        assert ours.dtype == theirs.dtype == one.dtype
        assert difference(ours, theirs) < GRADIENTS_DIFFER[torch.bfloat16]
    if hidden_type != weight.dtype:
        with pytest.raises(InvalidArgument, match=r"hidden is torch.bfloat16 and weight torch.float32.*autocast"):
            chunked_cross_entropy(hidden, weight, labels)


def test_the_factor_of_a_scaler_comes_before_fp16_rounds_to_nothing():
    """Gradients of a mean over many tokens are less than fp16 has; those of the scaled loss are not."""
    hidden, weight, _, labels = given(torch.float16, (8, 4096))
    (65536 * chunked_cross_entropy(hidden, weight, labels)).backward()
    wide = hidden.detach().float().requires_grad_()
    (65536 * whole(wide, weight.float(), labels)).backward()
    assert difference(hidden.grad, wide.grad) < GRADIENTS_DIFFER[torch.float16]


def test_the_gradient_of_the_weight_is_summed_in_fp32():
    """A sum in bf16 of so many chunks would lose most of them."""
    hidden, weight, _, labels = given(torch.bfloat16, (4, 512))
    chunked_cross_entropy(hidden, weight, labels, chunk=2).backward()
    wide = weight.detach().double().requires_grad_()
    whole(hidden.double(), wide, labels).backward()
    assert difference(weight.grad, wide.grad) < GRADIENTS_DIFFER[torch.bfloat16]


def test_one_weight_in_several_losses():
    """As of a tied embedding, and of heads for several tokens."""
    _, weight, _, labels = given()
    losses = []
    for loss_of in (whole, chunked_cross_entropy):
        weight.grad = None
        hidden = weight[labels.clamp(min=0)]
        loss = loss_of(hidden, weight, labels) + loss_of(hidden.sin(), weight, labels.roll(1))
        loss.backward()
        losses.append((loss.item(), weight.grad))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6)
    assert difference(losses[1][1], losses[0][1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_has_the_gradients_of_the_first(dtype):
    hidden, weight, bias, labels = given(dtype)
    loss = 3 * chunked_cross_entropy(hidden, weight, labels, bias=bias)
    params = (hidden, weight, bias)
    first = torch.autograd.grad(loss, params, retain_graph=True)
    kept = [one.clone() for one in first]
    second = torch.autograd.grad(loss, params)
    assert all(map(torch.equal, kept, second)) and all(map(torch.equal, kept, first))
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, params)
    with pytest.raises(Unimplemented, match="create_graph"):
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(3, 7, WIDTH + 1)}, "do not fit"),
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, r"labels \(3, 6\) do not fit"),
        ({"labels": torch.full((3, 7), VOCABULARY)}, f"labels from {VOCABULARY}.*0 to {VOCABULARY - 1}"),
        ({"labels": torch.full((3, 7), -1)}, "labels from -1"),
        ({"labels": torch.zeros(3, 7)}, "labels are torch.float32"),
        ({"bias": torch.zeros(5)}, r"bias \(5,\)"),
        ({"bias": torch.zeros(VOCABULARY).half()}, "bias torch.float16"),
        ({"chunk": 0}, "chunk=0"),
        ({"reduction": "none"}, 'reduction="none"'),
        ({"reduction": "sum", "num_items_in_batch": 3}, "num_items_in_batch"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"hidden": torch.zeros(3, 7, WIDTH, dtype=torch.long)}, "floating point"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    hidden, weight, _, labels = given()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(InvalidArgument, match=words):
        chunked_cross_entropy(**arguments)


LARGE, TOKENS, CHUNK, NARROW = 32768, 2048, 128, 32  # whole logits: 256 MiB in fp32
SLACK_BYTES = 16 * MIB  # what is used once, and what lies between


def of_process(name):
    """Returns a size that the kernel knows of this process."""
    return int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) << 10


def measure(folder, dtype, chunked, tokens=TOKENS, width=NARROW):
    """Writes the most memory that a loss and its backward take."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for words in (64, LARGE, LARGE):  # at first what PyTorch loads once, and its pages
        # Logits that differ little: where exponentials nearly vanish, some processors take 40 times as long.
        hidden = (torch.randn(tokens, width) / width**0.5).to(dtype).requires_grad_()
        weight = torch.randn(words, width).to(dtype).requires_grad_()
        labels = torch.randint(words, (tokens,))
        memory.return_freed()
        before = of_process("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most
        if chunked:
            chunked_cross_entropy(hidden, weight, labels, chunk=CHUNK).backward()
        else:
            whole(hidden, weight, labels).backward()
        (folder / "peak").write_text(str(of_process("VmHWM") - before))
        del hidden, weight


def measured(folder, *arguments):
    with forked_runs() as runs:
        assert runs.status_of(runs.started(measure, folder, *arguments), within=120) == 0
    return int((folder / "peak").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(dtype, tmp_path):
    whole_bytes, ours_bytes = (measured(tmp_path, dtype, chunked) for chunked in (False, True))
    gradients = (TOKENS + LARGE) * NARROW * dtype.itemsize + 4 * LARGE * NARROW
    assert whole_bytes > 2 * 4 * TOKENS * LARGE
    assert ours_bytes < 16 * CHUNK * LARGE + gradients + SLACK_BYTES


def test_few_tokens_take_no_gradient_of_the_weight_in_fp32(tmp_path):
    tokens, width = 16, 512
    gradients = 2 * (tokens + LARGE) * width
    in_fp32 = 4 * LARGE * width  # a processor without bf16 products may copy a part of what they read
    assert measured(tmp_path, torch.bfloat16, True, tokens, width) < gradients + 16 * tokens * LARGE + 3 * in_fp32 / 4


def test_a_sum_that_is_the_gradient_is_not_kept_as_all_logits(tmp_path):
    tokens, width = 500, 512
    gradients = 4 * (tokens + LARGE) * width
    assert measured(tmp_path, torch.float32, True, tokens, width) < 16 * CHUNK * LARGE + gradients + SLACK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2, 21])
def test_the_gradient_of_the_weight_has_the_bits_of_one_that_is_summed_at_once(chunk, dtype, monkeypatch):
    """That of few tokens is made in backward, that of many beside the loss."""
    made = []
    for takes_less in (True, False):
        monkeypatch.setattr("ziggurat._losses.chunked_loss._take_less", lambda *_, it=takes_less: it)
        hidden, weight, bias, labels = given(dtype)
        (3 * chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)).backward()
        made.append((hidden.grad, weight.grad, bias.grad))
    assert all(map(torch.equal, *made)) if dtype != torch.float32 else all(map(torch.allclose, *made))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
