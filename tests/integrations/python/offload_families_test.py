# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch.offload() of five families of models, in 16 and 32 bits and in the least, half and all of the memory that they
take: the bits without it. And AdamW of an offloaded model beside torch.optim's.

The suite runs one case of each family; ZIGGURAT_CASES=all runs all. Run by pytest; as a script it exits with 77 where PyTorch,
transformers or pytest is missing, or PyTorch is older than offload() takes.
"""

import itertools
import sys

try:
    import pytest
    import torch
    import transformers
    from language_models import assert_same_bits, batches, bits, gpt2, llama, loss_of
    from long_cases import long
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, memory_of, tokens_of
    from streamed_models import loss_of as loss_of_tokens
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch
from ziggurat._units.units import divide

BLOCKS = 8
ENDS = {"eos_token_id": 0, "pad_token_id": 0}


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": BLOCKS, "num_heads": 4}
    config = transformers.T5Config(vocab_size=300, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **ENDS)
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(config)


def mixtral():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": BLOCKS, "vocab_size": 300}
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**heads, **sizes, **ENDS))


FAMILIES = {
    "tied": lambda: llama(num_hidden_layers=BLOCKS, vocab_size=300, tie_word_embeddings=True),
    "mixture of experts": mixtral,
    "encoder-decoder": t5,
    "llama": lambda: llama(num_hidden_layers=BLOCKS, vocab_size=300),
    "gpt": lambda: gpt2(n_layer=BLOCKS, vocab_size=300),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The remainder, a unit and the next one; half of the parameters; all of them, and what lies between them.
BUDGETS = {
    "least": lambda least, all_bytes: least,
    "half": lambda least, all_bytes: all_bytes // 2,
    "all": lambda least, all_bytes: 2 * all_bytes,
}
IN_THE_SUITE = {
    ("tied", "bf16", "half"),
    ("mixture of experts", "fp32", "half"),
    ("encoder-decoder", "bf16", "all"),
    ("llama", "fp32", "all"),
    ("gpt", "bf16", "least"),
}
CASES = [
    pytest.param(*case, marks=[] if case in IN_THE_SUITE else long)
    for case in itertools.product(FAMILIES, DTYPES, BUDGETS)
]


def trained(model, folder):
    """Returns what training finds on the way, and the bits of the model."""
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=f"nvme:{folder}")
    found, texts = [], batches(8)
    for step in range(4):
        for text in texts[2 * step : 2 * step + 2]:  # two backwards a step
            loss = loss_of(model.train(), text)
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model.eval(), texts[0]).item())
    optimizer.close()
    return found, bits(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "dtype", "budget"), CASES)
def test_the_bits_without_it(family, dtype, budget, tmp_path):
    plain, ours = (FAMILIES[family]().to(DTYPES[dtype]) for _ in range(2))
    least, all_bytes = memory_of(ours), sum(unit.size_bytes for unit in divide(ours, "auto").units)
    assert least < all_bytes // 2  # so that the three differ
    ziggurat.torch.offload(ours, memory=BUDGETS[budget](least, all_bytes), placement="nvme")
    (found, values), (expected, its) = trained(ours, tmp_path / "ours"), trained(plain, tmp_path / "plain")
    assert found == expected
    assert_same_bits(values, its)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_steps_are_those_of_torchs_adamw_within_its_rounding(placement, fused, tmp_path):
    """Given the same gradients. With gradients of their own PyTorch's fused and its plain AdamW are 4e-2 apart after these
    steps: an attention's bias of keys changes no output, so its gradients are rounding, and AdamW makes each as large as lr.
    """
    model = gpt()
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    ziggurat.torch.offload(model, memory=memory_of(model), placement=placement)
    place = "host" if placement == "host" else f"nvme:{tmp_path}/state"
    optimizers = (
        ziggurat.torch.AdamW(model.parameters(), lr=1e-2, placement=place),
        torch.optim.AdamW(theirs, lr=1e-2, fused=fused),
    )
    for step in range(20):
        loss_of_tokens(model, tokens_of(step)).backward()
        for param, its in zip(model.parameters(), theirs, strict=True):
            its.grad = param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
    optimizers[0].close()
    for param, its in zip(model.parameters(), theirs, strict=True):
        assert ((param - its).abs() / its.abs().clamp(min=1)).max() <= 3e-7


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], __file__]))
