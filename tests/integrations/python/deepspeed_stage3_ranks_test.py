# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 on two ranks: each keeps a slice of every parameter, with the bits of whole ones.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing.
"""

import datetime
import sys

try:
    import pytest
    import torch
    import torch.distributed as dist
    from deepspeed_stage3 import UNIT, WIDTH, Model, bits, config, figures, made, same
    from long_cases import long_case
    from rank_runs import on_ranks
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
import ziggurat.deepspeed as deepspeed
from ziggurat._streaming.streaming import is_away
from ziggurat.deepspeed import _meeting
from ziggurat.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from ziggurat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def input_of(step, rank):
    torch.manual_seed(100 + 10 * step + rank)
    return torch.randn(8, WIDTH, dtype=torch.bfloat16)


def backward(engine, step, rank):
    loss = engine(input_of(step, rank)).float().square().mean()
    engine.backward(loss)
    return loss.item()


def train(engine, rank, first, last):
    losses = []
    for step in range(first, last):
        losses.append(backward(engine, step, rank))
        engine.step()
    return losses


def settings_of(folder, param, state, stage):
    return config(folder, param, state, stage=stage, more={"gradient_accumulation_steps": 2})


def states_of(engine, weight):
    """What all ranks find of a parameter's state, before a step and after, and what they set."""
    found = [safe_get_full_grad(weight), safe_get_local_grad(weight)]
    safe_set_full_grad(weight, found[0] * 2)
    found.append(safe_get_full_grad(weight))
    engine.step()
    found += [safe_get_full_fp32_param(weight), safe_get_local_fp32_param(weight)]
    found += [f(weight, "exp_avg") for f in (safe_get_full_optimizer_state, safe_get_local_optimizer_state)]
    safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), 0.125))
    safe_set_full_optimizer_state(weight, torch.zeros(WIDTH, WIDTH), "exp_avg")
    with pytest.raises(ziggurat.Unimplemented, match="safe_set_full_fp32_param"):
        safe_set_local_fp32_param(weight, found[4])
    return found


def alone(engine, folder):
    """What rank 0 finds while the other one does something else."""
    engine.eval()
    with torch.no_grad():
        evaluated = [engine(input_of(50 + i, 0)) for i in range(3)]
    engine.train()
    weight = engine.module.blocks[1].linear.weight
    engine.save_16bit_model(folder)
    saved = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
    assert same(saved, dict(engine.module_state_dict()))
    if engine.zero_optimization_partition_weights():
        assert same(saved, engine._zero3_consolidated_16bit_state_dict())
        assert weight.ds_numel == WIDTH * WIDTH
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, saved["blocks.1.linear.weight"])
    return [*evaluated, *saved.values(), safe_get_full_fp32_param(weight)]


def run(rank, folder, param, state, stage):
    """What training, the calls and checkpoints find, and whether parameters were away."""
    _meeting._PATIENCE = datetime.timedelta(seconds=0.5)  # rank 0 saves alone
    engine = made(settings_of(folder, param, state, stage))
    weight = engine.module.blocks[1].linear.weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():  # before the engine
        if rank == 0:
            weight.fill_(0.25)
    found = train(engine, rank, 0, 4)
    away = is_away(weight)
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            weight.mul_(0.5)
    found += train(engine, rank, 4, 7)
    found += [backward(engine, 7, rank), *states_of(engine, weight)]
    found += train(engine, rank, 8, 10)
    found += alone(engine, folder) if rank == 0 else []
    if rank == 0:
        engine.save_checkpoint(f"{folder}/of_0")
    dist.barrier()
    found += train(engine, rank, 10, 12)
    engine.save_checkpoint(f"{folder}/of_all")
    found += train(engine, rank, 12, 14)
    values = bits(engine)
    engine.load_checkpoint(f"{folder}/of_0")  # back
    assert train(engine, rank, 10, 12) == found[-4:-2]
    engine.load_checkpoint(f"{folder}/of_all", load_module_only=True)
    module = bits(engine)
    dist.barrier()  # another rank may still read what this one has
    engine.destroy()
    return found, values, module, away


