# SPDX-License-Identifier: Apache-2.0
"""offload() and micro_batches(): when a model's forward and backward need which of its units.

offload.py puts together what the rooms below have. passes.py pins units around each module's forward and backward, and
turns.py lets several micro-batches go through one model unit by unit. accelerate.py, attributes.py and encoders.py
keep what libraries do with such models right.
"""
