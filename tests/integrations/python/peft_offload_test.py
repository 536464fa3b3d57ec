# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT on models that are offloaded: the bits without offload(), and a base that is never written.

Run by pytest; as a script it exits with 77 where PyTorch, transformers, peft or pytest is missing, or PyTorch
is older than offload() takes.
"""

import functools
import re
import sys

try:
    import peft
    import pytest
    import torch
    import transformers
    from language_models import assert_same_bits, batches, llama, loss_of
    from long_cases import long_case
    from safetensors.torch import load_file
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import memory_of
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.hf
import ziggurat.torch
from ziggurat._memory.memory import size_of
from ziggurat._streaming.streaming import streaming_around, streaming_of
from ziggurat.torch import gathered

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")

HOMES = {"host": "host", "nvme": "params=nvme,grads=nvme"}


def base(**changes):
    return llama(vocab_size=300, num_hidden_layers=12, **changes).bfloat16()


def config(**changes):
    settings = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return peft.LoraConfig(**(settings | changes))


def adapted(model, **changes):
    torch.manual_seed(2)
    return peft.get_peft_model(model, config(**changes))


def offload(model, home):
    memory = memory_of(model)
    assert sum(param.nbytes for param in model.parameters()) > 2 * memory
    return ziggurat.torch.offload(model, memory=memory, placement=HOMES[home])


def on_nvme(model):
    return offload(model, "nvme")


def optimizer_of(model, folder, home="nvme"):
    return ziggurat.torch.AdamW(
        [param for param in model.parameters() if param.requires_grad],
        lr=1e-2,
        placement="host" if home == "host" else f"nvme:{folder}",
    )


def train(model, optimizer, steps=3):
    found = []
    torch.manual_seed(5)
    for batch in batches(steps, size=2):
        loss = loss_of(model.train(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert is_away(model) == (streaming_around(list(model.parameters())) is not None)
    return found


def evaluated(model):
    with torch.no_grad():
        return loss_of(model.eval(), batches(1)[0]).item()


def values(model):
    found = []
    for param in model.parameters():
        with gathered(param):
            found.append(param.detach().clone())
    return found


def is_away(model):
    """Whether the engine has the base, or as much of it as stays in no file."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    block = inner.model.layers[0]
    return "away" in repr(block.mlp.up_proj.weight) or "away" in repr(block.input_layernorm.weight)


def same_with_and_without(tmp_path, run, homes=("nvme",)):
    """Compares what `run(offload, home, folder)` returns: numbers, and tensors."""
    numbers, tensors = run(lambda model: model, "nvme", tmp_path / "plain")
    for home in homes:
        ours = run(functools.partial(offload, home=home), home, tmp_path / home)
        assert ours[0] == numbers
        assert_same_bits(ours[1], tensors)


ORDERS = pytest.mark.parametrize("order", ["before", "after"])  # the adapter's, and offload()'s
TIED = {"tie_word_embeddings": True}


def made(order, offload, changes=None, **settings):
    model = base(**(changes or {}))
    if order == "before":
        return offload(adapted(model, **settings))
    return adapted(offload(model), **settings)


@ORDERS
@pytest.mark.parametrize("changes", [{}, TIED], ids=["", "tied"])
def test_an_adapter_trains(order, changes, tmp_path):
    def run(offload, home, folder):
        model = made(order, offload, changes)
        optimizer = optimizer_of(model, folder, home)
        found = [*train(model, optimizer), evaluated(model)]
        found = found, values(model)
        optimizer.close()
        return found

    same_with_and_without(tmp_path, run, HOMES)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}])
