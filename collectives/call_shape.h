// SPDX-License-Identifier: Apache-2.0
// collectives/call_shape.h: what every back-end checks of a call before it begins. Errors:
// kInvalidArgument, naming the call and both sizes.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace ziggurat {

void check_all_gather(std::size_t input_bytes, std::size_t output_bytes, int world_size);
void check_reduce_scatter(std::size_t input_bytes, std::size_t output_bytes, DType dtype,
                          int world_size);
void check_all_reduce(std::size_t bytes, DType dtype);
void check_all_to_all(std::size_t input_bytes, std::size_t output_bytes, int world_size);
void check_root(int root, int world_size);
/// `call` is "send" or "recv".
void check_peer(const char* call, int peer, int rank, int world_size);
/// Ascending, of the world, and with `rank` among them; returns its place.
int check_members(std::span<const int> members, int rank, int world_size);

}  // namespace ziggurat
