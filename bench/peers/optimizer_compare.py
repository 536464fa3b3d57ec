#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/peers/optimizer_compare.py: compares our optimizers with torch.optim over a thousand steps of the same fp32
# gradients.
#
#   optimizer_compare.py BUILD/bin/optimizer_trajectory [--steps N]
#
# Prints two numbers for each optimizer that PyTorch has: by how much one step's update differs at most, relative to the
# largest update of that step; and by how much the way from the first masters to the last differs, relative to the
# longest way. Both sides round every operation to fp32 (relative error 6e-8) in their own order, and a moment carries
# some 1 / (1 - beta) roundings. So a step may differ by about 32 x 6e-8 = 2e-6 of itself and by an ulp of its
# parameter. PyTorch lacks Lion, which is compared with its paper's formula in double, by the whole way: if momentum and
# gradient cancel to the last bit, its sign may flip, and a step differ by 2 lr. Exits with 1 beyond the limit, and with
# 77 if PyTorch is not installed.
import argparse
import subprocess
import sys

try:
    import numpy as np
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

COUNT = 16384  # elements of a tile
# the largest difference, relative to a step's largest update; an ulp of a parameter near 1 is 6e-8, an update 1e-3 or
# more
LIMIT = 1e-3
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
TORCH = {
    "adamw": lambda p: torch.optim.AdamW([p], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY),
    "adam": lambda p: torch.optim.Adam([p], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY),
    "adagrad": lambda p: torch.optim.Adagrad([p], lr=LR, eps=EPS, weight_decay=DECAY),
    "sgd": lambda p: torch.optim.SGD([p], lr=LR, momentum=BETA1, weight_decay=DECAY),
}


def torch_trajectory(name, start, gradients):
    param = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = TORCH[name](param)
    masters = []
    for gradient in gradients:
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
        masters.append(param.detach().numpy().copy())
    return np.stack(masters)


def lion_trajectory(start, gradients):
    w, m, masters = start.astype(np.float64), np.zeros(COUNT), []
    beta1, beta2, lr, decay = (float(np.float32(x)) for x in (BETA1, BETA2, LR, DECAY))
    for gradient in gradients.astype(np.float64):
        w = w - lr * (np.sign(beta1 * m + (1 - beta1) * gradient) + decay * w)
        m = beta2 * m + (1 - beta2) * gradient
        masters.append(w)
    return np.stack(masters)


def our_trajectory(program, name, start, gradients):
    command = [program, name, *(str(x) for x in (LR, BETA1, BETA2, EPS, DECAY)), str(len(gradients))]
    done = subprocess.run(command, input=start.tobytes() + gradients.tobytes(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, np.float32).reshape(len(gradients), COUNT)


def differences(start, ours, theirs):
    ours = np.concatenate([start[None], ours]).astype(np.float64)
    theirs = np.concatenate([start[None], theirs]).astype(np.float64)
    our_updates, their_updates = np.diff(ours, axis=0), np.diff(theirs, axis=0)
    step = np.max(np.abs(our_updates - their_updates).max(1) / np.abs(their_updates).max(1))
    way = np.abs(ours[-1] - theirs[-1]).max() / np.abs(theirs[-1] - theirs[0]).max()
    return step, way


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    start = (0.02 * random.standard_normal(COUNT)).astype(np.float32)
    drift = random.standard_normal(COUNT)
    gradients = np.stack([(0.01 * (drift + random.standard_normal(COUNT))).astype(np.float32)
                          for _ in range(options.steps)])
    print(f"{'':8} {'one update':>12} {'whole way':>12}   ({options.steps} steps, PyTorch {torch.__version__})")
    worst = 0
    for name in [*TORCH, "lion"]:
        theirs = lion_trajectory(start, gradients) if name == "lion" else torch_trajectory(name, start, gradients)
        step, way = differences(start, our_trajectory(options.program, name, start, gradients), theirs)
        print(f"{name:8} {step:12.1e} {way:12.1e}")
        worst = max(worst, way / 10 if name == "lion" else step)
    sys.exit(f"an optimizer differs by more than {LIMIT}" if worst > LIMIT else 0)


if __name__ == "__main__":
    main()
