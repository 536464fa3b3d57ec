# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload(device=): units in a GPU's memory, over the double of the CUDA runtime, with the bits of the
CPU, whatever order the double runs its streams in, and mistakes that it has to see.

ZIGGURAT_CASES=all: 1,000 seeds. Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or
PyTorch is older than offload() takes.
"""

import contextlib
import functools
import gc
import sys

try:
    import pytest
    from cuda_double import Gpu  # first, as it chooses the library
    import torch
    from long_cases import in_long_run
    from random_runs import run
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import assert_same_run, gpt, loss_of, memory_of, pinned, tokens_of, train, values_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._gradients.engine_content import EngineContent
from ziggurat._library.native import Engine
from ziggurat._units.units import divide
from ziggurat.torch import gathered, offload

SEEDS = range(1000) if in_long_run() else (3, 5, 8)


def there(gpu, model, memory=None, **arguments):
    """Offloads the model to the double's GPU."""
    offload(model, memory=memory or memory_of(model), device="cuda:0", **arguments)
    gpu.computes(model)


def trained(gpu=None, dtype=torch.float32, checkpointing=None, placement="host", **arguments):
    """Returns the losses and values of a run, on the CPU without a `gpu`."""
    model = gpt(dtype, checkpointing)
    if gpu is not None:
        there(gpu, model, placement="nvme" if placement != "host" else "host")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1, placement=placement)
    try:
        losses = train(model, optimizer, range(2), **arguments)
    finally:
        optimizer.close()
    return losses, values_of(model)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_runs_have_the_bits_of_the_cpu(seed, tmp_path):
    expected = run(seed, tmp_path / "cpu")
    with Gpu(seed) as gpu:
        found = run(seed, tmp_path / "gpu", functools.partial(there, gpu))
    assert gpu.sections > 100
    assert gpu.findings == []
    assert found == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpointing": "reentrant", "accumulate": 2, "clip": 1.0},
        {"checkpointing": "not reentrant", "clip": 1.0},
        {"dtype": torch.bfloat16, "accumulate": 2},
    ],
    ids=["reentrant", "not reentrant", "bf16"],
)
def test_bits_with_checkpointing_accumulation_and_clipping(arguments):
    expected = trained(**arguments)
    with Gpu(1) as gpu:
        found = trained(gpu, **arguments)
    assert gpu.findings == []
    assert_same_run(found, expected)


def test_a_run_goes_on_from_its_store(tmp_path):
    def resumed(folder, gpu=None):
        found = []
        for steps in (range(2), range(2, 4)):
            model = gpt()
            if gpu is not None:
                there(gpu, model, placement="nvme")
            optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1, placement=f"nvme:{folder}")
            optimizer.open(resume=bool(steps.start))
            found += train(model, optimizer, steps)
            optimizer.close()
        return found, values_of(model)

    expected = resumed(tmp_path / "cpu")
    with Gpu(2) as gpu:
        found = resumed(tmp_path / "gpu", gpu)
    assert gpu.findings == []
    assert_same_run(found, expected)


def test_values_are_read_written_and_loaded_while_they_are_there():
    def found(gpu=None):
        seen = []
        model = gpt()
        if gpu is not None:
            there(gpu, model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
        train(model, optimizer, range(1))
        weight = model.blocks[1].mlp[0].weight
        with gathered(weight), torch.no_grad():
            seen.append(weight.sum().item())
            weight.mul_(0.5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, range(1, 2))
        loss_of(model, tokens_of(7)).backward()
        seen += [param.grad.double().sum().item() for param in model.parameters()]
        optimizer.zero_grad()
        model.load_state_dict(before)
        seen += train(model, optimizer, range(2, 3))
        optimizer.close()
        return seen, values_of(model)

    expected = found()
    with Gpu(3) as gpu:
        ours = found(gpu)
    assert gpu.findings == []
    assert_same_run(ours, expected)


def test_a_forward_that_fails_leaves_nothing_there():
    with Gpu(4) as gpu:
        model = gpt()
        there(gpu, model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
        train(model, optimizer, range(1))
        with pytest.raises(IndexError):
            model(torch.full((1, 4), 1000))
        assert pinned(model) == []
        train(model, optimizer, range(1, 2))
        optimizer.close()
        assert all(param.device.type == "cpu" for param in model.parameters())
    assert gpu.findings == []


def test_a_gradient_that_the_gpu_has_no_room_for_is_lost_when_the_optimizer_is_closed(monkeypatch):
    def refused(content):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with Gpu(5) as gpu:
        model = gpt()
        there(gpu, model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
        train(model, optimizer, range(1))
        loss_of(model, tokens_of(7)).backward()
        monkeypatch.setattr(EngineContent, "_read", refused)
        optimizer.close()
        assert pinned(model) == []
        assert all(param.isfinite().all() for param in model.parameters())
        with pytest.raises(ziggurat.InvalidArgument, match=r"could not be read .CUDA out of memory.*zero_grad"):
            model.blocks[0].mlp[0].weight.grad.sum()
    assert gpu.findings == []


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": torch.bfloat16, "placement": "nvme", "checkpointing": "not reentrant"},
        {"checkpointing": "reentrant", "dropout": 0.25},
    ],
    ids=["fp32", "bf16", "reentrant"],
)
def test_micro_batches_take_turns_with_the_bits_of_the_cpu(arguments, tmp_path):
    def found(gpu=None, dtype=torch.float32, placement="host", checkpointing=None, dropout=0.0):
        model = gpt(dtype, checkpointing)
        for block in model.blocks:
            block.mlp.append(torch.nn.Dropout(dropout))
        home = {} if gpu is None else {"device": "cuda:0"}
        offload(model, memory=memory_of(model), placement=placement, **home)
        if gpu is not None:
            gpu.computes(model)
        where = "host" if placement == "host" else f"nvme:{tmp_path}/{gpu is None}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1, placement=where)
        torch.manual_seed(5)
        losses = []
        for step in range(2):
            batches = [tokens_of(3 * step + part, batch=4 - part) for part in range(3)]
            loss = loss_between({len(one): one[:, 1:].flatten() for one in batches})
            taken = ziggurat.torch.micro_batches(model, [(one[:, :-1],) for one in batches], loss=loss)
            losses += [one.item() for one in taken]
            optimizer.step()
            optimizer.zero_grad()
        drawn = torch.rand(1).item()
        optimizer.close()
        return [*losses, drawn], values_of(model)

    def loss_between(targets):
        return lambda logits, batch: torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets[len(batch[0])]
        )

    expected = found(**arguments)
    with Gpu(9) as gpu:
        ours = found(gpu, **arguments)
    assert gpu.findings == []
    assert_same_run(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_layer_in_tiles_has_the_bits_of_the_cpu(dtype, placement, tmp_path):
    def found(gpu=None, **device):
        model = gpt(dtype)
        tiles = {"widen": 4}
        least = divide(model, "auto", tiles=tiles, brings_all=gpu is not None).smallest()[0]
        offload(model, memory=least, placement=placement, tiles=tiles, **device)
        if gpu is not None:
            gpu.computes(model)
        where = "host" if placement == "host" else f"nvme:{tmp_path}/{gpu is None}"
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1, placement=where)
        losses = train(model, optimizer, range(2), accumulate=2, clip=1.0)
        optimizer.close()
        return losses, values_of(model)

    expected = found()
    with Gpu(10) as gpu:
        ours = found(gpu, device="cuda:0")
    assert gpu.findings == []
    assert_same_run(ours, expected)