def go_on(rank, folder, param, state):
    """What a run finds that goes on from what all ranks have saved."""
    engine = made(settings_of(folder, param, state, 3))
    engine.load_checkpoint(f"{folder}/of_all")
    masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    values = bits(engine)
    losses = train(engine, rank, 12, 14)
    engine.destroy()
    return masters, values, losses


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(("param", "state"), [("cpu", "nvme"), long_case("nvme", "cpu")])
def test_two_ranks_have_the_bits_of_whole_parameters(tmp_path, param, state):
    whole = on_ranks(2, run, str(tmp_path / "whole"), param, state, 2)
    folder = str(tmp_path / "streamed")
    streamed = on_ranks(2, run, folder, param, state, 3)
    for (found, values, module, away), (own_found, own_values, own_module, own_away) in zip(
        whole, streamed, strict=True
    ):
        assert (away, own_away) == (False, True)
        assert all(equal(*pair) for pair in zip(found, own_found, strict=True))
        assert same(own_values, values) and same(own_module, module)
    saved = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/of_all")
    for ranks in (1, 2, 3):
        for rank, (masters, values, losses) in enumerate(on_ranks(ranks, go_on, folder, param, state)):
            assert same(values, streamed[0][2]) and same(masters, saved)
            assert ranks != 2 or losses == streamed[rank][0][-2:]


def waits_of(rank, folder):
    """How often a step waits for a unit, by what a config says."""

    def of(param="cpu", ahead=0, offload_param=None, **keys):
        keys |= {"stage3_prefetch_bucket_size": ahead}  # which would hide what is brought again
        return figures(config(folder, param, offload_param=offload_param, **keys))["prefetch_misses"]

    room, none = {"stage3_max_live_parameters": 20 * UNIT}, {"stage3_max_reuse_distance": 0}
    stays = none | {"stage3_param_persistence_threshold": UNIT}
    little, again, drive = of(), of(**none), of("nvme")
    return {
        "stage3_max_live_parameters": (little, of(stage3_max_live_parameters=6 * UNIT)),
        "stage3_max_reuse_distance": (of(**room, **none), of(**room, stage3_max_reuse_distance=100 * UNIT)),
        "stage3_prefetch_bucket_size": (little, of(ahead=UNIT)),
        "stage3_param_persistence_threshold": (again, of(**stays)),
        "stage3_model_persistence_threshold": (of(**stays, stage3_model_persistence_threshold=UNIT), of(**stays)),
        "max_in_cpu": (drive, of("nvme", offload_param={"max_in_cpu": 6 * UNIT})),
        "buffer_size": (drive, of("nvme", offload_param={"buffer_count": 6, "buffer_size": UNIT})),
        "leaf_module": (of(**none, leaf_module={"classes": "Linear"}), again),
    }


def test_each_key_changes_what_ranks_bring(tmp_path):
    for found in on_ranks(2, waits_of, str(tmp_path)):
        for key, (more, fewer) in found.items():
            assert more > fewer, (key, more, fewer)


def of_nodes(rank, folder):
    """What training with copies for two of four ranks finds, and without: bits, and what came from the other two."""
    found = []
    for size in (1, 2, 4):
        engine = made(config(folder, zero_hpz_partition_size=size, stage3_max_reuse_distance=0))
        losses = train(engine, rank, 0, 2)
        figures = engine.optimizer.figures()
        found.append((losses, bits(engine), figures["from_other_nodes_bytes"], figures["from_ranks_bytes"]))
        engine.destroy()
    with pytest.raises(ziggurat.InvalidArgument, match="zero_hpz_partition_size.* is 3, which does not divide the 4"):
        made(config(folder, zero_hpz_partition_size=3))
    return found


