// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/quiet.h: whether anything but the calling thread goes on in this process.
#pragma once

namespace ziggurat::cuda_double {

/// True if every other thread sleeps, and slept all the while between two looks at them, so that
/// none can have woken another. What wakes one from outside (a timer, a drive) is not seen.
bool all_others_sleep();
/// True if the thread with this number (gettid) sleeps, or is gone.
bool sleeps(int thread);

}  // namespace ziggurat::cuda_double
