# SPDX-License-Identifier: Apache-2.0
"""What the package uses of PyTorch's own: in one file, and an error that names what a PyTorch lacks when offload() is asked for.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import re
import subprocess
import sys
from pathlib import Path

try:
    import pytest
    import torch
    from streamed_models import gpt
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.torch
from ziggurat._pytorch import torch_private

PRIVATE = re.compile(
    r"torch\._[A-Za-z]|_execution_engine|\._sequence_nr|\._cdata|\._new_with_weak_ptr|\._swap_data_ptr_"
    r"|_mode_stack|_(?:push|pop)_mode|from torch[\w.]* import .*\b_[a-z]"
)


def test_one_file_has_all_calls_of_what_pytorch_keeps_to_itself():
    package = Path(ziggurat.__file__).parent
    found = {
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if path.name != "torch_private.py" and PRIVATE.search(line)
    }
    assert found == {"_gradients.py: norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)"}  # public in 2.13


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (torch._C, "_current_graph_task_id"),
        (torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (torch._C, "_construct_storage_from_data_pointer"),
    ],
)
def test_what_a_pytorch_lacks_is_named_with_those_that_have_it(holder, name, monkeypatch):
    monkeypatch.delattr(holder, name)
    with pytest.raises(
        ziggurat.Unimplemented,
        match=rf"offload\(\) needs torch\.[\w.]*\.{name}, which PyTorch {re.escape(torch.__version__)} does not have: "
        r"install a version that is known to work, which 2\.12 and 2\.13 are, or train without offload\(\)$",
    ):
        ziggurat.torch.offload(gpt(), memory="1GiB")


def test_numbers_of_nodes_that_do_not_grow_are_named(monkeypatch):
    monkeypatch.setattr(torch_private, "number_of", lambda node: 0)
    for _ in range(2):
        torch.zeros(1, requires_grad=True).clone()
    with pytest.raises(ziggurat.Unimplemented, match="needs numbers of a graph's nodes that grow, which PyTorch"):
        ziggurat.torch.offload(gpt(), memory="1GiB")


def test_an_old_pytorch_is_told_to_be_updated(monkeypatch):
    monkeypatch.delattr(torch._C, "_set_throw_on_mutable_data_ptr")
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.raises(ziggurat.Unimplemented, match=r"needs PyTorch 2\.12 or later, and this is 2\.4\.1: update PyTorch"):
        ziggurat.torch.offload(gpt(), memory="1GiB")


def test_importing_the_package_needs_none_of_it():
    program = """
import torch
for holder, name in ((torch._C, "_set_throw_on_mutable_data_ptr"), (torch._C, "_construct_storage_from_data_pointer"),
                     (torch._C._autograd, "_get_sequence_nr"), (torch._C._functorch, "peek_interpreter_stack")):
    delattr(holder, name)
import ziggurat.torch
optimizer = ziggurat.torch.AdamW(torch.nn.Linear(2, 2).parameters())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
