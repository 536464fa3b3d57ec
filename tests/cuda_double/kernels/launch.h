// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/launch.h: kernels of these tests, as the host calls them.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "tests/cuda_double/kernels/instructions.h"

namespace ziggurat::cuda_double {

void launch_rule(Rule rule, const std::uint64_t* x, const std::uint64_t* y, std::uint64_t* out,
                 std::uint32_t count, cudaStream_t stream);
/// Sums of 256 floats each.
void launch_sum(const float* x, float* sums, unsigned blocks, cudaStream_t stream);
/// Three blocks each add 1, 10, 100 or 1000 to bins 0 to 3 for every byte.
void launch_histogram(const std::uint8_t* x, unsigned* bins, unsigned count, cudaStream_t stream);

// Kernels with a mistake in each, that the double must see.
void launch_without_barrier(const float* x, float* out, cudaStream_t stream);
void launch_one_too_many(const float* x, float* out, unsigned count, cudaStream_t stream);
void launch_barrier_in_branch(float* out, cudaStream_t stream);
void launch_shuffle_from_nobody(float* out, cudaStream_t stream);
void launch_misaligned(const std::uint8_t* x, float* out, cudaStream_t stream);
/// The upper halves of 64 floats a block, to the front of the same memory.
void launch_overtaken(float* x, unsigned blocks, cudaStream_t stream);
/// Three blocks store 1: by a volatile store, or, the mistake, by a plain one.
void launch_flag(unsigned* flag, bool strong, cudaStream_t stream);
/// out[i] = x[i] * y[i] + z[i], as three compilations have it.
void launch_product_sum(const float* xyz, float* out, unsigned count, cudaStream_t stream);
void launch_product_sum_fused(const float* xyz, float* out, unsigned count, cudaStream_t stream);
void launch_quotient_fast(const float* xyz, float* out, unsigned count, cudaStream_t stream);
/// The stub of launch_product_sum's kernel, for set_twin().
const void* product_sum_stub();

}  // namespace ziggurat::cuda_double
