# SPDX-License-Identifier: Apache-2.0
"""An embedding of an offloaded model that is too large for its memory, or stays in a file: a forward reads the rows
that the batch has.

Run by pytest; as a script it exits with 77 where PyTorch, safetensors or pytest is missing, or
PyTorch is older than offload() takes.
"""

import gc
import re
import signal
import sys
import time
from pathlib import Path

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from long_cases import long, long_case
    from safetensors.torch import load_file, save_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import assert_same_run, pinned, values_of
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat import InvalidArgument
from ziggurat._memory.file_memory import is_in_file
from ziggurat._streaming.streaming import streaming_of
from ziggurat._units.units import divide
from ziggurat.torch import gathered, micro_batches, offload, streamed_init

WORDS, WIDTH, LENGTH, PADDING = 10_000, 64, 12, 3
MEMORY = 300_000  # for the root, a block and the next one; the table takes 8 times as much
IN_FILES = "params=nvme,grads=nvme"


class Model(torch.nn.Module):
    def __init__(self, words: int = WORDS, by_freq: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(words, WIDTH, padding_idx=PADDING, scale_grad_by_freq=by_freq)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)
        )
        self.last = torch.nn.Linear(WIDTH, 5)
        self.checkpointing = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x))
        return self.last(x)


def made(dtype=torch.float32, seed=1, **arguments):
    torch.manual_seed(seed)
    return Model(**arguments).to(dtype)


def tokens_of(number):
    """Some words come twice, and padding too."""
    tokens = torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(number))
    tokens[0, 0], tokens[1] = PADDING, tokens[2]
    return tokens


def loss_of(model, tokens):
    return model(tokens).float().square().mean()


def offloaded(model, **arguments):
    memory = arguments.pop("memory", MEMORY)
    assert memory < model.table.weight.nbytes / 3
    return offload(model, memory=memory, **arguments)


def steps_of(model, optimizer, steps, backwards=2):
    found = []
    for step in steps:
        for part in range(backwards):
            loss = loss_of(model, tokens_of(backwards * step + part))
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, tokens_of(1000 + step)).item())
    return found


def adamw(model, where):
    trained = [param for param in model.parameters() if param.requires_grad]
    return ziggurat.torch.AdamW(trained, lr=1e-2, weight_decay=0.1, placement=where)


@pytest.mark.parametrize(
    ("placement", "dtype", "backwards"),
    [
        ("host", torch.float32, 2),
        ("nvme", torch.float32, 2),
        ("nvme", torch.bfloat16, 1),
        long_case("nvme", torch.bfloat16, 3),
        (IN_FILES, torch.bfloat16, 2),
        long_case(IN_FILES, torch.float32, 1),
    ],
)
@pytest.mark.parametrize("by_freq", [False, long_case(True)])
def test_a_trained_table_has_the_bits_of_one_without_offload(tmp_path, placement, dtype, backwards, by_freq):
    results = []
    for offloads in (False, True):
        model = made(dtype, by_freq=by_freq)
        if offloads:
            offloaded(model, placement=placement)
            model.checkpointing = True
        optimizer = adamw(model, f"nvme:{tmp_path}/{offloads}")
        losses = steps_of(model, optimizer, range(3), backwards)
        if offloads:
            assert pinned(model) == []
            assert is_in_file(model.table.weight) == (placement != "host")
        results.append((losses, values_of(model)))
        optimizer.close()
        assert torch.equal(model.table.weight, results[-1][1]["table.weight"])
    assert_same_run(*results)


def test_state_in_host_memory_leaves_the_table_where_it_is():
    results = []
    for offloads in (False, True):
        model = made()
        address = model.table.weight.data_ptr()
        if offloads:
            offloaded(model)
        optimizer = adamw(model, "host")
        results.append((steps_of(model, optimizer, range(2)), values_of(model)))
        assert model.table.weight.data_ptr() == address
        optimizer.close()
    assert_same_run(*results)


def test_the_gradient_is_in_a_file_until_the_step(tmp_path):
    model = offloaded(made(torch.bfloat16), placement="nvme")
    optimizer = adamw(model, f"nvme:{tmp_path}")
    tokens = tokens_of(1)
    loss_of(model, tokens).backward()
    grad = model.table.weight.grad
    assert is_in_file(grad.part)
    used = tokens.unique()
    values = grad.clone()
    assert torch.equal(values.abs().sum(1).nonzero().flatten(), used[used != PADDING])
    # A graph of the gradient itself is PyTorch's own.
    found = torch.autograd.grad(loss_of(model, tokens), model.table.weight, create_graph=True)[0]
    assert found.requires_grad and torch.equal(found.detach(), values)
    del found
    optimizer.step()
    optimizer.close()


