# SPDX-License-Identifier: Apache-2.0
"""Memory and files, counted and taken: how much a process may have, and what lies in files instead.

memory.py asks what is free and gives back what was freed; placement.py decides from it where state lies.
file_memory.py makes tensors in files without names, and frozen_files.py leaves frozen parameters in the files
that they were read from. progress.py shows work that takes long.
"""
