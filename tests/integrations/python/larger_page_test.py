# SPDX-License-Identifier: Apache-2.0
"""The programs of MODELS_LARGER_THAN_MEMORY.md run with a small model: a run that is killed and started again ends
with the bytes of one that is not, adapters train too, and the plan that the page shows is what its program prints.

larger_page_test.py PAGE [--write]: with --write the page's plan is made anew. Exits with 77 where PyTorch,
transformers or accelerate is missing, or PyTorch is older than offload() takes. What needs peft or TRL is left out without
them, which a line says.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import time
from pathlib import Path

try:
    import accelerate  # noqa: F401, which Trainer needs
    import torch
    import transformers
    from forked_runs import Runs, forked_runs
    from language_models import llama
    from streamed_models import memory_of
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, Trainer  # noqa: F401, so that each run need not import them
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.hf  # noqa: F401, for the runs too

ROOT = Path(__file__).parents[3]
page = Path(sys.argv[1]).read_text()
TEXT = 32 * 17  # bytes: 8 steps of 2 pieces, and a rest that is left
problems: list[str] = []


def block_of(section: str, kind: str = "python") -> str:
    found = re.search(rf"^#+ {re.escape(section)}\n.*?```{kind}\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    if found is None:
        sys.exit(f"{sys.argv[1]}: '{section}' has no block of {kind}")
    return found[1]


def replaced(program: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        if old not in program:
            sys.exit(f"{sys.argv[1]}: a program has no '{old}'")
        program = program.replace(old, new)
    return program


def plan_of(program: str) -> ziggurat.torch.Plan:
    printed: list[ziggurat.torch.Plan] = []
    exec(program, {"print": printed.append})
    return printed[0]


def check_plan() -> None:
    program, shown = (block_of("1. Ask what it takes", kind) for kind in ("python", "text"))
    plan = plan_of(program)
    if "--write" in sys.argv:
        Path(sys.argv[1]).write_text(page.replace(shown, f"{plan}\n"))
        sys.exit()
    if f"{plan}\n" != shown:
        problems.append(f"its plan is now, and --write makes it so:\n{plan}")
    taking_turns = plan_of(replaced(program, {"tokens=4096, accumulation=8": "tokens=8 * 4096"}))
    moved = [(one.step.read + one.step.written) / (1 << 30) for one in (taking_turns, plan)]
    said = "the drive moves {:.0f} GiB a step, where Trainer's loop moves\n{:.0f} GiB".format(*moved)
    if said not in page:
        problems.append(f"it does not say: {said}")


def save_model(folder: Path) -> int:
    """Saves a small model with a tokenizer that takes bytes. Returns the memory with which its units come and go."""
    model = llama(num_hidden_layers=6, hidden_size=128, intermediate_size=384).bfloat16()
    model.save_pretrained(folder)
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="!", pad_token="!").save_pretrained(folder)
    return memory_of(model)


def run(program: str, folder: Path) -> None:
    """Runs it as a script of its own would."""
    with (folder / "said.txt").open("a", buffering=1) as said:
        torch.set_num_threads(1)
        sys.argv = ["train.py", str(folder.parent / "model"), str(folder.parent / "text.txt"), str(folder)]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})


def finished(runs: Runs, program: str, folder: Path) -> Path:
    """Returns what a run has saved."""
    folder.mkdir(exist_ok=True)
    if runs.status_of(runs.started(run, program, folder), within=120) != 0:
        sys.exit(f"a program of {sys.argv[1]} failed:\n{(folder / 'said.txt').read_text()}\n{program}")
    return folder / "trained"


def killed(runs: Runs, program: str, folder: Path) -> None:
    """Kills a run when it has made 3 steps."""
    folder.mkdir()
    child = runs.started(run, program, folder)
    until = time.monotonic() + 120
    said = folder / "said.txt"
    while time.monotonic() < until and not (said.exists() and losses(said.read_text()) >= 3):
        time.sleep(0.002)
    runs.status_after_kill(child)
    if (folder / "trained").exists():
        problems.append(f"the run in {folder.name} was not killed: it had ended")


def check_saved(where: Path, name: str) -> None:
    """Looks at what a run has saved."""
    made = losses((where / name / "said.txt").read_text())
    if made < 6:
        problems.append(f"the run of {name} made {made} steps")
    values, base = (
        transformers.AutoModelForCausalLM.from_pretrained(where / path, dtype="auto").state_dict()
        for path in (f"{name}/trained", "model")
    )
    if not all(value.isfinite().all() for value in values.values()):
        problems.append(f"what {name} saves is not finite")
    if all(torch.equal(value, base[key]) for key, value in values.items()):
        problems.append(f"{name} has trained nothing")


def check_kill(runs: Runs, where: Path, name: str, program: str) -> None:
    """Compares what a run has saved with what one that was killed and started again saves."""
    killed(runs, program, where / f"{name}-killed")
    again = finished(runs, program, where / f"{name}-killed")
    for file in sorted((where / name / "trained").glob("*.safetensors")):
        if file.read_bytes() != (again / file.name).read_bytes():
            problems.append(f"a run of {name} that was killed has another {file.name} than one that was not")


def losses(said: str) -> int:
    return len(re.findall(r"'loss':|^step \d+: loss", said, re.MULTILINE))


def leaves_out(part: str, package: str) -> bool:
    """Returns whether a part is not run, and says so, because a package is missing."""
    missing = importlib.util.find_spec(package) is None
    if missing:
        print(f"skipped in part: {part}, because {package} is missing", flush=True)
    return missing


def check_adapters(runs: Runs, where: Path, name: str, program: str) -> None:
    if leaves_out(f"the adapters of {name}", "peft"):
        return
    at = "model = ziggurat.torch.offload("
    folder = where / f"{name}-adapters"
    saved = finished(runs, replaced(program, {at: f"{block_of('LoRA')}{at}"}), folder)
    if not (saved / "adapter_model.safetensors").exists() or (saved / "model.safetensors").exists():
        problems.append(f"{name} with adapters saves {os.listdir(saved)}")
    if "stay in their own files" not in (folder / "said.txt").read_text():
        problems.append(f"the base of {name}'s adapters does not stay in its files")


def check_trl(runs: Runs, where: Path, program: str) -> None:
    if leaves_out("SFTTrainer", "trl"):
        return
    before, _, _ = program.partition("model = ziggurat.torch.offload(")
    rows = """import pyarrow