def grad_of(model, tokens):
    return torch.autograd.grad(loss_of(model, tokens), model.table.weight)[0]


def test_other_token_ids_settings_and_transforms(tmp_path, monkeypatch):
    plain, model = made(), offloaded(made(), memory=800_000, placement="nvme")
    optimizer = adamw(model, f"nvme:{tmp_path}")
    optimizer.open()
    assert is_in_file(model.table.weight)
    tokens, read = tokens_of(1), []
    monkeypatch.setattr("ziggurat._memory.frozen_files.advise", lambda begin, size, _: read.append((begin, size)))
    assert torch.equal(grad_of(model, tokens.int()), grad_of(plain, tokens))
    begin = model.table.weight.data_ptr()
    reads_table = [begin - 4096 < one < begin + model.table.weight.nbytes for one, _ in read]
    assert reads_table and all(reads_table)
    # Each of these is PyTorch's own.
    own = {name: torch.randn_like(value) for name, value in plain.named_parameters()}
    found = []
    for one in (plain, model):

        def loss(params, tokens, one=one):
            return torch.func.functional_call(one, params, (tokens,)).square().mean()

        found.append(torch.func.vmap(loss, in_dims=(None, 0))(own, tokens))
        found.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, tokens)["table.weight"])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    for one in (plain, model):
        one.table.sparse = True
    ours, theirs = grad_of(model, tokens), grad_of(plain, tokens)
    assert ours.is_sparse and torch.equal(ours.to_dense(), theirs.to_dense())
    for one in (plain, model):
        one.table.sparse, one.table.max_norm = False, 1.0
    assert torch.equal(grad_of(model, tokens), grad_of(plain, tokens))
    assert torch.equal(model.table.weight, plain.table.weight)
    optimizer.close()


def test_a_small_frozen_table_that_is_thawed_has_a_whole_gradient(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    save_file(made(words=1000).state_dict(), file)
    model, plain = made(seed=2, words=1000), made(words=1000)
    model.load_state_dict(load_file(file), assign=True)
    model.table.requires_grad_(False)
    optimizer = adamw(offload(model, memory=MEMORY, placement="nvme"), f"nvme:{tmp_path}/state")
    optimizer.open()
    model.table.requires_grad_(True)
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        assert torch.equal(*(grad_of(one, tokens_of(1) % 1000) for one in (model, plain)))
    finally:
        torch.use_deterministic_algorithms(False)
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_state_dict_is_a_copy(tmp_path, placement):
    model = offloaded(made(), placement=placement)
    optimizer = adamw(model, f"nvme:{tmp_path}")
    steps_of(model, optimizer, [0])
    state = model.state_dict()
    assert is_in_file(state["table.weight"]) == (placement == "nvme")
    before = {name: value.clone() for name, value in state.items()}
    steps_of(model, optimizer, [1])
    optimizer.synchronize()
    assert not torch.equal(model.table.weight, before["table.weight"])
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    model.load_state_dict(state)
    assert torch.equal(model.table.weight, before["table.weight"])
    optimizer.close()


def test_micro_batches_and_other_uses(tmp_path):
    def loop(model, batches, loss):
        return [(found := loss(model(*one), one), found.backward())[0].detach() for one in batches]

    results = []
    for run in (loop, micro_batches):
        model = offloaded(made(), placement="nvme")
        optimizer = adamw(model, f"nvme:{tmp_path}/{run.__name__}")
        losses = []
        for step in range(2):
            batches = [(tokens_of(3 * step + part),) for part in range(3)]
            losses += [one.item() for one in run(model, batches, lambda output, _: output.square().mean() / 3)]
            optimizer.step()
            optimizer.zero_grad()
        before = values_of(model)
        with torch.no_grad(), gathered(model.table.weight, write=True):
            model.table.weight[5] += 1.0
        losses += [one.item() for one in run(model, batches, lambda output, _: output.square().mean() / 3)]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of(model, tokens_of(0)).item())
        model.load_state_dict(before)
        results.append((losses, values_of(model)))
        assert torch.equal(model.table.weight, before["table.weight"])
        optimizer.close()
    assert_same_run(*results)


def run_until_killed(folder: str, ready: str) -> None:
    model = offloaded(made(), placement="nvme")
    optimizer = adamw(model, f"nvme:{folder}")
    steps_of(model, optimizer, range(2))
    optimizer.engine.make_durable()
    Path(ready).touch()
    steps_of(model, optimizer, range(2, 1000))


