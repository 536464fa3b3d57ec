# SPDX-License-Identifier: Apache-2.0
"""An offloaded model of fp32 parameters under autocast, whose graph has no 16-bit copies of them.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older
than offload() takes.
"""

import contextlib
import sys
import warnings
import weakref

try:
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, offloaded, same_with_and_without, tokens_of, train
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._streaming.streaming import streaming_of

WARNING = "autocast keeps a 16-bit copy"


def loss_in_16_bits(dtype=torch.bfloat16):
    def loss(model, tokens):
        with torch.autocast("cpu", dtype):
            return loss_of(model, tokens)

    return loss


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert [str(one.message) for one in told if WARNING in str(one.message)] == []


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_without_offload(dtype, checkpointing):
    def run(offload):
        model = offload(gpt(checkpointing=checkpointing))
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        with no_warnings():
            losses = train(
                model, optimizer, range(3), accumulate=2, clip=0.1, loss_of=loss_in_16_bits(dtype)
            )
        optimizer.close()
        return losses

    same_with_and_without(run)


class Saved:
    """What a graph saves in 16 bits, as hooks around the whole model see it."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.around = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        if tensor.dtype == torch.bfloat16:
            base = tensor._base if tensor._is_view() else tensor
            self.tensors.append(base.detach().clone())
        return tensor

    def matrices(self, model) -> int:
        """Returns how many matrices of the model's blocks are among it."""
        wide = [one for name, one in model.state_dict().items() if "blocks" in name and one.dim() > 1]
        return sum(any(same(one.bfloat16(), saved) for saved in self.tensors) for one in wide)


def same(one, other):
    return one.shape == other.shape and torch.equal(one, other)


def test_the_graph_has_no_copies_of_weights():
    plain, saved = gpt(), Saved()
    with saved.around:
        loss_in_16_bits()(plain, tokens_of(1))
    assert saved.matrices(plain) == 4 * len(plain.blocks)
    model, saved = gpt(), Saved()
    optimizer = offloaded(model)
    with saved.around:
        loss_in_16_bits()(model, tokens_of(1)).backward()
    assert saved.tensors  # all else
    assert saved.matrices(model) == 0
    optimizer.close()


def test_hooks_around_the_model_pack_all_else_and_get_it_back():
    def run(offload):
        model = offload(gpt())
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)

        def loss(model, tokens):
            # its copies are not the tensors that were saved
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return loss_in_16_bits()(model, tokens)

        losses = train(model, optimizer, range(2), loss_of=loss)
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_script_may_cast_for_itself_and_change_that():
    class Signs(torch.nn.Linear):
        def forward(self, x):
            cast = self.weight.to(torch.bfloat16)
            with torch.no_grad():
                cast.copy_(cast.sign() * 0.01)
            return torch.nn.functional.linear(x, cast)

    def run(offload):
        model = gpt()
        for block in model.blocks:
            block.mlp[0].__class__ = Signs
        model = offload(model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(3), loss_of=loss_in_16_bits())
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_parameter_that_was_written_before_backward_is_an_error():
    model = gpt()
    optimizer = offloaded(model)
    loss = loss_in_16_bits()(model, tokens_of(1))
    with torch.no_grad(), ziggurat.torch.gathered(model.blocks[1].parameters(), write=True):
        model.blocks[1].mlp[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation since forward"):
        loss.backward()
    optimizer.close()


class Activating(torch.nn.Module):
    """Applies what saves its own output."""

    def __init__(self, changed=lambda x: None) -> None:
        super().__init__()
        self.linear, self.changed = torch.nn.Linear(64, 64), changed

    def forward(self, x):
        y = torch.sigmoid(self.linear(x))
        z = torch.softmax(y, -1) * y
        self.changed(y)
        return x + z


def activating(changed=lambda x: None) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Activating(changed) for _ in range(3)), torch.nn.Linear(64, 1))


def square_in_16_bits(model) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.ones(3, 64, requires_grad=True)).float().square().mean()


def test_an_activation_that_was_written_before_backward_is_an_error():
    model = activating(lambda y: y.mul_(2))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    ziggurat.torch.offload(model, memory="1MiB")
    loss = square_in_16_bits(model)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation.* version 1; expected"):
        loss.backward()
    optimizer.close()


def test_a_graph_without_a_backward_is_freed():
    made = []
    model = activating(lambda y: made.append(weakref.ref(y)))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    ziggurat.torch.offload(model, memory="1MiB")
    loss = square_in_16_bits(model)
    del loss
    assert [one() for one in made] == [None] * 3
    optimizer.close()


def test_a_backward_of_a_backward_has_the_bits_without_offload():
    def run(offload):
        model = offload(activating(), memory=1 << 20)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(2):
            loss = square_in_16_bits(model)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(grad.square().sum() for grad in grads)).backward()
            found += [param.grad.sum().item() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return found

    same_with_and_without(run)


def test_a_frozen_matrix_in_fp32_is_warned_of():
    """Autocast's copy of one has no history, so nobody knows what it is a copy of."""
    model = gpt()
    model.blocks[2].mlp[0].requires_grad_(False)
    optimizer = offloaded(model)
    with pytest.warns(UserWarning, match=rf"'blocks\.2\.mlp\.0\.weight' is fp32 and frozen.*{WARNING}"):
        loss_in_16_bits()(model, tokens_of(1)).backward()
    optimizer.close()


def test_a_block_that_is_compiled_is_warned_of_and_keeps_its_bits():
    def run(offload):
        torch._dynamo.reset()
        model = gpt()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        model = offload(model)
        is_offloaded = streaming_of(model.norm.weight) is not None
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = train(model, optimizer, range(2), loss_of=loss_in_16_bits())
        assert is_offloaded == any("in compiled code" in str(one.message) for one in told)
        optimizer.close()
        return losses

    same_with_and_without(run)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