def test_hpz_brings_less_from_other_nodes_and_changes_no_bit(tmp_path):
    for (losses, values, other, all_bytes), hpz, too_large in on_ranks(4, of_nodes, str(tmp_path)):
        assert hpz[0] == too_large[0] == losses
        assert same(hpz[1], values) and same(too_large[1], values)
        assert other == too_large[2] == 0
        assert 0 < 2 * hpz[2] < 2 / 3 * all_bytes  # what comes from these ranks without the key


def quantized(rank, folder):
    """What training with the keys of ZeRO++ finds: losses, bits, and what came of parameters and gradients."""
    found = {}
    for keys in (
        {},
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_gradients": True},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    ):
        engine = made(config(folder, stage3_max_reuse_distance=0, **keys))
        losses = train(engine, rank, 0, 2)
        figures = engine.optimizer.figures()
        saved = engine.module.state_dict()
        of_all = [figures["from_ranks_bytes"], figures["gradients_from_ranks_bytes"]]
        found[tuple(keys)] = losses, bits(engine), {name: one.clone() for name, one in saved.items()}, of_all
        engine.destroy()
    return found


def test_quantized_exchanges_send_less(tmp_path):
    every = on_ranks(2, quantized, str(tmp_path))
    for found in every:
        exact = found[()]
        weights, frozen, gradients, both = (found[keys] for keys in list(found)[1:])
        assert frozen[0] == exact[0]  # the model has no frozen parameters
        assert weights[3][0] == pytest.approx(260 / 512 * exact[3][0], rel=0.05)
        assert weights[3][1] == exact[3][1]
        assert gradients[3][0] == pytest.approx(exact[3][0], rel=0.05)
        assert gradients[3][1] == pytest.approx(132 / 512 * exact[3][1], rel=0.1)
        assert both[3] == pytest.approx([weights[3][0], gradients[3][1]], rel=0.05)
        for run, other in zip(found.values(), every[0].values(), strict=True):
            assert same(run[1], other[1])
            assert run[0] == pytest.approx(exact[0], rel=0.02)


def half():
    model = Model()
    model.blocks[:2].requires_grad_(False)
    return model


def half_frozen(rank, folder):
    """What comes of parameters, some of which are frozen, with the keys that quantize them."""
    found = []
    for key in (None, "zero_quantized_nontrainable_weights", "zero_quantized_weights"):
        keys = {} if key is None else {key: True}
        engine = made(config(folder, stage3_max_reuse_distance=0, **keys), half)
        train(engine, rank, 0, 2)
        found.append(engine.optimizer.figures()["from_ranks_bytes"])
        engine.destroy()
    return found


def test_frozen_parameters_may_come_in_8_bits_alone(tmp_path):
    for exact, frozen, weights in on_ranks(2, half_frozen, str(tmp_path)):
        assert weights < 0.6 * exact
        assert 1.1 * weights < frozen < 0.95 * exact


def refused(rank, folder):
    both = config(folder, more={"communication_data_type": "fp32"}, zero_quantized_gradients=True)
    with pytest.raises(ziggurat.InvalidArgument, match='"communication_data_type": fp32 and .*zero_quantized_gradients"'):
        made(both)
    engine = made(config(folder))
    train(engine, rank, 0, 1)
    everything = list(engine.module.parameters())
    for modifier in (None, 0):
        with (
            pytest.raises(ziggurat.ResourceExhausted, match="stage3_max_live_parameters"),
            deepspeed.zero.GatheredParameters(everything, modifier_rank=modifier),
        ):
            pass
    train(engine, rank, 1, 2)
    engine.save_checkpoint(f"{folder}/out")
    with pytest.raises(ziggurat.InvalidArgument, match="rank 0 is at .*, but rank 1 at"):
        if rank == 0:  # which writes what the other one has a part of
            engine.load_checkpoint(f"{folder}/out", load_module_only=True)
        else:
            train(engine, rank, 2, 3)
    engine.destroy()


def test_what_cannot_be_is_refused_on_both(tmp_path):
    on_ranks(2, refused, str(tmp_path))


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
