// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grad_sums.h: sums of gradients over micro-batches in a file on NVMe, for a
// trainer that lends its parameters and has no memory for 4 bytes a parameter. Each chunk is read,
// added to and written; nobody waits for a write but who uses the chunk next, and the step. A sole
// summand stays in its own type, which is half of the bytes for 16 bits. Reactor's thread only.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/typed_span.h"
#include "core/schedule/context.h"
#include "tiers/store/swap_file.h"

namespace ziggurat {

/// A run of a parameter's elements, and the chunk that has it.
struct ChunkRun {
  ChunkId chunk;
  ParamRun run;
};

class GradSums {
 public:
  /// `params` is the number of parameters that are lent.
  GradSums(Context& context, std::vector<StripePlace> places, std::size_t params);

  /// Adds `scale` times `values` to the sum of a parameter for the step to come, in fp32. Its first
  /// summand is added to zeros, or with `instead_of_zeros` takes their place. The sweep must not
  /// be using the parameter's last sum. When this returns, `values` were read. After an error
  /// the parameter has a sum that is of no use: calls throw until it is discarded.
  Task<> add(ParamId param, std::span<const ChunkRun> runs, TypedSpan<const std::byte> values,
             float scale, bool instead_of_zeros);
  /// Reads elements from `first` on of a sum for the step to come.
  Task<> read(ParamId param, std::span<const ChunkRun> runs, std::uint64_t first,
              std::span<float> values);
  bool has(ParamId param) const noexcept { return coming_[param]; }
  void discard(ParamId param) noexcept {
    coming_[param] = false;
    incomplete_.erase(param);
  }

  /// Returns when all sums are written. Errors, which name the parameter: of a write of sums for
  /// the step to come, or of a summand that was not added whole, until they are discarded.
  Task<> settle();
  /// Makes the sums for the step to come those of the step that is being made.
  void take();
  /// Whether a parameter has a sum in the step that is being made.
  bool taken(ParamId param) const noexcept { return taken_[param]; }
  /// Reads a chunk, with padding, into `item`, which has 4 bytes for each element: sums in fp32, or
  /// a sole summand as it was. Elements of parameters without a sum are of no meaning.
  Task<TypedSpan<const std::byte>> fetch(ChunkId chunk, std::span<std::byte> item);

 private:
  Task<Lease> lease(ChunkId chunk);
  Task<> fetch_wide(ChunkId chunk, std::span<float> sums);
  std::span<std::byte> stored(ChunkId chunk, std::span<std::byte> item) const;
  Task<> add_run(ParamId param, ChunkId chunk, ParamRun run, TypedSpan<const std::byte> values,
                 float scale, bool instead_of_zeros);
  Task<> write(ChunkId chunk, Lease sums, std::uint64_t hash, std::shared_ptr<Signal> written);
  Task<> written(ChunkId chunk);
  void lose(ChunkId chunk, const std::exception_ptr& failure);
  void require_complete(ParamId param) const;

  Context& context_;
  std::unique_ptr<SwapFile> file_;  // an item for each chunk
  std::vector<bool> coming_, taken_;
  std::map<ParamId, std::exception_ptr> incomplete_;   // sums that lack a part of a summand
  std::vector<DType> types_;                           // of each chunk's item
  std::map<ChunkId, std::shared_ptr<Signal>> writes_;  // under way, or failed
};

}  // namespace ziggurat
