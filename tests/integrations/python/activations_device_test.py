# SPDX-License-Identifier: Apache-2.0
"""offload(device=, activations=): what a GPU's backward needs is kept in host memory or on a drive, with the bits of
the CPU, over the double of the CUDA runtime; and copies that happen late, as those of a GPU may.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload()
takes.
"""

import contextlib
import functools
import gc
import os
import sys

try:
    import pytest
    from cuda_double import Gpu  # first, as it chooses the library
    import torch
    from device_double import Double, Stream
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import assert_same_run, gpt, loss_of, memory_of, tokens_of, values_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat._activations.activations
import ziggurat.torch
from ziggurat._activations.activations import Activations
from ziggurat._activations.host_stash import HostStash
from ziggurat._streaming.streaming import streaming_of
from ziggurat.torch import offload

BATCH = 64  # so that what a block saves is not small


def trained(gpu=None, checkpointing=None, accumulate=1, **given):
    """Returns the losses and values of a run, on the CPU without a `gpu`, and what was kept of forwards."""
    model = gpt(checkpointing=checkpointing)
    if gpu is not None:
        offload(model, memory=memory_of(model), device="cuda:0", **given)
        gpu.computes(model)
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
    losses = []
    for step in range(2):
        for part in range(accumulate):
            loss = loss_of(model, tokens_of(step * accumulate + part, BATCH))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    kept = None if gpu is None else streaming_of(next(model.parameters()))[0].activations.figures()
    optimizer.close()
    return (losses, values_of(model)), kept


@pytest.mark.parametrize(
    "more", [{}, {"checkpointing": "not reentrant"}, {"checkpointing": "reentrant", "accumulate": 2}]
)
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_has_the_bits_of_the_cpu(home, more, tmp_path):
    expected, _ = trained(**more)
    given = {"activations": "host", "activation_memory": "64MiB"}
    if home == "nvme":
        given = {"activations": f"nvme:{tmp_path}", "activation_memory": "2MiB"}
    with Gpu(7) as gpu:
        found, kept = trained(gpu, **more, **given)
    assert gpu.findings == []
    assert_same_run(found, expected)
    assert kept["put_bytes"] > 0
    assert kept["memory_peak_bytes"] <= (64 if home == "host" else 2) << 20
    if home == "nvme" and "checkpointing" not in more:
        assert kept["written_bytes"] > 0 and kept["read_bytes"] > 0


def test_what_has_no_room_in_host_memory_stays_and_is_said_once(capfd):
    expected, _ = trained()
    with Gpu(7) as gpu:
        found, kept = trained(gpu, activations="host", activation_memory="1MiB")
    assert gpu.findings == []
    assert_same_run(found, expected)
    assert 0 < kept["memory_peak_bytes"] <= 1 << 20
    said = [line for line in capfd.readouterr().err.splitlines() if "that backward needs stays" in line]
    assert len(said) == 1 and "activation_memory=1" in said[0]


def test_host_is_refused_where_the_cpu_computes():
    with pytest.raises(ziggurat.InvalidArgument, match="in host memory anyway"):
        offload(gpt(), memory="1GiB", activations="host")


# -- copies that are late


@contextlib.contextmanager
def late(seed, monkeypatch):
    """A double whose copies happen when somebody waits for them, or with a seed at any time before."""
    double = Double(seed)
    accelerator = double.accelerators[0]
    monkeypatch.setattr(accelerator, "device", torch.device("cpu"), raising=False)
    # What it computes to put bytes in order, it computes on the accelerator.
    monkeypatch.setattr(ziggurat._activations.activations, "without_modes", contextlib.nullcontext)
    with double:
        yield double, accelerator


def of_no_model(accelerator, memory_bytes=8 << 20):
    made = functools.partial(HostStash, accelerator)
    return Activations(lambda: made, memory_bytes, set, accelerator)


def spread(x):
    """Saves what is whole, views of one memory, and what has gaps."""
    wide = torch.stack([x, x.cos(), x + 1], 1)
    left, right = (x * 3).chunk(2, 1)
    return (wide[:, ::2].sin() * x.unsqueeze(1)).sum() + (left * right).exp().sum() + x.t().tanh().sum()


