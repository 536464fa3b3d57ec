# SPDX-License-Identifier: Apache-2.0
"""The engine's library as Python has it: the C interface, and what Python says again of the engine.

abi.py finds the library and calls it, by what header.py reads in integrations/c/ziggurat.h; native.py and
native_checkpoint.py are its engines and checkpoints as objects. words.py gives the engine's messages the words
of this package's arguments. state_kinds.py, dtypes.py and packing.py have its tables and its division into
records. Nothing here imports PyTorch, so `import ziggurat` does not.
"""
