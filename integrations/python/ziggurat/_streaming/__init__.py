# SPDX-License-Identifier: Apache-2.0
"""Parameters that the engine keeps: brought for their use, in place of memory that holds them all.

streaming.py has one model's, from offload() to close(). pins.py brings its units and lets them go, and gathered.py
does so for a script. Parameters that are away have a class that tells who uses them (released.py, read_at_use.py);
exports.py and prints.py find uses that PyTorch does not count. table_rows.py and tiled_linear.py bring less than a
unit: the rows of an embedding, a tile of a layer. When a forward or a backward needs a unit is decided above, in
_offload.

For types alone modules here name some of rooms above: streaming.py, pins.py and place_said.py
_optimizer.opened, and pins.py _offload.turns.
"""
