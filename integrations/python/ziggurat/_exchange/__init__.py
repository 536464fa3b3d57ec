# SPDX-License-Identifier: Apache-2.0
"""The part of each parameter that a rank's engine has, and what ranks exchange in a step because of it.

parts.py says which part: all, a slice, or FSDP2's shard. exchange.py gives each rank the mean of its slices' gradients,
feeders.py decides when, and param_gather.py brings back what the other ranks have updated. fsdp.py and waits.py do
this for FSDP2's units and for the modules of a forward.
"""
