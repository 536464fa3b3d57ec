# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job, and how they talk: who is there, what they send each other, and in which bits.

ranks.py has the calls that ranks make together, and ends all of them when one fails. cuts.py divides parameters
among ranks, by arithmetic alone. What is sent in a step is in _exchange.
"""