# -- mistakes


class NotWaitedFor(Gpu):
    """Tells that what a stream was given is done when it is not."""

    def synchronize(self):
        self.end_section()


@contextlib.contextmanager
def on_another_stream(gpu, monkeypatch, call):
    """Makes a call of the engine name a stream that computes nothing."""
    other, original = gpu.new_stream(), getattr(Engine, call)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, call, lambda engine, unit, stream: original(engine, unit, other))
        yield
    gpu.destroy_stream(other)


MISTAKES = {
    "a missing wait": (lambda: Gpu(6, "no waits"), None),
    "a copy from the wrong slot": (lambda: Gpu(6, "stale source"), None),
    "a swapped stream": (lambda: Gpu(6), "acquire"),
    "a release too early": (lambda: Gpu(6), "release"),
    "a write that is told too early": (lambda: NotWaitedFor(6), None),
}


def written(gpu=None):
    """Is a run in which a parameter is written where it is."""
    model = gpt()
    if gpu is not None:
        there(gpu, model)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
    try:
        losses = train(model, optimizer, range(1))
        with gathered(model.blocks[1].mlp[0].weight), torch.no_grad():
            model.blocks[1].mlp[0].weight.mul_(0.5)
        losses += train(model, optimizer, range(1, 3))
    finally:
        optimizer.close()
    return losses


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake, monkeypatch):
    make, call = MISTAKES[mistake]
    found = None
    with make() as gpu:
        with on_another_stream(gpu, monkeypatch, call) if call else contextlib.nullcontext():
            with contextlib.suppress(ziggurat.ZigguratError):
                found = written(gpu)
        gc.collect()
    races = [one for one in gpu.findings if "nothing orders it after" in one]
    if mistake == "a copy from the wrong slot":
        assert found != written()
    else:
        assert races


# -- refusals


def test_what_pytorch_or_the_machine_lacks_is_named(monkeypatch):
    for device in ("xpu", "meta", "cuda"):
        with pytest.raises((ziggurat.Unimplemented, ziggurat.InvalidArgument), match=f'device="{device}"'):
            offload(gpt(), memory="1GiB", device=device)


def test_a_driver_that_is_too_old_is_named_and_the_cpu_goes_on():
    with Gpu(0, driver_version=11080):
        model = gpt()
        with pytest.raises(ziggurat.Unavailable, match="the driver is for CUDA 11.8, and CUDA .* needs driver"):
            there(None, model)
        optimizer = ziggurat.torch.AdamW(model.parameters(), threads=1)
        train(model, optimizer, range(1))
        optimizer.close()


def test_a_forward_without_an_optimizer_is_refused():
    with Gpu(0) as gpu:
        model = gpt()
        there(gpu, model)
        with pytest.raises(ziggurat.InvalidArgument, match="make the optimizer before"), torch.no_grad():
            model(tokens_of(0)[:, :-1])


def test_more_memory_than_the_gpu_has_is_refused():
    with Gpu(0, memory_bytes=1 << 20) as gpu:
        model = gpt()
        there(gpu, model, memory="1GiB")
        optimizer = ziggurat.torch.AdamW(model.parameters(), threads=1)
        with pytest.raises(ziggurat.ResourceExhausted, match="GPU|CUDA"):
            train(model, optimizer, range(1))
        assert all(param.device.type == "cpu" for param in model.parameters())
    assert gpu.findings == []


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
