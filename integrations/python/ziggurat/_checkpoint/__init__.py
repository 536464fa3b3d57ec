# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the engine's own format, and runs that go on after a kill.

checkpoint.py saves, background_save.py while training goes on, checkpoint_load.py loads for any number of ranks, and
saved_states.py for an optimizer that has a state already. resume.py keeps what a run needs beside the engine's
state in every generation.
"""
