# SPDX-License-Identifier: Apache-2.0
"""A rank of an offloaded model is killed: the others end and say so; started again, all go on with the same bits.

ZIGGURAT_KILLS sets how many runs are killed in each test; of ranks in groups one is by default. Run by pytest; as a script it exits with 77 where PyTorch or
pytest is missing, or PyTorch is older than offload() takes.
"""

import os
import sys

try:
    import pytest
    import streamed_models  # noqa: F401: refuses a PyTorch that is too old
    import torch_ranks_kill_test as kills
    from small_models import small_model
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat.torch


def offloaded(home, **given):
    def make(placement, exchange):
        model = ziggurat.torch.offload(small_model(), memory="1MiB", placement=home)
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-3, placement=placement, exchange=exchange, **given)
        return model, model, optimizer

    return make


@pytest.mark.parametrize(("world", "home", "exchange"), [(2, "nvme", "torch"), (3, "host", "ziggurat")])
def test_a_killed_rank_ends_the_others_and_nothing_is_lost(world, home, exchange, tmp_path):
    kills.test_a_killed_rank_ends_the_others_and_nothing_is_lost(world, offloaded(home), exchange, tmp_path)


def test_a_killed_rank_of_a_group_ends_the_other_groups_too(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "_KILLS", int(os.environ.get("ZIGGURAT_KILLS", "1")))
    make = offloaded("nvme", shard_group=2)
    kills.test_a_killed_rank_ends_the_others_and_nothing_is_lost(4, make, "torch", tmp_path)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
