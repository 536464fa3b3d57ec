# SPDX-License-Identifier: Apache-2.0
"""Models of random shapes, offloaded into the smallest memory that works: random steps, evaluations
and writes, with the bits of the same without offload().

offload_random_test.py [FIRST COUNT]: these seeds, by hand. Run by pytest, or as a script, which
exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import sys

try:
    import pytest
    from random_runs import run
    from small_models import one_thread  # noqa: F401, a fixture
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

from ziggurat.torch import offload

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_without_it(seed, tmp_path):
    assert run(seed, tmp_path / "ours", offload) == run(seed, tmp_path / "plain")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        SEEDS = range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2]))
        import tempfile

        for number in SEEDS:
            with tempfile.TemporaryDirectory() as own:
                assert run(number, f"{own}/1", offload) == run(number, f"{own}/2"), number
        sys.exit(0)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
