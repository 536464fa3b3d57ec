#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_checkpoint_peers_test.py: our checkpoints, read by safetensors and PyTorch's distributed checkpoint; and
# weights of others, read by us.
"""    python3 cli_checkpoint_peers_test.py BINARY

Weights that transformers saved, or a package ships, are loaded, kept as a checkpoint, and given back with every bit.

Two ranks save; each reader finds every tensor whole, with the bits that `ziggurat ckpt to-hf` writes. Nothing of Ziggurat is
imported. Exits with 77, saying why, where PyTorch or safetensors cannot be imported.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

SKIPPED = 77


def train(binary, folder, name, *more):
    data = f"{folder}/text.txt"
    with open(data, "w") as file:
        file.write("In the beginning was the word, and the word was long. " * 400)
    command = [binary, "train", "--model", "2x64x2", "--data", data, "--store", f"{folder}/{name}-store"]
    command += ["--batch", "2", "--accumulate", "2", "--context", "32", "--device-memory", "8MiB", "--host-memory", "16MiB"]
    subprocess.run([*command, "--checkpoint-dir", f"{folder}/{name}", *more], check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/{name}"


def ckpt(binary, *arguments):
    subprocess.run([binary, "ckpt", *arguments], check=True, stdout=subprocess.DEVNULL)


def manifest_of(checkpoint):
    with open(f"{checkpoint}/manifest.json") as file:
        return json.load(file)


def by_shards(checkpoint, torch, safe_open):
    """Every tensor, put together from the boxes that each shard says it has."""
    whole = {name: torch.full(shape, float("nan")) for name, _, _, _, shape in manifest_of(checkpoint)["content"]["tensors"]}
    for name in sorted(os.listdir(checkpoint)):
        if not name.endswith(".safetensors"):
            continue
        with safe_open(f"{checkpoint}/{name}", framework="pt") as shard:
            places = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
            for key in shard.keys():
                piece = shard.get_tensor(key)
                box = tuple(slice(o, o + n) for o, n in zip(places[key]["saved_offsets"], piece.shape))
                whole[key][box] = piece
    return whole


def by_dcp(checkpoint, torch):
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    import torch.distributed.checkpoint as dcp

    state = {name: torch.full(shape, float("nan")) for name, _, _, _, shape in manifest_of(checkpoint)["content"]["tensors"]}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(checkpoint), no_dist=True)
    return state


def main():
    binary = sys.argv[1]
    try:
        import torch
        from safetensors import safe_open
        from safetensors.torch import load_file
        from torch.distributed.checkpoint import HuggingFaceStorageReader  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = train(binary, folder, "run", "--steps", "3", "--nproc", "2", "--zero-stage", "3") + "/step-000000003"
        ckpt(binary, "to-hf", checkpoint, f"{folder}/hf")
        masters = load_file(f"{folder}/hf/model.safetensors")
        shards = by_shards(checkpoint, torch, safe_open)
        assert len(shards) == 3 * len(masters), (len(shards), len(masters))
        readers = {"safetensors": shards, "torch.distributed.checkpoint": by_dcp(checkpoint, torch)}
        for reader, tensors in readers.items():
            for name, tensor in tensors.items():
                assert not torch.isnan(tensor).any(), f"{reader}: {name} is not whole"
                assert torch.equal(tensor, shards[name]), f"{reader}: {name}"
            for name, master in masters.items():
                assert torch.equal(tensors[name], master), f"{reader}: {name} is not what to-hf wrote"
            print(f"{reader}: {len(tensors)} tensors, every bit")
        check_transformers(folder, masters, torch)
        check_weights_of_transformers(binary, folder)
        check_shipped_model(binary, folder)
    return 0


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert ours[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def check_weights_of_transformers(binary, folder):
    """Several files and an index; a step of a learning rate of zero changes none of them."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        print(f"weights of transformers not tried: {error}")
        return
    from safetensors.torch import load_file

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(f"{folder}/theirs", max_shard_size="100KB")
    assert os.path.exists(f"{folder}/theirs/model.safetensors.index.json")
    theirs = {}
    for file in sorted(os.listdir(f"{folder}/theirs")):
        if file.endswith(".safetensors"):
            theirs |= load_file(f"{folder}/theirs/{file}")
    ckpt(binary, "from-hf", f"{folder}/theirs", f"{folder}/kept")
    ckpt(binary, "verify", f"{folder}/kept")
    ckpt(binary, "to-hf", f"{folder}/kept", f"{folder}/back")
    same_bits(load_file(f"{folder}/back/model.safetensors"), theirs)
    with open(f"{folder}/theirs/config.json") as before, open(f"{folder}/back/config.json") as after:
        assert json.load(before) == json.load(after)
    idle = ["--steps", "1", "--lr", "0", "--weight-decay", "0", "--warmup", "0"]
    ours = train(binary, folder, "loaded", *idle, "--load", f"{folder}/theirs", "--load-weights")
    ckpt(binary, "to-hf", ours, f"{folder}/trained")
    same_bits(
        load_file(f"{folder}/trained/model.safetensors"),
        {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()},
    )
    print(f"weights of transformers: {len(theirs)} tensors in and out, every bit")


def check_shipped_model(binary, folder):
    package = importlib.util.find_spec("silero_vad")
    if package is None:
        print("a shipped model not tried: there is no silero_vad")
        return
    from safetensors.torch import load_file

    theirs = f"{os.path.dirname(package.origin)}/data/silero_vad_16k.safetensors"
    ckpt(binary, "from-hf", theirs, f"{folder}/shipped")
    ckpt(binary, "diff", theirs, f"{folder}/shipped")
    ckpt(binary, "to-hf", f"{folder}/shipped", f"{folder}/shipped-back")
    same_bits(load_file(f"{folder}/shipped-back/model.safetensors"), load_file(theirs))
    print("a shipped model: in and out, every bit")


def check_transformers(folder, masters, torch):
    try:
        from transformers import GPT2LMHeadModel
    except ImportError as error:
        print(f"transformers not tried: {error}")
        return
    model, loading = GPT2LMHeadModel.from_pretrained(f"{folder}/hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    ours = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    for name, master in masters.items():
        assert torch.equal(ours[name], master), f"transformers: {name}"
    with torch.no_grad():
        logits = model(torch.arange(32).reshape(1, 32)).logits
    assert torch.isfinite(logits).all()
    print(f"transformers: {len(masters)} parameters, every bit")


if __name__ == "__main__":
    sys.exit(main())
