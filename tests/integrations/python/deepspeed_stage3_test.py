# SPDX-License-Identifier: Apache-2.0
"""ziggurat.deepspeed in ZeRO stage 3 on one rank: parameters are streamed, and each key that speaks of
them changes what is brought.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import sys

try:
    import pytest
    import torch
    from deepspeed_stage3 import DEPTH, UNIT, Model, WIDTH, bits, config, figures, made, same, train
    from long_cases import long_case
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
from ziggurat._streaming.streaming import is_away, streaming_of
from ziggurat.deepspeed import _streamed
from ziggurat.deepspeed._config import Config
from ziggurat.deepspeed.utils import safe_get_full_optimizer_state


# -- where parameters are


@pytest.mark.parametrize(
    ("param", "state"),
    [
        (None, "cpu"),
        ("cpu", "nvme"),
        ("nvme", "cpu"),
        ("nvme", "nvme"),
        *[long_case(*case) for case in ((None, "nvme"), ("none", "cpu"), ("none", "nvme"), ("cpu", "cpu"))],
    ],
)
def test_a_run_has_the_bits_of_one_with_whole_parameters(tmp_path, param, state):
    whole = made(config(tmp_path, None, stage=2))
    losses, expected = train(whole, 0, 5), bits(whole)
    engine = made(config(tmp_path, param, state))
    assert train(engine, 0, 5) == losses
    assert all(is_away(p) for p in engine.module.blocks[0].parameters())
    streaming, _ = streaming_of(engine.module.last.weight)
    assert streaming.tier == ("nvme" if param == "nvme" else "host")
    assert same(bits(engine), expected)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


LIMITS = [
    {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
    {"stage3_max_reuse_distance": 2 * UNIT, "stage3_prefetch_bucket_size": 1},
    {"stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0},
    {"stage3_max_live_parameters": 3 * UNIT, "stage3_param_persistence_threshold": 1e5},
]


@pytest.mark.parametrize(
    ("param", "keys"),
    [
        ("nvme", LIMITS[0]),
        ("cpu", LIMITS[2]),
        ("nvme", LIMITS[3]),
        *[long_case("cpu", LIMITS[i]) for i in (0, 1, 3)],
        *[long_case("nvme", LIMITS[i]) for i in (1, 2)],
    ],
)
def test_no_limit_changes_bits(tmp_path, param, keys):
    more = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.01}
    whole = made(config(tmp_path, None, stage=2, more=more))
    engine = made(config(tmp_path, param, more=more, **keys))
    assert train(engine, 0, 8) == train(whole, 0, 8)
    with deepspeed.zero.GatheredParameters(engine.module.last.weight):
        pass
    assert same(bits(engine), bits(whole))


def test_memory_for_all_of_them_is_where_they_live(tmp_path):
    engine = made(config(tmp_path, stage3_max_live_parameters=1e9))
    train(engine, 0, 2)
    assert engine.optimizer.figures()["brought_bytes"] == 0
    assert figures(config(tmp_path))["brought_bytes"] > 0


def test_state_in_memory_beside_parameters_on_a_drive_stays_there(tmp_path):
    found = figures(config(tmp_path, "nvme", "cpu"))
    assert found["nvme_read_bytes"] > 0
    assert found["state_read_bytes"] == found["state_write_bytes"] == 0
    engine = made(config(tmp_path, "nvme", "nvme"))
    train(engine, 0, 1)
    safe_get_full_optimizer_state(next(engine.module.parameters()), "exp_avg")  # it is written by then
    assert engine.optimizer.figures()["state_write_bytes"] > 0
    engine.destroy()


def test_a_drive_needs_a_path(tmp_path):
    settings = config(tmp_path, "nvme", "cpu", offload_param={"nvme_path": None})
    with pytest.raises(ziggurat.InvalidArgument, match=r"offload_param.nvme_path.*give a directory"):
        deepspeed.initialize(model=Model(), config=settings)
    # The state's directory has the parameters too.
    engine = made(config(tmp_path, "nvme", "nvme", offload_param={"nvme_path": None}))
    train(engine, 0, 1)


def test_parameters_stay_whole_where_they_cannot_be_streamed(tmp_path, caplog):
    ziggurat.deepspeed.logger.propagate = True
    model = Model()
    model.last.weight = torch.nn.Parameter(torch.randn(WIDTH, 4).t())
    engine, *_ = deepspeed.initialize(model=model, config=config(tmp_path))
    ziggurat.deepspeed.logger.propagate = False
    assert "parameters stay whole in memory: parameter 'last.weight'" in caplog.text
    train(engine, 0, 1)
    assert not is_away(model.last.weight)


def test_stages_below_leave_parameters_whole(tmp_path):
    assert not _streamed.streams(Config(config(tmp_path, stage=2), world_size=1))
    assert _streamed.streams(Config(config(tmp_path), world_size=2))


# -- each key


# What is brought ahead is now and then read again, so that reads are counted without.
ALONE = {"stage3_prefetch_bucket_size": 0}


def read(tmp_path, offload_param=None, **keys):
    """The bytes that a step reads of parameters on a drive."""
    return figures(config(tmp_path, "nvme", offload_param=offload_param, **ALONE, **keys))["nvme_read_bytes"]


def test_max_live_parameters(tmp_path):
    # What a backward uses first is there from the forward.
    reads = [read(tmp_path, stage3_max_live_parameters=n * UNIT) for n in (0, 6, 20)]
    assert reads == sorted(set(reads), reverse=True)


def test_too_few_live_parameters_are_said(tmp_path, caplog):
    ziggurat.deepspeed.logger.propagate = True
    made(config(tmp_path))
    ziggurat.deepspeed.logger.propagate = False
    assert "stage3_max_live_parameters is 0, which is too little: parameters get" in caplog.text


class Words(torch.nn.Module):
    """Has an embedding that is larger than its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8 * WIDTH, WIDTH)
        self.model = Model()

    def forward(self, x):
        return self.model(x + self.words(x[:, :8].argmax(dim=1)))