from datasets import Dataset, table
rows = pyarrow.table({"input_ids": [piece.tolist() for piece in pieces[:12]]})
dataset = Dataset(table.InMemoryTable(rows), fingerprint="it")
"""
    own = {'output_dir=f"{run}/out"': 'output_dir=f"{run}/out", report_to=[], max_length=None, dataset_kwargs={"skip_prepare_dataset": True}'}
    theirs = replaced(block_of("TRL's SFTTrainer"), own)
    finished(runs, before + rows + theirs + 'model.save_pretrained(f"{run}/trained")\n', where / "trl")


def main() -> None:
    check_plan()
    with tempfile.TemporaryDirectory() as folder, forked_runs() as runs:
        where = Path(folder)
        memory = save_model(where / "model")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        (where / "text.txt").write_text((ROOT / "LICENSE").read_text()[:TEXT])
        small = {'MEMORY, TOKENS = "16GiB", 4096': f"MEMORY, TOKENS = {memory}, 32", 'host_memory="16GiB"': 'host_memory="64MiB"'}
        trainer = replaced(block_of("2. Train in Trainer"), small | {"accumulation_steps=8": "accumulation_steps=2"})
        loop = replaced(block_of("3. Fewer bytes: micro-batches"), small | {", batch_size=8": ", batch_size=2"})
        for name, program in (("trainer", trainer), ("loop", loop)):
            finished(runs, program, where / name)
            check_saved(where, name)
            check_kill(runs, where, name, program)
            more = program.replace(f" {memory}, 32", f" {3 * memory // 2}, 32")
            check_adapters(runs, where, name, more)
        check_trl(runs, where, trainer.replace(f" {memory}, 32", f" {3 * memory // 2}, 32"))
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
