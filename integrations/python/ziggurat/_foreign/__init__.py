# SPDX-License-Identifier: Apache-2.0
"""Takes over training that another trainer began: its checkpoint becomes an engine's state.

load.py is load_foreign_checkpoint(). Each layout has a reader that describes what is there (content.py): dcp.py,
zero.py, universal.py and state_dicts.py; plan.py matches it with a model before anything is written. archive.py
reads files of `torch.save`, and runs no code in them.
"""
