#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/optimizer/loss_scale_peers_test.py: our loss scaler beside DeepSpeed's over random overflows: the same scale at every step.
"""    python3 loss_scale_peers_test.py TRACE_BINARY [--seed N] [--rounds N] [--steps N]

Exits with 77, saying why, where DeepSpeed cannot be imported.
"""
import argparse
import importlib
import random
import subprocess
import sys

SKIPPED = 77


def deepspeeds(scaler, overflows):
    scales = []
    for overflow in overflows:
        try:
            scaler.update_scale(overflow)
        except Exception as error:
            if "minimum" not in str(error):
                raise
            return scales + ["given up"]
        scales.append(f"{scaler.loss_scale:.17g}")
    return scales


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    try:
        module = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    except Exception as error:  # whatever importing it runs into is a reason to do without
        print(f"skipped: {error}")
        return SKIPPED
    module.logger.setLevel("ERROR")
    module.dist.get_rank = lambda: 1  # it logs as rank 0 of a group that is not there
    print(f"seed {options.seed}", flush=True)
    random.seed(options.seed)
    given_up = 0
    for _ in range(options.rounds):
        power, window, hysteresis = random.randint(1, 40), random.randint(1, 50), random.randint(1, 5)
        consecutive, minimum = random.random() < 0.5, 2.0 ** random.randint(-4, 1)
        rate = random.choice([0.0, 0.02, 0.1, 0.3])
        overflows = [random.random() < rate for _ in range(options.steps)]
        theirs = deepspeeds(module.DynamicLossScaler(2.0**power, window, minimum, hysteresis, consecutive), overflows)
        command = [options.binary, str(power), str(window), str(hysteresis), str(int(consecutive)), repr(minimum),
                   "".join(str(int(overflow)) for overflow in overflows)]
        ours = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
        # A scale is held to what a float can divide by; DeepSpeed's grows on.
        theirs = [min(float(scale), 2.0**126) if scale != "given up" else scale for scale in theirs]
        ours = [float(scale) if scale != "given up" else scale for scale in ours]
        if any(scale == 2.0**126 for scale in ours):
            end = ours.index(2.0**126)
            theirs, ours = theirs[:end], ours[:end]
        if theirs != ours:
            step = next((i for i, pair in enumerate(zip(theirs, ours)) if pair[0] != pair[1]), min(len(theirs), len(ours)))
            sys.exit(f"{command[1:6]}: differ at step {step}: {ours[step:step + 1]}, the peer {theirs[step:step + 1]}")
        given_up += theirs[-1:] == ["given up"]
    print(f"{options.rounds} sequences of {options.steps} steps: the same scales; {given_up} gave up at the minimum")
    return 0


if __name__ == "__main__":
    sys.exit(main())