@pytest.mark.parametrize("memory", [MEMORY, long_case(2**24)])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, memory):
    """By rows, or with room for the whole table."""
    ready = tmp_path / "ready"
    with forked_runs() as runs:
        child = runs.started(run_until_killed, f"{tmp_path}/state", str(ready))
        until = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < until
            time.sleep(0.002)
        assert runs.status_after_kill(child) == -signal.SIGKILL
    model = offload(made(seed=9), memory=memory, placement="nvme")
    optimizer = adamw(model, f"nvme:{tmp_path}/state")
    optimizer.open(resume=True)
    step = optimizer.engine.generation
    assert step >= 2
    ours = steps_of(model, optimizer, range(step, step + 2))
    optimizer.close()
    model = made()
    optimizer = adamw(model, "host")
    assert ours == steps_of(model, optimizer, range(step + 2))[-len(ours) :]
    optimizer.close()


def test_checkpoints_go_on_with_the_whole_table(tmp_path):
    """Saved by rows, loaded where there is room for all, and the other way round."""
    results = []
    for memory in (MEMORY, 2**24):
        losses = []
        model = offload(made(), memory=memory, placement="nvme")
        optimizer = adamw(model, f"nvme:{tmp_path}/{memory}")
        losses += steps_of(model, optimizer, range(2))
        ziggurat.torch.save_checkpoint(tmp_path / f"saved-{memory}", optimizer, model)
        optimizer.close()
        model = offload(made(seed=2), memory=MEMORY + 2**24 - memory, placement="nvme")
        optimizer = adamw(model, f"nvme:{tmp_path}/{memory}-again")
        ziggurat.torch.load_checkpoint(tmp_path / f"saved-{memory}", optimizer, model)
        losses += steps_of(model, optimizer, range(2, 4))
        results.append((losses, values_of(model)))
        optimizer.close()
    assert_same_run(*results)


