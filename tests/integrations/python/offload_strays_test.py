# SPDX-License-Identifier: Apache-2.0
"""Uses of a parameter of ziggurat.torch.offload() that is away, or that a unit has brought for others: each is right, or an error
that says why, in a process of its own. Never a signal, never other values.

The suite runs those of `WORST`; ZIGGURAT_CASES=all runs all. offload_cases_test.py has the plain uses, in one process. Run by
pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import copy
import dataclasses
import functools
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

try:
    import numpy
    import pytest
    import torch
    from forked_runs import forked_runs
    from long_cases import long_case
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, memory_of, tokens_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat.torch import gathered, offload

nn = torch.nn
STRAYS: dict[str, Callable[..., Any]] = {}
#: what a stray is compared with in a model that is not offloaded, where that is not the same use
LIKE: dict[str, Callable[..., Any]] = {}

# What were signals, hangs or other values once, or would be without a guard.
WORST = [
    "storage.is_shared",
    "alias.is_shared",
    "alias.sum",
    "a kept graph",
    "forked: state_dict",
    "forked in gathered",
    "DataLoader: forward",
    "shared memory, written",
    "data written in gathered",
    "data written in forward",
    "numpy kept from gathered",
    "numpy kept from a forward hook",
    "dlpack kept",
]


@dataclasses.dataclass
class At:
    """A model that has made a step, one of its parameters, and an alias of this that is older than offload()."""

    model: nn.Module
    optimizer: Any
    early: torch.Tensor

    @property
    def layer(self) -> nn.Module:
        return self.model.blocks[1].mlp[0]

    @property
    def p(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def alias(self) -> torch.Tensor:
        return self.of(lambda p: p.detach())

    def of(self, made: Callable[[torch.Tensor], Any]) -> Any:
        with gathered(self.p):
            return made(self.p)

    def forward(self) -> torch.Tensor:
        return loss_of(self.model, tokens_of(3))

    def hooked(self, register: str, hook: Callable[..., Any], module: nn.Module | None = None) -> torch.Tensor:
        """Returns the loss of a forward, and has its backward run, with a hook on the module, or the layer."""
        handle = getattr(module or self.layer, register)(hook)
        try:
            loss = self.forward()
            loss.backward()
        finally:
            handle.remove()
            self.model.zero_grad()
        return loss


class Ended(BaseException):
    """A child has ended by a signal, or without a word."""


def in_child(use: Callable[[], Any]) -> Any:
    """Returns what `use` returns in a forked process. Errors: RuntimeError with those of the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = True, use()
        except Exception as error:
            found = False, words_of(error)
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0 or not told:
        raise Ended(f"a forked process has ended with {status}")
    worked, found = pickle.loads(told)
    if not worked:
        raise RuntimeError(found)
    return found


