// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/onednn.h: oneDNN, which is opened by the first call of one of its functions, so
// that commands that multiply no matrices start without its 40 MB. onednn.cc defines the functions
// that matmul.cc uses, as oneDNN's own headers declare them; here is what those lack.
#pragma once

namespace ziggurat::gpt {

/// Returns the calling thread's limit in the OpenMP with which oneDNN makes threads. Errors:
/// kUnavailable if oneDNN cannot be opened, as from each of its functions.
int openmp_threads_max();

/// Sets that limit.
void limit_openmp_threads(int count);

}  // namespace ziggurat::gpt
