// SPDX-License-Identifier: Apache-2.0
// collectives/call_shape.cc: the sizes and ranks that fit.
#include "collectives/call_shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {
namespace {

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(text, std::forward<Args>(args)...));
}

void check_elements(const char* call, std::size_t bytes, DType dtype) {
  if (bytes % size_bytes(dtype) != 0) {
    refuse("{}: {} bytes are not whole elements of {}", call, bytes, to_string(dtype));
  }
}

}  // namespace

void check_all_gather(std::size_t input_bytes, std::size_t output_bytes, int world_size) {
  if (output_bytes != input_bytes * static_cast<std::size_t>(world_size)) {
    refuse("all_gather: {} bytes in and {} out on {} ranks: out must be {}", input_bytes,
           output_bytes, world_size, input_bytes * static_cast<std::size_t>(world_size));
  }
}

void check_reduce_scatter(std::size_t input_bytes, std::size_t output_bytes, DType dtype,
                          int world_size) {
  check_elements("reduce_scatter", output_bytes, dtype);
  if (input_bytes != output_bytes * static_cast<std::size_t>(world_size)) {
    refuse("reduce_scatter: {} bytes in and {} out on {} ranks: in must be {}", input_bytes,
           output_bytes, world_size, output_bytes * static_cast<std::size_t>(world_size));
  }
}

void check_all_reduce(std::size_t bytes, DType dtype) {
  check_elements("all_reduce", bytes, dtype);
}

void check_all_to_all(std::size_t input_bytes, std::size_t output_bytes, int world_size) {
  if (input_bytes != output_bytes || input_bytes % static_cast<std::size_t>(world_size) != 0) {
    refuse(
        "all_to_all: {} bytes in and {} out on {} ranks: they must be as many, in {} even slices",
        input_bytes, output_bytes, world_size, world_size);
  }
}

void check_root(int root, int world_size) {
  if (root < 0 || root >= world_size) {
    refuse("broadcast: root {} of {} ranks, counted from 0", root, world_size);
  }
}

void check_peer(const char* call, int peer, int rank, int world_size) {
  if (peer < 0 || peer >= world_size || peer == rank) {
    refuse("{}: rank {} of {} ranks, on rank {}: name another rank, counted from 0", call, peer,
           world_size, rank);
  }
}

int check_members(std::span<const int> members, int rank, int world_size) {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  const auto own = std::find(members.begin(), members.end(), rank);
  if (members.empty() || !ascending || members.front() < 0 || members.back() >= world_size ||
      own == members.end()) {
    refuse("split: members [{}] on rank {} of {} ranks: give ascending ranks, this one among them",
           fmt::join(members, ", "), rank, world_size);
  }
  return static_cast<int>(own - members.begin());
}

}  // namespace ziggurat