def test_an_adapter_trains_with_activations_on_the_drive(checkpointing, tmp_path):
    """Each layer saves more than has room."""

    def model_of(offload):
        model = made("before", offload, {"hidden_size": 128, "intermediate_size": 512})
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        return model

    def with_activations(model):
        drive = {"activations": f"nvme:{tmp_path}", "activation_memory": "1MiB" if checkpointing is None else "256KiB"}
        return ziggurat.torch.offload(model, memory=memory_of(model), placement=HOMES["host"], **drive)

    def run(offload, home, folder):
        model = model_of(offload)
        optimizer = optimizer_of(model, folder, "host")
        torch.manual_seed(5)
        losses = []
        for batch in batches(2, size=8):
            loss = loss_of(model.train(), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moved = optimizer.figures().get("activations_written_bytes", 0)
        optimizer.close()
        return losses, values(model), moved

    plain = run(lambda model: model, "host", tmp_path / "plain")
    ours = run(with_activations, "host", tmp_path / "ours")
    assert ours[0] == plain[0] and plain[2] == 0 < ours[2]
    assert_same_bits(ours[1], plain[1])


@ORDERS
@pytest.mark.parametrize("safe", [False, True])
def test_a_base_that_stays_in_its_file_is_merged_and_unmerged(order, safe, tmp_path):
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256}
    llama(**sizes).save_pretrained(tmp_path / "base")

    def run(name):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
        offloads = name == "ours"
        if order == "after" and offloads:
            on_nvme(model)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        if order == "before" and offloads:
            on_nvme(model)
        optimizer = optimizer_of(model, tmp_path / name, "nvme")
        losses = train(model, optimizer, 2)
        model.merge_adapter(safe_merge=safe)
        losses.append(evaluated(model))
        model.unmerge_adapter()
        losses += [*train(model, optimizer, 1), evaluated(model)]
        if offloads:
            streaming = next(streaming_of(one)[0] for one in model.parameters() if streaming_of(one))
            assert streaming.files.size_bytes > streaming.size_bytes
        optimizer.close()
        return losses

    assert run("ours") == run("plain")


@ORDERS
def test_the_base_is_never_written(order, tmp_path):
    """Bytes that steps write, with a small base and a large one: the first step's opening writes it once."""
    written = []
    for size in (96, 384):
        changes = {"intermediate_size": size}
        model = made(order, on_nvme, changes, target_modules=["q_proj"])
        optimizer = optimizer_of(model, tmp_path / str(size))
        train(model, optimizer, 1)
        optimizer.engine.make_durable()
        optimizer.figures()
        train(model, optimizer, 3)
        optimizer.engine.make_durable()
        assert is_away(model)
        written.append(optimizer.figures()["nvme_write_bytes"])
        optimizer.close()
    assert written[0] == written[1] > 0


@ORDERS
@pytest.mark.parametrize("home", [long_case("host"), "nvme"])
@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_merged_and_unmerged(order, safe, home, tmp_path):
    def run(offload, home, folder):
        model = made(order, offload)
        optimizer = optimizer_of(model, folder, home)
        found = train(model, optimizer)
        unmerged = evaluated(model)
        model.merge_adapter(safe_merge=safe)
        found += [unmerged, evaluated(model)]
        assert found[-1] != unmerged  # in bf16
        merged = values(model)
        model.unmerge_adapter()
        found += [evaluated(model), *train(model, optimizer)]
        found = found, merged + values(model)
        optimizer.close()
        return found

    same_with_and_without(tmp_path, run, [home])


@ORDERS
@pytest.mark.parametrize("what", ["merge_and_unload", "unload"])
@pytest.mark.parametrize("changes", [{}, TIED], ids=["", "tied"])
def test_an_adapter_goes(order, what, changes, tmp_path):
    def run(offload, home, folder):
        model = made(order, offload, changes)
        optimizer = optimizer_of(model, folder, home)
        found = train(model, optimizer)
        model = getattr(model, what)()
        found.append(evaluated(model))
        found = found, values(model)
        optimizer.close()
        return found

    same_with_and_without(tmp_path, run)


