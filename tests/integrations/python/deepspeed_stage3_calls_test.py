# SPDX-License-Identifier: Apache-2.0
"""The calls of DeepSpeed that speak of parameters in ZeRO stage 3, on one rank where they are streamed.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import copy
import sys
from unittest import mock

try:
    import pytest
    import torch
    from deepspeed_stage3 import WIDTH, Block, Model, bits, config, figures, made, same, train
    from small_models import one_thread  # noqa: F401
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
import ziggurat.torch
from ziggurat._memory.file_memory import is_in_file
from ziggurat._streaming.streaming import is_away, streaming_of
from ziggurat.deepspeed import _state_access, _streamed
from ziggurat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from ziggurat.deepspeed.utils import (
    get_z3_leaf_modules,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


def test_leaf_modules_of_a_script(tmp_path):
    def whole():
        model = Model()
        assert set_z3_leaf_modules(model, [Model]) == [model]
        return model

    model = Model()
    assert set_z3_leaf_modules(model, ["Block"]) == list(model.blocks)
    assert get_z3_leaf_modules(model) == list(model.blocks) and z3_leaf_module(model.blocks[0])
    unset_z3_leaf_modules(model, [Block])
    assert get_z3_leaf_modules(model) == []
    set_z3_leaf_module(model.last, True)
    assert get_z3_leaf_modules(model) == [model.last]
    with pytest.raises(ziggurat.InvalidArgument, match="no module of these classes"):
        set_z3_leaf_modules(model, ["Expert"])
    assert set_z3_leaf_modules(model, ["Expert"], raise_if_not_found=False) == []
    assert figures(config(tmp_path), whole)["brought_units"] == 2  # in forward and in backward


class UsesAnothers(torch.nn.Module):
    """Uses the weight of a layer that it does not call."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, 512)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        if registers:
            deepspeed.zero.register_external_parameter(self, self.head.weight)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(x, self.head.weight)


def test_an_external_parameter_is_there_while_the_model_runs(tmp_path):
    with pytest.raises(ziggurat.InvalidArgument, match=r"head.weight.*is away.*register_external_parameter"):
        train(made(config(tmp_path), lambda: UsesAnothers(False)), 0, 2)
    engine = made(config(tmp_path), lambda: UsesAnothers(True))
    whole = made(config(tmp_path, None, stage=0), lambda: UsesAnothers(False))
    assert train(engine, 0, 3) == train(whole, 0, 3)


def test_init_puts_what_goes_to_a_drive_into_files(tmp_path):
    with deepspeed.zero.Init(config_dict_or_path=config(tmp_path / "drive", "nvme")):
        model = torch.nn.Linear(2048, 2048)
    assert model.weight.dtype == torch.bfloat16 and is_in_file(model.weight)
    with deepspeed.zero.Init(config_dict_or_path=config(tmp_path, "cpu")):
        assert not is_in_file(torch.nn.Linear(2048, 2048).weight)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_gathered_parameters_are_there_and_keep_what_is_written(tmp_path, param):
    engine = made(config(tmp_path, param))
    weight = engine.module.blocks[2].linear.weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):  # before there is an engine
        weight.data.fill_(0.25)
    train(engine, 0, 2)
    assert is_away(weight)
    with deepspeed.zero.GatheredParameters([weight]):
        assert not is_away(weight) and weight.float().mean().item() == pytest.approx(0.25, abs=0.01)
    for write in (lambda: weight.data.fill_(0.5), lambda: weight.zero_()):
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            write()
            expected = weight.clone()
        assert is_away(weight)
        with deepspeed.zero.GatheredParameters(weight):
            assert torch.equal(weight, expected)
    train(engine, 2, 3)
    master = safe_get_full_fp32_param(weight)
    assert master.abs().max() < 0.01, "the step made its master of what was written"


