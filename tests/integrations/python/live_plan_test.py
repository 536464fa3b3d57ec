# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.plan() of a module and a batch: the peak of a step is what PyTorch's allocator counts.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

try:
    import numpy
    import pytest
    import torch
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument
from ziggurat._memory.memory import size_text

MOST = 1.05  #: of what is measured, that a plan may say


def square(output, batch):
    return output.float().square().mean()


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(16, 48, num_layers=2, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(96, 384), torch.nn.GELU(), torch.nn.Linear(384, 96)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Contrasts(torch.nn.Module):
    """Compares each row of a batch with each other, so that its logits grow with the square of the rows."""

    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(32, 16), torch.nn.Linear(32, 16)

    def forward(self, x):
        return (self.image(x) @ self.text(x).T).softmax(-1)


class Distances(torch.nn.Module):
    """Measures how far rows are from others, for which PyTorch has one kernel up to 25 rows and another beyond."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.randn(400, 64))

    def forward(self, x):
        return torch.cdist(self.linear(x), self.other)


def mlp(dtype=torch.float32, width=256):
    layers = [torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 10)).to(dtype)


def half_frozen():
    made = mlp()
    made[0].requires_grad_(False)
    return made


def tied():
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    made[2].weight = made[0].weight
    return made


def conv():
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16 * 12 * 12, 7))


def rows(*shape):
    return lambda count: torch.randn(count, *shape)


CASES = {
    "MLP": (mlp, rows(64), 64, {}),
    "MLP, 3 rows": (mlp, rows(64), 3, {}),
    "MLP in bf16": (lambda: mlp(torch.bfloat16), lambda count: torch.randn(count, 64).bfloat16(), 32, {}),
    "MLP, sgd": (mlp, rows(64), 500, {"optimizer": torch.optim.SGD}),
    "MLP, sgd with momentum": (mlp, rows(64), 1, {"optimizer": lambda p: torch.optim.SGD(p, momentum=0.9, lr=0.1)}),
    "MLP, foreach": (mlp, rows(64), 8, {"optimizer": lambda p: torch.optim.AdamW(p, foreach=True)}),
    "MLP, fused": (mlp, rows(64), 8, {"optimizer": lambda p: torch.optim.AdamW(p, fused=True)}),
    "MLP, rmsprop": (mlp, rows(64), 8, {"optimizer": torch.optim.RMSprop}),
    "MLP, adafactor": (mlp, rows(64), 8, {"optimizer": torch.optim.Adafactor}),
    "MLP, 3 backwards": (mlp, rows(64), 64, {"accumulation": 3}),
    "half frozen": (half_frozen, rows(64), 64, {}),
    "tied": (tied, rows(64), 64, {}),
    "convolution": (conv, rows(3, 12, 12), 32, {}),
    "LSTM": (Recurrent, rows(11, 16), 20, {}),
    "checkpointed": (Checkpointed, rows(10, 96), 24, {}),
    "contrasts": (Contrasts, rows(32), 300, {}),
    "distances of 20 rows": (Distances, rows(64), 20, {}),
    "distances of 30 rows": (Distances, rows(64), 30, {}),
    "distances of 300 rows": (Distances, rows(64), 300, {}),
}


def peak_of(model, batch, optimizer, accumulation, loss=square):
    """Returns what PyTorch's allocator has given at most in a step, the third, by its public profiler."""

    def step():
        for _ in range(accumulation):
            its = loss(called(model, batch), batch)
            its.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    state = [value for its in optimizer.state.values() for value in its.values() if torch.is_tensor(value)]
    # Tokens may be labels too.
    given = {id(one): one for one in (batch.values() if isinstance(batch, dict) else [batch])}
    there = [*model.parameters(), *model.buffers(), *state, *given.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    changes = [(one.start_ns(), one.nbytes()) for one in events]
    held = most = 0
    for _, size_bytes in sorted(changes, key=lambda one: one[0]):
        held += size_bytes
        most = max(most, held)
    return sum(one.nbytes for one in there) + most


def called(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def check(model, batch, optimizer=torch.optim.AdamW, accumulation=1, loss=square):
    optimizer = optimizer([one for one in model.parameters() if one.requires_grad])
    plan = ziggurat.torch.plan(model, batch, optimizer, loss=loss, accumulation=accumulation)
    measured = peak_of(model, batch, optimizer, accumulation, loss)
    assert measured <= plan.peak_bytes <= MOST * measured, f"{plan.peak_bytes / measured:.4f}\n{plan}"
    assert sum(plan.held.lines().values()) == plan.peak_bytes
    return plan


@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_a_step_holds_at_most(name):
    torch.manual_seed(1)
    make, batch, count, how = CASES[name]
    check(make(), batch(count), **how)


OPERATIONS = "logits, loss, and what operations take"


def computes_bf16_in_fp32():
    """Whether products in bf16 take copies in fp32: with AVX-512, but without its bf16."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_avx512_bf16_supported()


def test_a_plan_by_shapes_is_near():
    torch.manual_seed(1)
    for make, batch, count, _ in CASES.values():
        if make is Recurrent:  # on the CPU a library computes it, which keeps more
            continue
        model = make()
        seen = ziggurat.torch.plan(model, batch(count), "sgd", loss=square)
        told = ziggurat.torch.plan(model.to("meta"), batch(count), "sgd", loss=square)
        assert "shapes" in told.by
        found, known = seen.peak_bytes, told.peak_bytes
        if "bfloat16" in told.by_dtype and computes_bf16_in_fp32():  # shapes alone do not tell
            found, known = (plan.peak_bytes - plan.held.lines().get(OPERATIONS, 0) for plan in (seen, told))
        assert 0.7 * found < known < 1.3 * found, f"{make}: {told}\n{seen}"


def test_gradients_that_have_no_room_are_planned_by_shapes(monkeypatch):
    monkeypatch.setattr("ziggurat._plan.live_plan.free_bytes", lambda: 64 << 10)
    plan = ziggurat.torch.plan(mlp(), torch.randn(8, 64), loss=square, free_memory="80GiB")
    assert "no room for gradients" in plan.by
    assert plan.strategies[0].fits
    assert not ziggurat.torch.plan(mlp(), torch.randn(8, 64), loss=square, free_memory="64KiB").strategies[0].fits


def test_what_does_not_fit_says_how_much_is_too_much():
    plan = ziggurat.torch.plan(mlp(), torch.randn(8, 64), loss=square, free_memory="64KiB")
    plain = plan.strategies[0]
    assert f"{size_text(plain.bytes - (64 << 10))} too much" in str(plan)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_steps_that_have_no_room_are_planned_by_shapes(error):
    seen = []

    class Large(torch.nn.Linear):
        def forward(self, x):
            if not x.is_meta:
                seen.append(len(x))
                if len(x) > 3:
                    raise error("no")
            return super().forward(x)

    plan = ziggurat.torch.plan(Large(64, 64), torch.randn(32, 64), loss=square)
    assert "no room for a step" in plan.by
    assert max(seen) < 32


def test_rows_of_a_data_set_are_counted_alone():
    every = torch.randn(100_000, 64)
    plan = check(mlp(), every[:32])
    assert plan.held.batch == every[:32].nbytes
    wide = ziggurat.torch.plan(mlp(), torch.zeros(1, 64).expand(32, 64), loss=square)
    assert wide.held.batch == 64 * 4


def test_a_gpt_of_ranks_and_of_a_machine():
    torch.manual_seed(1)
    model = gpt()
    tokens = torch.randint(0, 32, (12, 16))
    plan = ziggurat.torch.plan(model, tokens, loss=square, ranks=4)
    held = {one.strategy: one.bytes for one in plan.strategies}
    order = ["FSDP (ZeRO-3)", "ZeRO-2", "ZeRO-1", "DDP"]
    assert [held[name] for name in order] == sorted(held[name] for name in order)
    assert held["plain"] == plan.peak_bytes
    named = ziggurat.torch.plan(model, tokens, loss=square, machine="h100x8")
    assert named.machine == "h100x8" and named.strategies[0].room > 70e9
    assert "fits" in str(named)
    with pytest.raises(InvalidArgument, match="h100x8"):
        ziggurat.torch.plan(model, tokens, loss=square, machine="no such machine")


def test_what_cannot_be_planned_is_refused():
    model, batch = mlp(), torch.randn(8, 64)
    with pytest.raises(InvalidArgument, match="loss="):
        ziggurat.torch.plan(model, batch)
    with pytest.raises(InvalidArgument, match="memory"):
        ziggurat.torch.plan(model, batch, memory=1)
    with pytest.raises(InvalidArgument, match="tokens="):
        ziggurat.torch.plan(model)
    with pytest.raises(InvalidArgument, match="no such optimizer"):
        ziggurat.torch.plan(model, batch, "adamx", loss=square)
    with pytest.raises(InvalidArgument, match="closure"):
        ziggurat.torch.plan(model, batch, "lbfgs", loss=square)
    with pytest.raises(InvalidArgument, match="profiler"), profile(activities=[ProfilerActivity.CPU]):
        ziggurat.torch.plan(model, batch, loss=square)


class Constant(torch.nn.Linear):
    def forward(self, x):
        return torch.ones(())


#: What is given in place of a model, batch and arguments of its own, and words of the refusal.
REFUSED = {
    "no module": ({"model": "gpt2"}, "the model is a str"),
    "no tensor": ({"batch": numpy.zeros((8, 64))}, "ndarray, has no tensor"),
    "no tensor in it": ({"batch": {"x": 1}}, "dict, has no tensor"),
    "no rows": ({"batch": torch.zeros(0, 64)}, "no rows"),
    "another model's optimizer": ({"optimizer": torch.optim.SGD(mlp().parameters())}, "no parameter of the model"),
    "no function": ({"loss": "mse"}, "loss is a str"),
    "a constant": ({"model": Constant(64, 64), "loss": lambda output, batch: output}, "depends on no parameter"),
    "a half": ({"accumulation": 1.5}, "accumulation=1.5"),
    "a text": ({"ranks": "2"}, "ranks='2'"),
    "two memories": ({"machine": "h100x8", "free_memory": "1GiB"}, "one of the two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_is_asked_wrongly_is_refused_by_name(name):
    its, words = REFUSED[name]
    asked = {"model": mlp(), "batch": torch.randn(8, 64), "optimizer": "adamw", "loss": square} | its
    with pytest.raises(InvalidArgument, match=words):
        ziggurat.torch.plan(asked.pop("model"), asked.pop("batch"), asked.pop("optimizer"), **asked)


def test_there_is_no_plan_where_there_is_no_backward():
    with pytest.raises(InvalidArgument, match="inference_mode"), torch.inference_mode():
        ziggurat.torch.plan(mlp(), torch.randn(8, 64), loss=square)


def test_a_batch_of_shapes_is_planned_by_shapes():
    plan = ziggurat.torch.plan(mlp(), torch.randn(8, 64, device="meta"), loss=square)
    assert "by shapes" in plan.by


class InOneMemory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        both = torch.randn(2, 64, 64)
        self.one, self.other = torch.nn.Parameter(both[0]), torch.nn.Parameter(both[1])

    def forward(self, x):
        return x @ self.one @ self.other


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.scale = torch.nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale


#: What offload() refuses, and a word of its reason.
NOT_OFFLOADED = {
    "float64": (lambda: mlp(torch.float64), lambda count: torch.randn(count, 64).double(), "float64"),
    "int8": (Quantized, rows(64), "int8"),
    "channels last": (lambda: conv().to(memory_format=torch.channels_last), rows(3, 12, 12), "order of its indices"),
    "one memory": (InOneMemory, rows(64), "memory"),
}


@pytest.mark.parametrize("name", NOT_OFFLOADED)
def test_what_offload_refuses_is_planned_without_its_rows(name):
    torch.manual_seed(1)
    make, batch, why = NOT_OFFLOADED[name]
    plan = check(make(), batch(32))
    assert [one.strategy for one in plan.strategies] == ["plain"]
    assert why in plan.no_offload
    assert f"offload() is left out: {plan.no_offload}" in str(plan)


def test_the_page_says_the_mode():
    model, batch = mlp(), torch.randn(16, 64)
    assert "\nin train mode\n" in str(ziggurat.torch.plan(model, batch, loss=square))
    plan = ziggurat.torch.plan(model.eval(), batch, loss=square)
    assert not plan.trains
    assert "in eval mode, without dropout" in str(plan)


def test_importing_does_not_load_what_a_plan_records_with():
    ours = "[m for m in sys.modules if 'ziggurat' in m and ('live_' in m or 'recorded_' in m)]"
    program = f"import sys, ziggurat.torch; print({ours})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt2 with checkpoints", "llama in bf16"])
def test_models_of_hugging_face(name):
    models = pytest.importorskip("language_models")
    model = (models.gpt2 if "gpt2" in name else models.llama)()
    if "checkpoints" in name:
        model.gradient_checkpointing_enable()
    if "bf16" in name:
        model.bfloat16()
    tokens = models.batches(1, size=10)[0]
    check(model, {"input_ids": tokens, "labels": tokens}, loss=lambda output, batch: output.loss)


RESIDENT = """
import json, sys, torch
sys.path.insert(0, {folder!r})
from live_plan_test import mlp, square
import ziggurat.torch
from ziggurat._memory.memory import return_freed

def of(name):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))

def train(width, rows, steps):
    torch.manual_seed(1)
    model, batch = mlp(width=width), torch.randn(rows, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = ziggurat.torch.plan(model, batch, optimizer, loss=square)
    for _ in range(steps):
        square(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plan.peak_bytes

train(32, 64, 2)  # what libraries load and keep
return_freed()
begin = of("VmRSS")
print(json.dumps([train(1536, 4096, 3), of("VmHWM") - begin]))
"""
#: of a process beside PyTorch's tensors: oneDNN's and MKL's own, and what the C library keeps of freed memory if it is
#: told to give back what is larger than a page or so; by itself it keeps pieces of up to 32 MiB as they happen to lie
LIBRARY_BYTES = 24 << 20
SMALL = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def test_a_process_takes_so_much():
    program = RESIDENT.format(folder=str(Path(__file__).parent))
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | SMALL)
    planned, taken = json.loads(found.stdout)
    assert taken - LIBRARY_BYTES <= planned <= MOST * taken, (planned, taken)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
