# SPDX-License-Identifier: Apache-2.0
"""What backward needs of a forward, kept beyond a budget of memory: on a drive, or in host memory.

activations.py has the hooks and the budget. saved.py lets hooks keep some of what autograd saves and leave the rest;
stash.py and host_stash.py are the two places.

For types alone a module here names one of a room above: activations.py _streaming.streaming.
"""