def test_what_is_gathered_and_not_written_keeps_its_master(tmp_path):
    settings = config(tmp_path)
    plain, gathered = made(settings), made(settings)
    train(plain, 0, 4)
    train(gathered, 0, 2)
    with deepspeed.zero.GatheredParameters(gathered.module.blocks[0].parameters(), modifier_rank=0):
        pass
    train(gathered, 2, 4)
    assert same(bits(plain), bits(gathered))


def maybe_zero_3(param):
    """As scripts that fine-tune models of Hugging Face have it."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            assert param.ds_status == ZeroParamStatus.AVAILABLE
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


@pytest.mark.parametrize("stage", [2, 3])
def test_scripts_gather_what_has_an_id(tmp_path, stage):
    engine = made(config(tmp_path, "cpu" if stage == 3 else None, stage=stage))
    params = dict(engine.module.named_parameters())
    for step in range(2):  # before the first forward, and when the parameters are away
        assert same({name: maybe_zero_3(param) for name, param in params.items()}, bits(engine))
        train(engine, step, step + 1)
    if stage == 3:
        assert len({param.ds_id for param in params.values()}) == len(params)
        assert all(param.ds_shape == param.shape for param in params.values())
        assert all(param.ds_numel == param.ds_shape.numel() for param in params.values())
        weight = params["last.weight"]
        with deepspeed.zero.GatheredParameters([weight]):
            with deepspeed.zero.GatheredParameters([weight]):
                pass
            assert weight.ds_status == ZeroParamStatus.AVAILABLE
        assert torch.equal(copy.deepcopy(engine.module).last.weight, maybe_zero_3(weight))
        assert engine.zero_gather_16bit_weights_on_model_save()
        assert same(engine._zero3_consolidated_16bit_state_dict(), bits(engine))
    else:
        with pytest.raises(ziggurat.InvalidArgument, match="module_state_dict"):
            engine._zero3_consolidated_16bit_state_dict()
    before = bits(engine)
    engine.destroy()
    assert not any(hasattr(param, "ds_id") for param in params.values())
    assert same({name: maybe_zero_3(param) for name, param in params.items()}, before)


def test_gathered_parameters_pass_over_none_and_say_what_else_was_given(tmp_path):
    engine = made(config(tmp_path))
    train(engine, 0, 1)
    weight = engine.module.last.weight
    with deepspeed.zero.GatheredParameters([weight, None]):  # as of a layer without a bias
        assert weight.shape == weight.detach().clone().shape
    with deepspeed.zero.GatheredParameters(None):
        pass
    for wrong in ([weight, "last.bias"], engine.module.last):
        with (
            pytest.raises(ziggurat.InvalidArgument, match="(?s)params has .*of type (str|Linear)"),
            deepspeed.zero.GatheredParameters(wrong),
        ):
            pass


def test_a_model_that_an_engine_has_is_refused_until_destroy(tmp_path):
    engine = made(config(tmp_path))
    for step in range(2):  # also before the first forward
        with pytest.raises(ziggurat.InvalidArgument, match=r"an engine has this model already.*destroy\(\)"):
            deepspeed.initialize(model=engine.module, config=config(tmp_path))
        train(engine, step, step + 1)
    engine.destroy()
    train(deepspeed.initialize(model=engine.module, config=config(tmp_path))[0], 2, 3)


def test_what_is_away_names_the_calls_of_deepspeed(tmp_path):
    engine = made(config(tmp_path))
    train(engine, 0, 1)
    for param in (engine.module.last.weight, engine.module.blocks[0].linear.weight):
        with pytest.raises(ziggurat.InvalidArgument, match=r"with deepspeed.zero.GatheredParameters\(\[param\]\)"):
            param.detach().sum()


def test_more_than_there_is_room_for_is_refused_by_the_key(tmp_path):
    engine = made(config(tmp_path))
    train(engine, 0, 1)
    everything = list(engine.module.parameters())
    with (
        pytest.raises(ziggurat.ResourceExhausted, match="stage3_max_live_parameters more, or gather fewer") as error,
        deepspeed.zero.GatheredParameters(everything),
    ):
        pass
    assert "offload()" not in str(error.value)
    train(engine, 1, 2)


@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_masters_moments_and_gradients_of_streamed_parameters(tmp_path, param):
    engine, whole = made(config(tmp_path, param)), made(config(tmp_path, None, stage=2))
    for one in (engine, whole):
        train(one, 0, 2)
        loss = one(torch.ones(8, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        one.backward(loss)
    ours, theirs = engine.module.blocks[1].linear.weight, whole.module.blocks[1].linear.weight
    for full, local, key in (
        (safe_get_full_fp32_param, safe_get_local_fp32_param, ()),
        (safe_get_full_optimizer_state, safe_get_local_optimizer_state, ("exp_avg",)),
        (safe_get_full_grad, safe_get_local_grad, ()),
    ):
        assert torch.equal(full(ours, *key), full(theirs, *key))
        assert torch.equal(local(ours, *key), full(theirs, *key).flatten())
    for one, param in ((engine, ours), (whole, theirs)):
        one.step()
        safe_set_full_fp32_param(param, torch.full((WIDTH, WIDTH), 0.125))
        safe_set_full_optimizer_state(param, torch.zeros(WIDTH, WIDTH), "exp_avg")
        safe_set_local_optimizer_state(param, torch.ones(WIDTH * WIDTH), "exp_avg_sq")
    safe_set_local_fp32_param(ours, safe_get_local_fp32_param(ours))
    assert (safe_get_full_fp32_param(ours) == 0.125).all()
    assert train(engine, 2, 4) == train(whole, 2, 4)
    assert same(bits(engine), bits(whole))


def test_what_is_set_is_kept_in_memory_until_the_first_step_alone(tmp_path):
    engine = made(config(tmp_path))
    weight = engine.module.blocks[0].linear.weight
    for step in range(2):
        safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), 0.125))
        safe_set_full_optimizer_state(weight, torch.ones(WIDTH, WIDTH), "exp_avg")
        assert (weight in _state_access._set_before) == (step == 0)
        assert (safe_get_full_fp32_param(weight) == 0.125).all()
        assert (safe_get_full_optimizer_state(weight, "exp_avg") == 1).all()
        train(engine, step, step + 1)
        assert weight not in _state_access._set_before
        assert (safe_get_full_fp32_param(weight) != 0.125).any()


def test_a_parameter_of_no_step_has_its_own_values_for_master(tmp_path):
    engine = made(config(tmp_path))
    engine(torch.randn(8, WIDTH, dtype=torch.bfloat16))  # opens the engine
    weight = engine.module.blocks[0].linear.weight
    assert is_away(weight)
    values = safe_get_full_fp32_param(weight)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(values, weight.float())


@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_tiled_layer_is_a_linear_one(splits, bias):
    plain = torch.nn.Linear(20, 13, bias=bias)
    tiled = deepspeed.zero.TiledLinear(20, 13, bias, *splits, init_linear=plain)
    x = torch.randn(5, 20)
    torch.testing.assert_close(tiled(x), plain(x))
    assert len(tiled.linears) == splits[1] and len(tiled.linears[0]) == splits[0]
    apart = deepspeed.zero.TiledLinear(
        20, 13, bias, *splits, input_is_already_split=True, combine_out_splits=False, init_linear=plain
    )
    given = x if splits[0] == 1 else list(torch.tensor_split(x, splits[0], dim=-1))
    torch.testing.assert_close(torch.cat(apart(given), dim=-1), plain(x))


def test_a_tiled_layer_says_what_is_wrong():
    with pytest.raises(ziggurat.InvalidArgument, match="in_splits=21"):
        deepspeed.zero.TiledLinear(20, 13, in_splits=21)
    with pytest.raises(ziggurat.InvalidArgument, match="without a bias"):
        deepspeed.zero.TiledLinear(20, 13, init_linear=torch.nn.Linear(20, 13, bias=False))


def test_tiles_come_one_by_one(tmp_path):
    def tiled():
        tile = deepspeed.zero.TiledLinear(WIDTH, 4 * WIDTH, in_splits=2, out_splits=4)
        return torch.nn.Sequential(Block(), tile)

    engine = made(config(tmp_path), tiled)
    losses = train(engine, 0, 3)
    streaming, _ = streaming_of(engine.module[0].norm.weight)
    tiles = [unit for unit in streaming.units if unit.name.startswith("1.linears")]
    assert len(tiles) == 8
    assert losses == train(made(config(tmp_path, None, stage=2), tiled), 0, 3)


def test_what_a_script_offloads_itself_stays_so(tmp_path):
    model = ziggurat.torch.offload(Model().bfloat16(), memory="1MiB")
    engine, *_ = deepspeed.initialize(model=model, config=config(tmp_path))
    train(engine, 0, 1)
    assert streaming_of(model.last.weight)[0].memory_bytes == 1 << 20


@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_stage_3_without_an_optimizer_says_that_parameters_stay_whole(tmp_path, param):
    settings = config(tmp_path, param)
    del settings["optimizer"]
    with mock.patch.object(_streamed, "say") as said:
        engine = made(settings)
    (line,) = (call.args[0] for call in said.call_args_list)
    assert "has no optimizer" in line and ("have \"offload_param\" on nvme" in line) == (param == "cpu")
    with torch.no_grad():
        engine(torch.randn(8, WIDTH, dtype=torch.bfloat16))
    assert not is_away(engine.module.last.weight)


def test_a_script_with_an_optimizer_of_ziggurat_decides_itself(tmp_path):
    model = Model().bfloat16()
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(tmp_path))
    train(engine, 0, 1)
    assert streaming_of(model.last.weight) is None


class Recomputed(Model):
    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return self.last(x)


def test_checkpointed_blocks_are_brought_again(tmp_path):
    engine = made(config(tmp_path, "nvme"), Recomputed)
    assert train(engine, 0, 3) == train(made(config(tmp_path, None, stage=2)), 0, 3)
    assert engine.optimizer.figures()["brought_bytes"] > 0


def test_adapters_of_a_frozen_base(tmp_path):
    def frozen():
        model = Model()
        for param in model.blocks.parameters():
            param.requires_grad_(False)
        return model

    engine, whole = made(config(tmp_path, "nvme"), frozen), made(config(tmp_path, None, stage=2), frozen)
    assert train(engine, 0, 3) == train(whole, 0, 3)
    engine.save_checkpoint(tmp_path / "out")
    again = made(config(tmp_path, "nvme"), frozen)
    again.load_checkpoint(tmp_path / "out")
    assert train(again, 3, 5) == train(whole, 3, 5)


# -- checkpoints


@pytest.mark.parametrize("param", ["cpu", "nvme"])
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path, param):
    straight = made(config(tmp_path / "one", None, stage=2))
    train(straight, 0, 6)
    before = made(config(tmp_path / "two", param))
    train(before, 0, 3)
    before.save_checkpoint(tmp_path / "out")
    train(before, 3, 4)
    before.load_checkpoint(tmp_path / "out")  # back
    train(before, 3, 6)
    assert same(bits(before), bits(straight))
    after = made(config(tmp_path / "three", param))
    after.load_checkpoint(tmp_path / "out")
    train(after, 3, 6)
    assert same(bits(after), bits(straight))
    after.save_16bit_model(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert same(saved, bits(straight))


def test_a_load_keeps_what_its_function_has_changed(tmp_path):
    engine = made(config(tmp_path))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "out")
    weight = engine.module.blocks[0].linear.weight

    def changes(src, dst):
        dst.load_state_dict(src)
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(0.5)

    engine.load_checkpoint(tmp_path / "out", custom_load_fn=changes)
    with deepspeed.zero.GatheredParameters(weight):
        assert (weight == 0.5).all()


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
