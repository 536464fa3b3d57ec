// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/workspace.h: cuts the trainer's device memory once into the pieces that its
// compute needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "integrations/gpt/array.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/matmul.h"

namespace ziggurat::gpt {

/// Cuts a buffer from front to back. Without a buffer it only counts, so that the size to ask for
/// and the cuts come from the same code.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    T* result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_bytes_);
    used_bytes_ += round_up(static_cast<std::uint64_t>(count) * sizeof(T), kAlignment) + kStagger;
    return result;
  }
  Array take(DType dtype, std::int64_t count) {
    return {dtype, take<std::byte>(count * static_cast<std::int64_t>(size_bytes(dtype)))};
  }
  std::uint64_t used_bytes() const noexcept { return used_bytes_; }

 private:
  static constexpr std::uint64_t kAlignment = 64;
  // Keeps arrays of a power of two from starting at equal addresses modulo 4 KiB, where a store to
  // one delays a load from another.
  static constexpr std::uint64_t kStagger = 320;

  std::byte* base_;
  std::uint64_t used_bytes_ = 0;
};

/// The scratch of one worker.
struct WorkerScratch {
  float* tile = nullptr;  ///< TiledMatmul::tile_elements_max()
  WideScratch wide;

  // Attention's scratch, for one block of queries against all keys.
  float* scores = nullptr;
  float* d_probabilities = nullptr;
  Array probabilities;
  Array d_scores;
  float* d_keys = nullptr;    ///< context x head width
  float* d_values = nullptr;  ///< the same
  float* dots = nullptr;
};

}  // namespace ziggurat::gpt
