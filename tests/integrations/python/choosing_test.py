# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.md: each of its tables is what the planner says.

Run by pytest; as a script it exits with 77 where pytest is missing.
"""

import re
import sys
from pathlib import Path

try:
    import pytest
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))
import choosing  # noqa: E402

TEXT = choosing.PAGE.read_text()


@pytest.mark.parametrize("name", choosing.MAKERS)
def test_a_table_is_what_the_planner_says(name):
    blocks = {found[2]: found[0] for found in choosing.BLOCK.finditer(TEXT)}
    assert blocks[name] == choosing.remade(blocks[name])


def test_no_figure_stands_outside_of_the_tables():
    """Of sizes and times. Counts of GPUs and stages, widths and the formulas' factors are words of the text."""
    prose = choosing.BLOCK.sub("", TEXT)
    assert re.findall(r"[\d.,]+ (?:GB|GiB|s|tokens|%)(?!\w)", prose) == []


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
