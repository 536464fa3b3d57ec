#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/integrations/cli_checkpoint_peers_test.py: our checkpoints, read by safetensors and PyTorch's distributed checkpoint.
"""    python3 cli_checkpoint_peers_test.py BINARY

Two ranks save; each reader finds every tensor whole, with the bits that `ziggurat ckpt to-hf` writes. Nothing of Ziggurat is
imported. Exits with 77, saying why, where PyTorch or safetensors cannot be imported.
"""
import json
import os
import subprocess
import sys
import tempfile

SKIPPED = 77


def train(binary, folder):
    data = f"{folder}/text.txt"
    with open(data, "w") as file:
        file.write("In the beginning was the word, and the word was long. " * 400)
    command = [binary, "train", "--model", "2x64x2", "--data", data, "--store", f"{folder}/store", "--steps", "3"]
    command += ["--batch", "2", "--accumulate", "2", "--context", "32", "--device-memory", "8MiB", "--host-memory", "16MiB"]
    command += ["--nproc", "2", "--zero-stage", "3", "--checkpoint-dir", f"{folder}/checkpoints"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/checkpoints/step-000000003"


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
        checkpoint = train(binary, folder)
        subprocess.run([binary, "ckpt", "to-hf", checkpoint, f"{folder}/hf"], check=True, stdout=subprocess.DEVNULL)
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
    return 0


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
