# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients on an accelerator, whose double is late where a real one may be.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    from device_cases import CASES, SHAPES, Lab, assert_same, run, train
    from device_double import Double
    from small_models import one_thread, small_model  # noqa: F401: pytest uses the first
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._optimizer.device import workers_beside
from ziggurat._pytorch.accelerator import Accelerator, gpu_of


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("placement", "waits"), [("host", False), ("host", True), ("nvme", True)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bits_are_those_of_the_cpu(case, placement, waits, seed, tmp_path):
    expected = run(case, Lab("cpu", tmp_path / "cpu"))
    with Double(seed):
        found = run(case, Lab("cpu", tmp_path / "double", waits, placement))
    assert_same(found, expected)


def mlp(lab):
    model = small_model()
    optimizer = lab.optimizer(model)
    for number in range(12):
        torch.manual_seed(100 + number)
        tokens = torch.randint(61, (16, 9))
        for half in tokens.chunk(2) if number % 4 == 3 else [tokens]:
            logits = model(half[:, :8])
            loss = torch.nn.functional.cross_entropy(logits, half[:, 8])
            loss.backward()
            lab.seen.append(loss.detach())
        lab.seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    lab.look(model)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("waits", [False, True])
def test_a_model_trains_as_on_the_cpu(waits, seed, tmp_path):
    expected = run(mlp, Lab("cpu", tmp_path / "cpu"))
    with Double(seed):
        found = run(mlp, Lab("cpu", tmp_path / "double", waits))
    assert_same(found, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_model_may_be_on_two_accelerators_and_the_cpu(case, tmp_path):
    """By their sizes: parameters, gradients and what they are multiplied by."""
    expected = run(case, Lab("cpu", tmp_path / "cpu"))
    with Double(1, lambda tensor: {130 * 61: None, 48: 1}.get(tensor.numel(), 0)) as double:
        found = run(case, Lab("cpu", tmp_path / "double"))
        assert all(accelerator.pinned_bytes for accelerator in double.accelerators)
    assert_same(found, expected)


def trained(lab, steps=1):
    model = lab.model()
    optimizer = lab.optimizer(model)
    train(model, optimizer, range(steps))
    return model, optimizer


VALUE_BYTES = 130 * 61 * 4 + 48 * 2 + 4 + 33 * 9 * 2 + 7 * 3 * 2


def test_staging_is_pinned_once_as_large_as_the_parameters(tmp_path):
    with Double(0) as double:
        model, optimizer = trained(Lab("cpu", tmp_path), 3)
        optimizer.synchronize()
    values, *gradients = double.accelerators[0].pinned_bytes
    slack = 64 * len(SHAPES)
    assert VALUE_BYTES <= values <= VALUE_BYTES + slack
    assert len(gradients) == 3  # of fp32, bf16 and fp16
    assert VALUE_BYTES <= sum(gradients) <= VALUE_BYTES + slack


def test_figures_have_what_was_copied(tmp_path):
    model, optimizer = trained(Lab("cpu", tmp_path / "cpu"), 3)
    assert optimizer.figures()["device_down_bytes"] == 0
    assert optimizer.figures()["device_up_bytes"] == 0
    with Double(0):
        model, optimizer = trained(Lab("cpu", tmp_path / "double"), 3)
        figures = optimizer.figures()
        assert figures["device_down_bytes"] == 3 * VALUE_BYTES
        assert figures["device_up_bytes"] == 3 * VALUE_BYTES
        assert optimizer.figures()["device_down_bytes"] == 0


def test_gradients_are_copied_in_backward_from_the_second_step_on(tmp_path):
    with Double(0):
        model, optimizer = trained(Lab("cpu", tmp_path))
        optimizer.figures()
        model(1).backward()
        assert optimizer.figures()["device_down_bytes"] == VALUE_BYTES
        optimizer.step()
        assert optimizer.figures()["device_down_bytes"] == 0


def test_of_several_backwards_the_last_ones_sums_are_copied(tmp_path):
    sums = 4 * sum(torch.Size(shape).numel() for shape, _ in SHAPES.values())
    with Double(0):
        model, optimizer = trained(Lab("cpu", tmp_path))
        for number in (1, 2, 3, 4):
            optimizer.figures()
            model(number).backward()
            model(number + 10).backward()
            in_backward = optimizer.figures()["device_down_bytes"]
            optimizer.step()
            optimizer.zero_grad()
            in_step = optimizer.figures()["device_down_bytes"]
            # The first has taken its first gradient for the last.
            assert (in_backward, in_step) == ((VALUE_BYTES, sums) if number == 1 else (sums, 0))


def test_a_forward_does_not_hold_up_the_copies_to_its_later_modules(tmp_path):
    with Double(0) as double:
        model, optimizer = trained(Lab("cpu", tmp_path, waits=True), 2)
        up = double.accelerators[0].streams[1]
        pending, known = optimizer._opened[0].pending, up.knows
        loss = model(2)
        assert pending and double.now > known
        assert not optimizer._opened[0].pending
        assert up.knows == known
        loss.backward()


def test_what_gradients_are_multiplied_by_is_read_once_in_a_step(tmp_path):
    with Double(0) as double:
        model, optimizer = trained(Lab("cpu", tmp_path))
        model(1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = double.accelerators[0].reads
        optimizer.step()
        assert double.accelerators[0].reads == before + 1


def test_a_parameter_that_is_written_while_a_step_is_under_way_is_an_error(tmp_path):
    with Double(0):
        model, optimizer = trained(Lab("cpu", tmp_path, waits=True), 2)
        assert optimizer._opened[0].pending
        with torch.no_grad():
            model.layers["one"].weight.mul_(0.5)
        with pytest.raises(ziggurat.ZigguratError, match="'layers.one.weight' was written during"):
            optimizer.synchronize()


def test_a_gradient_of_a_forward_that_did_not_wait_is_an_error(tmp_path):
    with Double(0):
        model, optimizer = trained(Lab("cpu", tmp_path, waits=True), 2)
        assert optimizer._opened[0].pending
        with pytest.raises(ziggurat.ZigguratError, match="from a forward that did not wait"):
            model.layers["one"].weight.sum().backward()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_state_dicts_are_torchs_both_ways(placement, tmp_path):
    """On the CPU: PyTorch moves what it loads to where the parameter is."""

    def gradients(model, number):
        for name, layer in model.layers.items():
            layer.weight.grad = lab.gradient(number, name).float()

    lab = Lab("cpu", tmp_path, placement=placement)
    with Double(1):
        ours, theirs = lab.model().float(), lab.model().float()
        optimizer = lab.optimizer(ours)
        torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for number in range(6):
            for model, each in ((ours, optimizer), (theirs, torchs)):
                gradients(model, number)
                each.step()
            if number == 2:
                state, other = optimizer.state_dict(), torchs.state_dict()
                tensors = [v for entry in state["state"].values() for v in entry.values()]
                assert all(tensor.device.type == "cpu" for tensor in tensors)
                torchs.load_state_dict(state)
                optimizer.load_state_dict(other)
        optimizer.close()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=3e-7)


def test_a_default_device_of_the_script_does_not_move_what_the_engine_reads_and_writes():
    def found(device):
        model = small_model()
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, threads=1)
        tokens = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model(tokens).sum().backward()
            next(model.parameters()).grad.zero_()
            with torch.device(device):
                optimizer.step()
                optimizer.zero_grad()
        with torch.device(device):
            state = optimizer.state_dict()["state"]
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        optimizer.close()
        moments = [its[name] for its in state.values() for name in ("exp_avg", "exp_avg_sq")]
        return moments + [param.detach() for param in model.parameters()]

    assert_same(found("meta"), found("cpu"))


def test_a_model_without_values_is_refused(tmp_path):
    model = Lab("meta", tmp_path).model()
    optimizer = ziggurat.torch.AdamW(model.parameters())
    with pytest.raises(ziggurat.InvalidArgument, match="'group0.0' is on the meta device"):
        optimizer.open()


def test_a_model_that_went_to_another_device_needs_another_optimizer(tmp_path):
    """This machine has one: the optimizer is made to remember another."""
    lab = Lab("cpu", tmp_path)
    model, optimizer = trained(lab)
    optimizer._opened[0]._kinds[0] = optimizer._opened[0]._kinds[0]._replace(
        device=torch.device("cuda:1")
    )
    weight = model.layers["one"].weight
    weight.data = weight.data.clone()
    model(1).backward()
    with pytest.raises(ziggurat.InvalidArgument, match=r"is fp32 .* now, but was fp32 .* on cuda:1"):
        optimizer.step()


def test_workers_are_pytorchs_or_beside_an_accelerator_all_cores_but_one(monkeypatch):
    params = [torch.ones(3)]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert workers_beside(params) == torch.get_num_threads()
    with Double(0):
        assert workers_beside(params) == 15
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert workers_beside(params) == 3
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
        assert workers_beside(params) == 1


class Runtime:
    """What is asked of CUDA's."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def cudart(self):
        return self

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def cudaHostRegister(self, address, size_bytes, flags):  # noqa: N802
        self.calls.append(("register", address, size_bytes))
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unregister", address))


def cuda_with(runtime, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    return Accelerator(torch.device("cuda:1"))


def test_memory_for_cuda_is_registered_with_its_size_until_no_tensor_has_it(monkeypatch):
    runtime = Runtime()
    memory = cuda_with(runtime, monkeypatch).pinned(5000)
    address = memory.data_ptr()
    part = memory[64:128].view(torch.float32).fill_(1.0)
    del memory
    assert address % 4096 == 0 and runtime.calls == [("register", address, 5000)]
    assert part.sum() == 16
    del part
    done = [("synchronize", torch.device("cuda:1")), ("unregister", address)]
    assert runtime.calls[1:] == done


def test_a_gpu_has_the_number_that_it_is_named_by(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [gpu_of(name).index for name in ("cuda:0", "cuda:1", "cuda")] == [0, 1, 1]
    assert gpu_of("cpu") is None
    with pytest.raises(ziggurat.InvalidArgument, match="sees 2 GPUs"):
        gpu_of("cuda:2")


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    accelerator = cuda_with(Runtime(status=2), monkeypatch)
    with pytest.raises(ziggurat.ResourceExhausted, match="cannot pin 5000 bytes of host memory for cuda:1"):
        accelerator.pinned(5000)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