@ORDERS
def test_two_adapters_with_an_optimizer_each(order, tmp_path):
    def run(offload, home, folder):
        model = base()
        if order == "before":
            model = adapted(model)
            model.add_adapter("other", config(r=2))
            model = offload(model)
        else:
            model = adapted(offload(model))
            model.add_adapter("other", config(r=2))
        model.set_adapter("default")
        first = optimizer_of(model, folder / "1", home)
        found = [*train(model, first), evaluated(model)]
        with model.disable_adapter():
            found.append(evaluated(model))
        first.close()
        model.set_adapter("other")
        found.append(evaluated(model))
        second = optimizer_of(model, folder / "2", home)
        found += [*train(model, second), evaluated(model)]
        model.set_adapter("default")
        found.append(evaluated(model))
        kept = values(model)
        second.close()
        return found, kept

    same_with_and_without(tmp_path, run)


def two_adapters():
    model = adapted(base())
    model.add_adapter("other", config(r=2))
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name)
    return model


def test_one_optimizer_trains_two_adapters_in_turn(tmp_path):
    def run(offload, home, folder):
        model = offload(two_adapters())
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        optimizer = ziggurat.torch.AdamW(named, lr=1e-2, placement=f"nvme:{folder}")
        optimizer.open()  # while both are trained
        found = []
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            found += [*train(model, optimizer), evaluated(model)]
        kept = values(model)
        optimizer.close()
        return found, kept

    same_with_and_without(tmp_path, run)


def test_an_adapter_that_was_frozen_when_the_engine_opened_is_refused(tmp_path):
    model = two_adapters()
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    model.set_adapter("default")
    offload(model, "nvme")
    optimizer = ziggurat.torch.AdamW(named, lr=1e-2, placement=f"nvme:{tmp_path}")
    train(model, optimizer)
    model.set_adapter("other")
    with pytest.raises(ziggurat.Unimplemented, match="lora_A.other.* one optimizer all parameters"):
        train(model, optimizer)


@ORDERS
@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"]], ids="-".join)
def test_modules_to_save(order, saved, tmp_path):
    def run(offload, home, folder):
        model = made(order, offload, modules_to_save=saved)
        optimizer = optimizer_of(model, folder, home)
        found = [*train(model, optimizer), evaluated(model)]
        kept = values(model)
        optimizer.close()
        return found, kept

    same_with_and_without(tmp_path, run)


