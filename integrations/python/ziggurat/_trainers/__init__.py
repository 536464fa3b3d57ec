# SPDX-License-Identifier: Apache-2.0
"""Trainers that are not a script's own loop: what Hugging Face's needs behind ziggurat.hf, and doctor's.

in_trainer.py saves and loads in Trainer's checkpoints, and hf_deepspeed.py takes a config for DeepSpeed there.
train_check.py is `ziggurat doctor --train`.
"""