def resident(file: Path) -> int:
    """Returns how much of the mappings of `file` this process has."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    own = [entry for entry in entries if str(file) in entry.partition("\n")[0]]
    return sum(int(size) << 10 for entry in own for size in re.findall(r"^Rss: +(\d+)", entry, re.M))


@pytest.mark.parametrize("memory", [MEMORY, "1GiB"])
def test_a_frozen_table_stays_in_its_file_and_only_rows_of_it_come(tmp_path, memory):
    """Where there is room for it they stay."""
    file = tmp_path / "model.safetensors"
    save_file(made(words=4 * WORDS).state_dict(), file)
    results, seen = [], []
    for offloads in (False, True):
        model = optimizer = None
        gc.collect()  # or the mapping of the run before counts too
        model = made(seed=2, words=4 * WORDS)
        model.load_state_dict(load_file(file), assign=True)
        model.table.requires_grad_(False)
        if offloads:
            offload(model, memory=memory, placement="nvme")
            model.table.register_forward_hook(lambda *_: seen.append(resident(file)))
        optimizer = adamw(model, f"nvme:{tmp_path}/{offloads}")
        losses = steps_of(model, optimizer, range(2))
        if offloads:
            unit = streaming_of(model.table.weight)[0].units[1]
            assert unit.name == "table" and unit.unit.by_rows and not unit.held
            assert memory != MEMORY or resident(file) < 2**18
        results.append((losses, values_of(model)))
        optimizer.close()
    assert_same_run(*results)
    # The kernel maps some pages around each that is used.
    assert memory != MEMORY or 0 < min(seen) <= max(seen) < model.table.weight.nbytes * 0.7


def test_a_table_built_in_a_file_stays_there(tmp_path):
    results = []
    for offloads in (False, True):
        if offloads:
            with streamed_init(tmp_path):
                model = made()
            name = model.table.weight.untyped_storage().filename
            offloaded(model, placement="nvme")
        else:
            model = made()
        optimizer = adamw(model, f"nvme:{tmp_path}/{offloads}")
        results.append((steps_of(model, optimizer, range(2)), values_of(model)))
        assert not offloads or model.table.weight.untyped_storage().filename == name
        optimizer.close()
    assert_same_run(*results)


@long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", [False, True])
def test_in_trainer_a_run_goes_back_to_a_checkpoint(tmp_path, compiles):
    transformers = pytest.importorskip("transformers")
    import ziggurat.hf

    data = [
        {"input_ids": torch.randint(1, 20_000, (12,), generator=torch.Generator().manual_seed(i)), "labels": i % 3}
        for i in range(12)
    ]
    config = transformers.LlamaConfig(
        vocab_size=20_000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    results = []
    for offloads in (False, True):
        folder, found = tmp_path / str(offloads), []
        for seed, resumed in ((1, None), (2, str(folder / "out/checkpoint-2"))):
            torch.manual_seed(seed)
            model = transformers.LlamaForSequenceClassification(config)
            if offloads:
                offload(model, memory=1_500_000, placement="nvme")
            arguments = transformers.TrainingArguments(
                output_dir=str(folder / "out"), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2,
                logging_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
                torch_compile=compiles, torch_compile_backend="aot_eager" if compiles else None,
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
            trainer.optimizer_cls_and_kwargs = ziggurat.hf.optimizer(arguments, placement=f"nvme:{folder}/state")
            trainer.train(resume_from_checkpoint=resumed)
            names = ("loss", "eval_loss", "grad_norm")
            found += [(name, line[name]) for line in trainer.state.log_history for name in names if name in line]
            trainer.optimizer.optimizer.close()
            table = model.model.embed_tokens.weight
            assert is_in_file(table) == offloads
            found.append(table.double().sum().item())
        results.append(found)
    assert results[0] == results[1]


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.last.weight = self.table.weight


def test_what_is_no_table_alone_is_brought_whole():
    limited, sparse = made(), made()
    limited.table.max_norm, sparse.table.sparse = 1.0, True
    for model in (limited, sparse, Tied()):
        with pytest.raises(InvalidArgument, match="the smallest that works .* unit 'table' with"):
            offload(model, memory=MEMORY)


def test_a_plan_knows_it_and_no_step_moves_more(tmp_path):
    model = made()
    memory = MEMORY
    asked = {"tokens": 36, "memory": memory, "placement": "nvme", "optimizer_placement": "nvme", "accumulation": 2}
    plan = ziggurat.torch.plan(model, **asked)
    whole = ziggurat.torch.plan(model, **asked | {"memory": divide(model, "auto").smallest()[0]})
    assert plan.step.brought_forward + plan.step.brought_backward < model.table.weight.nbytes
    assert whole.step.brought_forward > model.table.weight.nbytes
    assert plan.smallest_memory_bytes <= memory < whole.smallest_memory_bytes
    assert plan.by_rows == ("table",) and "of table each batch's rows are read" in str(plan)
    offload(model, memory=memory, placement="nvme")
    optimizer = adamw(model, f"nvme:{tmp_path}")
    moved = []
    for step in range(7):
        for part in range(2):
            loss_of(model, tokens_of(2 * step + part)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.engine.make_durable()
        figures = optimizer.figures()
        moved.append((figures["nvme_read_bytes"], figures["nvme_write_bytes"]))
    assert ziggurat.torch.plan(model, tokens=36, accumulation=2).step == plan.step
    # What one step brings for the next is that one's: of two steps on average.
    read, written = (sum(one) / 4 for one in zip(*moved[3:], strict=True))
    assert read <= plan.step.read and written <= plan.step.written
    assert plan.step.state_read == figures["state_read_bytes"]
    optimizer.close()


STATE = "optimizer state that stays or is on its way"


@pytest.mark.parametrize(("placement", "frozen"), [("host", False), ("nvme", True)])
def test_a_plan_has_the_host_memory_of_the_run(tmp_path, monkeypatch, placement, frozen):
    """The engine's budget has nothing of the table, which lies in PyTorch's memory or in a file."""
    monkeypatch.setattr("ziggurat._memory.placement.free_bytes", lambda: 1 << 40)
    model = made()
    model.table.weight.requires_grad_(not frozen)
    asked = {"tokens": 36, "memory": MEMORY, "placement": placement, "free_memory": "1TiB"}
    plan = ziggurat.torch.plan(model, **asked, optimizer_placement="nvme")
    assert plan.by_rows == ("table",)
    optimizer = adamw(offloaded(model, placement=placement), f"nvme:{tmp_path}")
    optimizer.open()
    its = ziggurat.torch.plan(model, tokens=36)
    rounded = plan.in_host_memory.pop(STATE) - its.in_host_memory.pop(STATE)
    assert 0 <= rounded < 4096
    assert its.in_host_memory == plan.in_host_memory and its.on_drive == plan.on_drive
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_has_the_files_of_the_gradient(dtype):
    model = made(dtype, words=4 * WORDS)
    table = model.table.weight

    def gradients(placement, backwards, memory=MEMORY):
        plan = ziggurat.torch.plan(
            model, tokens=36, accumulation=backwards, memory=memory, placement=placement, optimizer_placement="nvme"
        )
        assert plan.by_rows == (("table",) if memory == MEMORY else ())
        return plan.in_host_memory["gradients"], plan.on_drive.get("gradients", 0)

    here, there = gradients("nvme", 1)
    assert here < table.nbytes and there == table.nbytes
    here, there = gradients("nvme", 2)  # what is added, and to what
    assert there == 2 * table.nbytes and (here > 4 * table.numel()) == (dtype == torch.bfloat16)
    assert gradients("host", 1)[0] > table.nbytes and gradients("host", 1)[1] == 0
    for backwards in (1, 2):
        whole = gradients(IN_FILES, backwards, 2**26)
        assert gradients(IN_FILES, backwards) == (whole[0], whole[1] + table.nbytes)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
