# SPDX-License-Identifier: Apache-2.0
"""The losses of language models without their logits, which would be the largest tensor of a step.

chunked_loss.py computes some tokens at a time, and tiled_loss.py also the head a tile at a time. causal_loss.py puts
them into the forward of a model of transformers, whose source forward_source.py reads before.
"""