def in_thread(use: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(use())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


class Items(torch.utils.data.Dataset):
    """Items that are made of a model, as of a teacher's."""

    def __init__(self, item: Callable[[], float]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return self.item()


def loaded(item: Callable[[], float]) -> list[Any]:
    loader = torch.utils.data.DataLoader(Items(item), 1, num_workers=1, multiprocessing_context="fork")
    return [batch.item() for batch in loader]


def queued(tensor: torch.Tensor) -> torch.Tensor:
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(tensor)
    return queue.get().clone()


def kept_by_hook(at: At, made: Callable[[torch.Tensor], Any]) -> Any:
    """Returns what a forward hook has made of the weight."""
    kept: list[Any] = []
    at.hooked("register_forward_hook", lambda module, *_: kept.append(made(module.weight)))
    return kept[0]


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def square_grad(at: At) -> torch.Tensor:
    at.of(lambda p: p.square().sum()).backward()
    grad = at.p.grad.clone()
    at.model.zero_grad()
    return grad


def stepped_by(at: At, kind: Any, **options: Any) -> None:
    at.forward().backward()
    kind(at.model.parameters(), lr=0.1, **options).step()


def mul_no_grad(at: At) -> None:
    with torch.no_grad(), gathered(at.p):
        at.p.mul_(2)


def mul_numpy(p: torch.Tensor) -> None:
    values = p.detach().numpy()
    values *= 2


def share_and_double(p: torch.Tensor) -> None:
    p.share_memory_()
    p.data.mul_(2)


def no_grad_hook(module: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(0.5)


def data_hook(module: nn.Module, *_: Any) -> None:
    module.weight.data.mul_(0.5)


def averaged(at: At, made: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros(p.shape).lerp_(made(p), 0.1) for p in at.model.parameters()]


def traced_within(at: At) -> torch.Tensor:
    with gathered(at.layer.parameters()):
        trace = torch.jit.trace(at.layer, (torch.ones(2, 64),))
    return trace(torch.ones(2, 64))


def child_within(at: At) -> Any:
    with gathered(at.p):
        return in_child(lambda: at.p.sum().item())


def with_hooks_on_saved(at: At) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        at.forward()
    return [tensor.clone() for tensor in kept]


def saved_on_cpu(at: At) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = at.forward()
    loss.backward()
    grad = at.p.grad.clone()
    at.model.zero_grad()
    return grad


ones = functools.partial(torch.ones, 2, 64)
NAME = "blocks.1.mlp.0.weight"

STRAYS |= {
    # the storage, which has no __torch_function__
    "storage.is_shared": lambda at: at.p.untyped_storage().is_shared(),
    "alias.is_shared": lambda at: at.alias.is_shared(),
    "storage.data_ptr": lambda at: at.p.untyped_storage().data_ptr() == 0,
    "storage.tolist": lambda at: at.p.untyped_storage().tolist(),
    "storage.fill_": lambda at: at.p.untyped_storage().fill_(0) and None,
    "storage.share_memory_": lambda at: at.p.untyped_storage().share_memory_() and None,
    "storage, larger": lambda at: at.p.untyped_storage().resize_(1 << 20) and None,
    "storage, emptied": lambda at: at.p.untyped_storage().resize_(0) and None,
    "storage, pickled": lambda at: pickle.dumps(at.p.untyped_storage()),
    "storage, copied": lambda at: torch.zeros_like(at.p).untyped_storage().copy_(at.p.untyped_storage()).tolist(),
    "storage, in a tensor": lambda at: torch.empty(0).set_(at.p.untyped_storage(), 0, (256 * 64,)).sum(),
    # aliases: made within gathered(), or before offload()
    "alias.sum": lambda at: at.alias.sum(),
    "alias.item": lambda at: at.alias[1, 1].item(),
    "alias, printed": lambda at: repr(at.alias),
    "alias, pickled": lambda at: pickle.dumps(at.alias),
    "alias, saved": lambda at: saved(at.alias, _use_new_zipfile_serialization=False),
    "alias, deep copy": lambda at: copy.deepcopy(at.alias),
    "alias to DLPack": lambda at: torch.from_dlpack(at.alias).clone(),
    "alias to memoryview": lambda at: bytes(memoryview(at.alias.numpy())),
    "alias in foreach": lambda at: torch._foreach_add([at.alias], 1)[0],
    "alias in svd": lambda at: torch.linalg.svdvals(at.alias),
    "alias in attention": lambda at: nn.functional.scaled_dot_product_attention(*[at.alias.view(1, 4, 64, 64)] * 3),
    "alias in embedding_bag": lambda at: nn.functional.embedding_bag(torch.tensor([[1, 2]]), at.alias),
    "alias in a nested tensor": lambda at: torch.nested.nested_tensor([at.alias]).to_padded_tensor(0),
    "alias, quantized": lambda at: torch.quantize_per_tensor(at.alias, 0.1, 0, torch.qint8).dequantize(),
    "alias, index_put_": lambda at: at.alias.index_put_((torch.tensor([0]),), torch.zeros(64)).shape,
    "alias, larger": lambda at: at.alias.resize_(512, 64).shape,
    "alias, vmap": lambda at: torch.vmap(torch.sum)(at.alias),
    "alias, func.grad": lambda at: torch.func.grad(lambda w: (w * w).sum())(at.alias),
    "view of before": lambda at: at.early[:2].sum(),
    "view written": lambda at: at.early.t()[0].zero_().shape,
    "chunk": lambda at: at.of(lambda p: p.detach().chunk(2))[1].sum(),
    "a kept graph": square_grad,
    # other processes and threads
    "forked: values": lambda at: in_child(lambda: at.p.sum().item()),
    "forked: alias": lambda at: in_child(lambda: at.early.sum().item()),
    "forked: gathered": lambda at: in_child(lambda: at.of(lambda p: p.sum().item())),
    "forked: forward": lambda at: in_child(lambda: at.forward().item()),
    "forked: state_dict": lambda at: in_child(lambda: at.model.state_dict()[NAME].sum().item()),
    "forked: optimizer's state": lambda at: in_child(lambda: at.optimizer.state[at.p]["exp_avg"].sum().item()),
    "forked: closes": lambda at: in_child(at.optimizer.close),
    "forked in gathered": child_within,
    "DataLoader: values": lambda at: loaded(lambda: at.p.sum().item()),
    "DataLoader: forward": lambda at: loaded(lambda: at.forward().item()),
    "queue": lambda at: queued(at.p.detach()),
    "queue of an alias": lambda at: queued(at.alias),
    "queue in gathered": lambda at: at.of(lambda p: queued(p.detach())),
    "shared memory, written": lambda at: at.of(share_and_double),
    "model.share_memory": lambda at: at.model.share_memory() and None,
    "thread: values": lambda at: in_thread(lambda: at.p.sum()),
    "thread: forward": lambda at: in_thread(lambda: at.forward().item()),
    # writes
    "data written in gathered": lambda at: at.of(lambda p: p.data.mul_(2).shape),
    "NumPy writes in gathered": lambda at: at.of(mul_numpy),
    "data written in forward": lambda at: at.hooked("register_forward_pre_hook", data_hook),
    "written in forward": lambda at: at.hooked("register_forward_pre_hook", no_grad_hook).item(),
    # what keeps the address
    "numpy kept from gathered": lambda at: float(at.of(lambda p: p.detach().numpy()).sum()),
    "numpy of a view kept": lambda at: float(at.of(lambda p: p.data[1:].t().numpy()).sum()),
    "numpy kept from a forward hook": lambda at: float(kept_by_hook(at, lambda p: p.detach().numpy()).sum()),
    "dlpack kept": lambda at: torch.from_dlpack(at.of(lambda p: torch.utils.dlpack.to_dlpack(p.detach()))).sum(),
    "numpy by dlpack kept": lambda at: float(at.of(lambda p: numpy.from_dlpack(p.detach()[1:])).sum()),
    "memoryview kept": lambda at: bytes(at.of(lambda p: memoryview(p.detach().numpy())))[:64],
    "storage emptied in gathered": lambda at: at.of(lambda p: p.untyped_storage().resize_(0)) and None,
    # and what does not
    "numpy copied in gathered": lambda at: float(at.of(lambda p: p.detach().numpy().copy()).sum()),
    "numpy read in gathered": lambda at: at.of(lambda p: float(p.detach().numpy().sum())),
    "numpy read in a forward hook": lambda at: kept_by_hook(at, lambda p: float(p.detach().numpy().sum())),
    "a graph kept, of gathered": lambda at: at.of(lambda p: nn.functional.linear(ones(), p)).detach(),
    # hooks and transforms
    "hook reads its own": lambda at: kept_by_hook(at, lambda p: p.sum().item()),
    "hook reads another's": lambda at: at.hooked("register_forward_hook", lambda *_: at.p.sum() and None, at.model.blocks[3]),
    "hook keeps an alias": lambda at: kept_by_hook(at, lambda p: p.detach()).sum(),
    "gradient's hook reads": lambda at: at.hooked("register_full_backward_hook", lambda m, *_: m.weight.sum() and None),
    "saved tensors kept": with_hooks_on_saved,
    "saved tensors copied": saved_on_cpu,
    "functional_call": lambda at: torch.func.functional_call(at.layer, dict(at.layer.named_parameters()), (ones(),)),
    "functional_call of all": lambda at: torch.func.functional_call(
        at.model, dict(at.model.named_parameters()), (tokens_of(3)[:, :-1],)
    ),
    "stack_module_state": lambda at: torch.func.stack_module_state([at.layer, at.layer])[0]["weight"].sum(),
    "jit.trace": traced_within,
    "jit.script": lambda at: torch.jit.script(at.layer)(ones()),
    "export": lambda at: torch.export.export(at.layer, (ones(),)).module()(ones()),
    "compile": lambda at: torch.compile(lambda x: x @ at.p.t(), backend="aot_eager")(ones()),
    "compile of an alias": lambda at: torch.compile(lambda x, w: x @ w.t(), backend="aot_eager")(ones(), at.alias),
    # what scripts call for all parameters
    "foreach": lambda at: torch._foreach_lerp_([torch.zeros_like(at.p)], [at.p], 0.5),
    "parameters_to_vector": lambda at: nn.utils.parameters_to_vector(at.model.parameters()),
    "vector_to_parameters": lambda at: nn.utils.vector_to_parameters(torch.zeros(1 << 20), at.model.parameters()),
    "get_total_norm": lambda at: nn.utils.get_total_norm(list(at.model.parameters())),
    "weight_norm": lambda at: nn.utils.parametrizations.weight_norm(at.layer) and None,
    "spectral_norm": lambda at: nn.utils.spectral_norm(at.layer) and None,
    "reset_parameters": lambda at: at.layer.reset_parameters(),
    "quantize_dynamic": lambda at: torch.ao.quantization.quantize_dynamic(at.model.blocks[1].mlp, {nn.Linear})(ones()),
    "AveragedModel": lambda at: torch.optim.swa_utils.AveragedModel(at.model) and None,
    "average of detach()": lambda at: averaged(at, lambda p: p.detach()),
    "average of data": lambda at: averaged(at, lambda p: p.data),
    "state_dict, later": lambda at: (at.model.state_dict(), at.hooked("register_forward_hook", lambda *_: None))[0][NAME].clone(),
    "state_dict with keep_vars": lambda at: at.model.state_dict(keep_vars=True)[NAME].sum(),
    "a part's state_dict": lambda at: at.layer.state_dict()["weight"].sum(),
    "a part is loaded": lambda at: at.layer.load_state_dict({"weight": torch.ones(256, 64), "bias": torch.ones(256)}) and None,
    "torch.optim.SGD": lambda at: stepped_by(at, torch.optim.SGD),
    "torch.optim.AdamW": lambda at: stepped_by(at, torch.optim.AdamW, fused=True),
}
LIKE |= {
    name: mul_no_grad for name in ("shared memory, written", "data written in gathered", "NumPy writes in gathered")
}


def words_of(error: BaseException | None) -> str:
    """Returns what the error says, and what it came from."""
    words = []
    while error is not None:
        words.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(words)


# The words for a use that Python sees, and PyTorch's own.
SAYS_WHY = (
    "parameter '",
    "unit '",
    "an offloaded Gpt cannot be copied",
    "forked process",
    "Cannot access data pointer of Storage that is invalid",
    "Trying to resize storage that is not resizable",
)


def run(use: Callable[[At], Any] | None, offloads: bool) -> tuple[Any, list[float]]:
    """Returns what the use returns, or its error, and the losses of the steps after it."""
    model = gpt()
    early = model.blocks[1].mlp[0].weight.detach()
    if offloads:
        offload(model, memory=memory_of(model))
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0 and use is not None:
            torch.manual_seed(5)
            try:
                found = use(At(model, optimizer, early))
            except Exception as error:
                found = error
            optimizer.zero_grad()
    optimizer.close()
    return (found if use is not None else None), losses


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def judge(name: str, unused: list[float]) -> None:
    found, losses = run(STRAYS[name], offloads=True)
    if isinstance(found, Exception):
        words = words_of(found)
        print(words)
        assert any(said in words for said in SAYS_WHY)
        assert losses == unused
        return
    expected, plain_losses = run(LIKE.get(name, STRAYS[name]), offloads=False)
    print(found, expected, losses, plain_losses)
    assert name in LIKE or same(found, expected)
    assert losses == plain_losses


@pytest.fixture(scope="module")
def unused() -> list[float]:
    return run(None, offloads=False)[1]


@pytest.mark.parametrize("name", [name if name in WORST else long_case(name) for name in STRAYS])
def test_a_stray_use_is_right_or_an_error_that_says_why(name, unused):
    with forked_runs() as runs:
        assert runs.status_of(runs.started(judge, name, unused), within=120) == 0


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], __file__]))
