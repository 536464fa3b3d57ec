# SPDX-License-Identifier: Apache-2.0
"""How a model is divided into units, which are brought and let go together, and which models are refused.

unit_choice.py chooses the modules, tile_choice.py the layers that are brought a tile at a time, and units.py makes the
division from both. Nothing is brought here: that is _streaming.
"""
