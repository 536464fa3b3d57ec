// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/quantized_gather.h: stage 3 with parameters in int8 between ranks (qwZ of
// ZeRO++, Wang et al. 2023, section 4.1): a rank's slice becomes blocks of codes, which go to one
// rank of each other node and from there to all of it, and become parameters again.
//
// A rank takes its own slice from the codes too, so that all compute with the same bits; masters
// and the 16-bit parameters at home are as they were. Blocks begin where tiles do, so neither the
// number of ranks nor nodes or threads change a bit.
//
// A unit's codes in a buffer: neighbours of a node behind each other, of each the slices of all
// nodes (ranks 0 and 1, 2 and 3 on a node):  slices 0 2 | 1 3
//
// Reactor's thread only.
#pragma once

#include <cstdint>
#include <span>

#include "core/schedule/context.h"
#include "core/schedule/spare_buffers.h"
#include "core/schedule/turns.h"

namespace ziggurat {

class QuantizedGather {
 public:
  /// Host memory for the codes of one unit, the largest; kQuantizedGathers are taken.
  static std::uint64_t buffer_bytes(const ChunkTable& table);

  /// Errors: kResourceExhausted.
  explicit QuantizedGather(Context& context);

  struct Codes {
    UnitId unit = 0;
    std::uint64_t number = 0;  ///< of all gathers
    std::span<std::byte> buffer{};
  };
  /// This rank's `slice`. Waits for a buffer, so for gathers begun before.
  Task<Codes> encode(UnitId unit, std::span<const std::byte> slice);
  /// The first exchange, begun at once: in the order of encode().
  Task<> begin(const Codes& codes);
  /// The first exchange is over: makes the second, if there is one.
  Task<> finish(Codes codes);
  /// A run of every slice, in elements; `first` begins a tile.
  struct Run {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
  };
  /// And all slices' runs are parameters, side by side in `out`.
  Task<> decode(Codes codes, Run run, std::span<std::byte> out);
  void give_back(const Codes& codes) { buffers_.give_back(codes.buffer); }

 private:
  std::span<std::byte> codes_of(const Codes& codes, int rank, int slices) const;

  Context& context_;
  SpareBuffers buffers_;
  Turns turns_;
  std::uint64_t next_number_ = 0;
};

}  // namespace ziggurat