@pytest.mark.parametrize("more", [{}, {"state_format": "8bit"}])
def test_of_a_large_embedding_rows_are_read(tmp_path, more):
    engine = made(config(tmp_path, "nvme", "nvme", more=more), Words)
    whole = made(config(tmp_path, None, stage=2, more=more), Words)
    losses = train(engine, 0, 4)
    if not more:  # 8-bit moments round by the place in a block
        assert losses == train(whole, 0, 4)
    streaming, _ = streaming_of(engine.module.words.weight)
    assert streaming.memory_bytes < 4 * UNIT * 2 < engine.module.words.weight.numel() * 2


def test_max_reuse_distance(tmp_path):
    live = {"stage3_max_live_parameters": 20 * UNIT}
    reads = [read(tmp_path, stage3_max_reuse_distance=n * UNIT, **live) for n in (0, 3, 100)]
    assert reads == sorted(set(reads), reverse=True)


def test_prefetch_bucket_size(tmp_path):
    none = figures(config(tmp_path, stage3_prefetch_bucket_size=0))
    some = figures(config(tmp_path, stage3_prefetch_bucket_size=UNIT))
    assert none["prefetch_misses"] > some["prefetch_misses"]
    assert none["prefetch_hits"] < some["prefetch_hits"]


def test_param_persistence_threshold(tmp_path):
    keys = ALONE | {"stage3_max_reuse_distance": 0}
    none = figures(config(tmp_path, **keys))
    # Norm and bias of a block, which lie together, come once a step.
    small = figures(config(tmp_path, stage3_param_persistence_threshold=1000, **keys))
    assert small["prefetch_misses"] == none["prefetch_misses"] - DEPTH


def test_model_persistence_threshold(tmp_path):
    keys = ALONE | {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 1000}
    all_small = figures(config(tmp_path, **keys))
    none = figures(config(tmp_path, stage3_model_persistence_threshold=100, **keys))
    assert none["prefetch_misses"] > all_small["prefetch_misses"]


def test_host_memory_of_parameters_on_a_drive(tmp_path):
    none = read(tmp_path)
    kept = [read(tmp_path, {"max_in_cpu": n * UNIT}) for n in (6, 20)]
    assert none > kept[0] > kept[1]
    assert read(tmp_path, {"buffer_count": 6, "buffer_size": UNIT}) == kept[0]
    assert read(tmp_path, {"buffer_count": 1, "buffer_size": 20 * UNIT}) == kept[1]


def test_a_parameter_may_be_larger_than_a_buffer(tmp_path):
    engine = made(config(tmp_path, "nvme", offload_param={"buffer_count": 2, "buffer_size": 100}))
    assert train(engine, 0, 3)[-1] > 0


def test_defaults_are_deepspeeds(tmp_path):
    limits = Config({"train_batch_size": 1}, world_size=1).param_limits
    assert limits.max_live == limits.max_reuse_distance == limits.max_in_cpu == 10**9
    assert (limits.buffer_count, limits.buffer_size, limits.persistence_threshold) == (5, 10**8, 10**5)


def test_leaf_modules_of_the_config_are_one_unit_each(tmp_path):
    apart = figures(config(tmp_path))
    together = figures(config(tmp_path, leaf_module={"names": ["blocks.0"]}))
    assert together["brought_units"] == apart["brought_units"], "a block is a unit anyway"
    layers = figures(config(tmp_path, leaf_module={"classes": "Linear"}))
    # Each linear layer is a unit beside the rest of its block; the last one has its own too.
    assert layers["brought_units"] > apart["brought_units"]
    assert figures(config(tmp_path, leaf_module={"name_suffixes": [".linear"]}))["brought_units"] > (
        apart["brought_units"]
    )
    with pytest.raises(ziggurat.InvalidArgument, match=r"leaf_module.names.*blocks.9"):
        deepspeed.initialize(model=Model(), config=config(tmp_path, leaf_module={"names": ["blocks.9"]}))
    with pytest.raises(ziggurat.InvalidArgument, match="leaf_module"):
        Config(config(tmp_path, leaf_module={"kinds": []}), world_size=1)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