def gradients(accelerator=None, steps=3):
    kept = None if accelerator is None else of_no_model(accelerator)
    found = []
    for step in range(steps):
        made = torch.Generator().manual_seed(step)
        x = (0.1 * torch.randn(256, 512, generator=made)).requires_grad_()
        with contextlib.nullcontext() if kept is None else kept.kept():
            loss = spread(x * 1)
        loss.backward()
        found.append(x.grad.clone())
    if kept is not None:
        assert kept.figures()["put_bytes"] > steps << 20
    return found


@pytest.mark.parametrize("seed", range(4))
def test_late_copies_are_in_the_order_of_the_stream(seed, monkeypatch):
    expected = gradients()
    with late(seed, monkeypatch) as (_, accelerator):
        found = gradients(accelerator)
        assert all(map(torch.equal, found, expected))
    assert len(accelerator.pinned_bytes) < 12  # memory is used again in each step


def test_memory_that_is_used_again_waits_for_the_stream_that_has_read_it(monkeypatch):
    waits = []
    with late(0, monkeypatch) as (double, accelerator):
        monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: waits.append((stream, other)))
        stash = HostStash(accelerator, 1 << 20)
        first = torch.arange(1 << 17, dtype=torch.float32)
        item = stash.put(first)
        reader = accelerator.current
        reader.synchronize()
        with double.itself():
            target = torch.empty_like(first)
        item.fill(target.view(-1).view(torch.uint8), 0)
        assert waits == []  # all is one stream's
        del item
        gc.collect()
        reader.synchronize()
        assert torch.equal(target, first)
        accelerator.current = Stream(accelerator)
        other = stash.put(first + 1)  # in the same memory, on another stream
        assert len(accelerator.pinned_bytes) == 1
        assert waits == [(accelerator.current, reader)]
        del other


def test_what_another_stream_has_made_stays_until_it_is_copied(monkeypatch):
    kept = []
    with late(0, monkeypatch) as (_, accelerator):
        monkeypatch.setattr(accelerator, "keep", lambda tensor, stream: kept.append((tensor.data_ptr(), stream)))
        stash = HostStash(accelerator, 1 << 20)
        made = torch.ones(1 << 16)
        accelerator.current = Stream(accelerator)  # the forward's; what was made on another one goes back to that
        item = stash.put(made)
        assert kept == [(made.data_ptr(), accelerator.current)]
        accelerator.current.synchronize()
        del item


def test_memory_that_cannot_be_pinned_is_not_counted(monkeypatch):
    with late(0, monkeypatch) as (_, accelerator):
        stash, pinned = HostStash(accelerator, 1 << 20), accelerator.pinned

        def refused(size_bytes):
            raise ziggurat.ResourceExhausted(f"cannot pin {size_bytes} bytes")

        monkeypatch.setattr(accelerator, "pinned", refused)
        with pytest.raises(ziggurat.ResourceExhausted, match="cannot pin"):
            stash.put(torch.ones(1 << 20, dtype=torch.uint8))
        monkeypatch.setattr(accelerator, "pinned", pinned)
        for size in (1 << 19, 1 << 18):
            item = stash.put(torch.ones(size, dtype=torch.uint8))
            accelerator.current.synchronize()
            del item
        assert len(stash._spare[1 << 19]) + len(stash._gone) == 2  # the first is spare yet


def test_memory_of_another_size_takes_the_place_of_what_is_spare(monkeypatch):
    with late(0, monkeypatch) as (_, accelerator):
        stash = HostStash(accelerator, 1 << 20)
        for size in (1 << 19, 3 << 18, 1 << 20):
            item = stash.put(torch.ones(size, dtype=torch.uint8))
            assert item is not None
            assert stash.put(torch.ones(1 << 20, dtype=torch.uint8)) is None
            accelerator.current.synchronize()
            del item
        assert stash.figures() == {"put_bytes": (1 << 19) + (3 << 18) + (1 << 20), "memory_peak_bytes": 1 << 20}
        assert stash._held_bytes <= 1 << 20


def test_a_forked_process_has_nothing_of_it(monkeypatch):
    with late(0, monkeypatch) as (_, accelerator):
        stash = HostStash(accelerator, 1 << 20)
        child = os.fork()
        if child == 0:
            try:
                stash.put(torch.ones(4096, dtype=torch.uint8))
            except ziggurat.InvalidArgument:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