@ORDERS
def test_an_adapter_is_saved_and_loaded(order, tmp_path):
    def run(offload, home, folder):
        model = made(order, offload)
        optimizer = optimizer_of(model, folder / "state", home)
        found = [*train(model, optimizer), evaluated(model)]
        model.save_pretrained(folder / "adapter")
        kept = values(model)
        optimizer.close()
        model = base() if order == "before" else offload(base())
        model = peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
        model = offload(model) if order == "before" else model
        found.append(evaluated(model))
        optimizer = optimizer_of(model, folder / "more", home)
        found += [*train(model, optimizer), evaluated(model)]
        model.load_adapter(folder / "adapter", "default", is_trainable=True)  # over what was trained
        found.append(evaluated(model))
        assert found[-1] == found[3]
        optimizer.close()
        return found, kept

    same_with_and_without(tmp_path, run)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_are_saved_and_generate(kind, tmp_path):
    """Their parameters are used outside of the model's call."""

    def run(offload, home, folder):
        torch.manual_seed(2)
        settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
        model = offload(peft.get_peft_model(base(), getattr(peft, kind)(**settings)))
        optimizer = optimizer_of(model, folder / "state", home)
        found = []
        for batch in batches(3, size=2):
            loss = model.train()(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        model.save_pretrained(folder / "prompts")
        with torch.no_grad():
            found += model.eval().generate(input_ids=batches(1)[0][:, :8], max_new_tokens=3, do_sample=False).tolist()
        kept = [*values(model), *load_file(folder / "prompts" / "adapter_model.safetensors").values()]
        optimizer.close()
        return found, kept

    same_with_and_without(tmp_path, run)


@ORDERS
def test_trainer_goes_on_from_an_adapters_checkpoint(order, tmp_path):
    def trainer_of(offload, home, folder):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        texts = [{"input_ids": one[0], "labels": one[0]} for one in batches(12, size=1)]
        trainer = transformers.Trainer(made(order, offload), arguments, train_dataset=texts)
        where = "host" if home == "host" else f"nvme:{folder}/state"
        trainer.optimizer_cls_and_kwargs = ziggurat.hf.optimizer(arguments, placement=where)
        return trainer

    def run(offload, home, folder):
        found, kept = [], []
        for resumed in (None, str(folder / "out/checkpoint-2")):
            trainer = trainer_of(offload, home, folder)
            trainer.train(resume_from_checkpoint=resumed)
            found += [line["loss"] for line in trainer.state.log_history if "loss" in line]
            kept.append(values(trainer.model))
            trainer.optimizer.optimizer.close()
        assert_same_bits(*kept)
        return found, kept[0]

    same_with_and_without(tmp_path, run, HOMES)


@pytest.mark.parametrize("saved", [["lm_head"], long_case(["embed_tokens", "lm_head"])], ids="-".join)
def test_trainer_ends_with_the_best_of_an_adapter_with_modules_to_save(saved, tmp_path):
    """Also if it goes on from a checkpoint, into the store of a later step. The folder of its state has what is
    trained, and no base."""

    def trainer_of(offload, home, folder):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=6,
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # the loss falls, and so the first checkpoint is the best
            logging_steps=1,
            learning_rate=0.005,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        texts = [{"input_ids": one[0], "labels": one[0]} for one in batches(12, size=1)]
        model = made("before", offload, modules_to_save=saved)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:4])
        where = "host" if home == "host" else f"nvme:{folder}/state"
        trainer.optimizer_cls_and_kwargs = ziggurat.hf.optimizer(arguments, placement=where)
        return trainer

    def run(offload, home, folder):
        found, kept = [], []
        for resumed in (None, str(folder / "out/checkpoint-2")):
            trainer = trainer_of(offload, home, folder)
            trainer.train(resume_from_checkpoint=resumed)
            lines = trainer.state.log_history
            found += [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]
            found.append(trainer.state.best_global_step)
            kept.append(values(trainer.model))
            trainer.optimizer.optimizer.close()
        assert found[-1] == 2
        assert_same_bits(*kept)
        return found, kept[0]

    same_with_and_without(tmp_path, run)
    (shards,) = (tmp_path / "nvme/out/checkpoint-4/ziggurat").glob("step-*")
    names = {name for shard in shards.glob("*.safetensors") for name in load_file(shard)}
    assert all("lora" in name or "modules_to_save" in name for name in names)


def test_a_token_says_what_it_reads(tmp_path, capfd):
    model = made("before", on_nvme)
    optimizer = optimizer_of(model, tmp_path)
    train(model, optimizer)
    evaluated(model)
    said = []
    for _ in range(2):
        optimizer.figures()
        prompt = batches(1)[0][:1, :4]
        tokens = model.generate(
            input_ids=prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        assert tokens.shape[1] == 4 + 6
        read = optimizer.figures()["nvme_read_bytes"]
        said += re.findall(r"each token reads (\S+ \SiB) of parameters from", capfd.readouterr().err)
    (size,) = said  # once
    # Units stay from one token to the next as memory happens to allow.
    assert size_of(size) == pytest.approx(read / 6, rel=0.2)


def test_an_adapter_comes_to_a_model_that_trains(tmp_path):
    def run(offload, home, folder):
        model = offload(base())
        optimizer = optimizer_of(model, folder, home)
        found = train(model, optimizer)
        model = adapted(model)
        found.append(evaluated(model))
        for layer in model.modules():
            if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                with gathered(layer.parameters(), write=True):
                    layer.merge()
        found.append(evaluated(model))
        kept = values(model)
        optimizer.close()
        return found, kept

    same_with_and_without(tmp_path, run)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
