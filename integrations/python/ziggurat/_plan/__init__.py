# SPDX-License-Identifier: Apache-2.0
"""What a run of an offloaded model takes and moves: asked before anything is allocated, and judged while it runs.

asked.py has the run as it is asked for, with what the engine says of its memory, and places.py where its bytes are;
traffic.py and from_ranks.py count those that a step moves, step_bound.py the least time. plan.py makes plan()'s answer of it, and why_slow.py says what limits a run that goes.

Of a module that nobody offloads, recorded_step.py and recorded_update.py find what a step takes, while unchanged.py keeps
the module as it is; live_plan.py puts that together, live_strategies.py around it what DDP, ZeRO, FSDP and offload() hold, and
live_page.py is what a person reads.
"""
