// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/quantized_gather.h: gathers parameters in int8 between ranks in stage 3 (qwZ
// of ZeRO++, Wang et al. 2023, section 4.1). Each rank turns its slice into blocks of codes. The
// codes go to one rank of each other node and from there to all ranks of that node, and become
// parameters again.
//
// A rank decodes its own slice too, so that all ranks compute with the same bits. Masters and the
// 16-bit parameters at home do not change. Blocks begin where tiles do, so the number of ranks,
// nodes or threads does not change any bit.
//
// The buffer has a unit's codes in this order: first the slices of the first rank of every node,
// then those of the second rank of every node, and so on. With ranks 0 and 1 on one node, 2 and 3
// on another, the order is 0 2 | 1 3.
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
  /// Returns the host memory for the codes of the largest unit. There are kQuantizedGathers such
  /// buffers.
  static std::uint64_t buffer_bytes(const ChunkTable& table);

  /// Errors: kResourceExhausted.
  explicit QuantizedGather(Context& context);

  struct Codes {
    UnitId unit = 0;
    std::uint64_t number = 0;  ///< number of the gather, counted over all gathers
    std::span<std::byte> buffer{};
  };
  /// Turns this rank's `slice` into codes. Waits for a buffer, and so for gathers that began
  /// before.
  Task<Codes> encode(UnitId unit, std::span<const std::byte> slice);
  /// Makes the first exchange. Calls are made in the order of encode().
  Task<> begin(const Codes& codes);
  /// Makes the second exchange, if there is one, after the first has ended.
  Task<> finish(Codes codes);
  /// The same range of elements in every slice; `first` is where a tile begins.
  struct Run {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
  };
  /// Turns the codes of `run` of all slices into parameters, side by side in `out`.
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
