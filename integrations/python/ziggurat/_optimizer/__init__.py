# SPDX-License-Identifier: Apache-2.0
"""The optimizers: parameters and groups as PyTorch has them, in front of one engine or several.

optimizer.py is the base of ziggurat.torch's classes, and is made of parts: opening.py decides when and where engines
open, opened.py works with one that is open (engine_params.py has what it is told of its parts, last_seen.py which of
them somebody else has written since), among_ranks.py and sharing.py divide the work among ranks, state.py is
`optimizer.state` and state dicts, and reports.py tells what was done.
"""
