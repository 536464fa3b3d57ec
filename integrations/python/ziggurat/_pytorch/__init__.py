# SPDX-License-Identifier: Apache-2.0
"""What this package needs of PyTorch beyond its public calls, and what is true of any model of PyTorch's.

torch_private.py alone calls what PyTorch keeps to itself. Over it: the memory behind a storage (storages.py), an
accelerator's streams and copies (accelerator.py), DTensors, the names of parameters without what wrappers add, and
subclasses that objects get at run time. Nothing here knows an engine.
"""
