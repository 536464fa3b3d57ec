# SPDX-License-Identifier: Apache-2.0
"""``ziggurat`` and ``python -m ziggurat``: the command that came with this package."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

COMMAND = Path(__file__).parent / "bin" / "ziggurat"


def main() -> NoReturn:
    """Becomes the command, so that its signals and its exit code are its own. Runs ``doctor
    --train`` in Python instead, because it trains with PyTorch.
    """
    if sys.argv[1:2] == ["doctor"] and "--train" in sys.argv:
        from ziggurat._trainers.train_check import main as train_check

        sys.exit(train_check(sys.argv[2:]))
    # Python ignores these two signals, and the command would inherit that: `ziggurat ... | head`
    # would then report a broken pipe.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execv(COMMAND, ["ziggurat", *sys.argv[1:]])
    except OSError as error:
        sys.exit(
            f"ziggurat: error: cannot run {COMMAND}: {error.strerror}. Install the wheel, which "
            "scripts/build-wheel makes, or run the command of a build, such as "
            "build/release/bin/ziggurat"
        )


if __name__ == "__main__":
    main()
