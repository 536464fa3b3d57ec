# SPDX-License-Identifier: Apache-2.0
"""Gradients from backward to a step: what stands in `param.grad`, and what it holds until it is consumed.

gradient.py takes them over in backward; lent_gradient.py is the tensor without memory that a script sees. The
contents are a tensor (gradient_content.py), a rank's slice of the mean (shared_content.py), or what the engine has
in a file or in host memory (engine_content.py, shared_in_file.py).
"""
