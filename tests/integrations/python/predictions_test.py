# SPDX-License-Identifier: Apache-2.0
"""Eight of the scripts of bench/predicted_scripts.py: a run takes no more than plan() says, and nearly as much.

Run by pytest; as a script it exits with 77 where PyTorch, transformers or pytest is missing, or PyTorch is older
than offload() takes.
"""

import sys
from pathlib import Path

try:
    import pytest
    import transformers  # noqa: F401
    from rank_runs import on_ranks
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import predicted_scripts  # noqa: E402
import predictions  # noqa: E402

NAMES = (
    "MLP",
    "MLP in bf16, 3 units",
    "convolution",
    "tied, Lion",
    "GPT-2 in bf16, all on NVMe",
    "GPT-2, 4 backwards, clipped",
    "Llama, 8-bit moments",
    "MLP, 2 ranks, on NVMe",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_what_the_plan_says(tmp_path, name):
    def run(rank: int) -> dict:
        return predicted_scripts.measured(name, tmp_path, steps=2)

    ranks = predicted_scripts.SCRIPTS[name].ranks
    found = run(0) if ranks == 1 else on_ranks(ranks, run)[0]
    row = predictions.Row(found["said"], found["taken"])
    assert row.good, f"{row.text()}\n{found['rows']}"


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
