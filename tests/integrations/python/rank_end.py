# SPDX-License-Identifier: Apache-2.0
"""Ends the process of a rank whose work is done, and leaves out what the interpreter does at its end.

    python rank_end.py SCRIPT ARGUMENT...

runs a script so. While the interpreter ends, a thread of PyTorch's Gloo may still let go of the last barrier, for
which it asks for the interpreter's lock: the interpreter ends the thread, and the C++ library with it the process,
"terminate called without an active exception" (PyTorch 2.13, up to every second run on a busy machine).
"""

import os
import runpy
import sys
from typing import NoReturn


def end_rank() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    end_rank()
