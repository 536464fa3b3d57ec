// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_reducer.h: the sum of a unit's gradient over the ranks: from
// every rank's fp32 accumulator to the gradient of the chunks that this rank updates, in the
// model's type.
//
// Each rank rounds its own sum over micro-batches once, to the type that travels; the owner of an
// element adds the ranks' values in rank order in fp32 and rounds once. A bucket is the same run of
// every rank's slice, so that where buckets end changes no bit. In stage 0 the owners' results are
// gathered again: the same bits on every rank. Where groups of ranks each have a copy of the state,
// the groups' sums of a slice are summed in turn, in their order. Quantized gradients go node by
// node (quantized_reduction.cc): those bits depend on how many ranks a node has, too.
//
// Ranks exchange host memory. Of a device that the CPU cannot reach, what a bucket sends is rounded
// or quantized there and copied to the bucket, and the sum is copied back from there.
//
// One coroutine makes the reductions, unit by unit as they are finished and bucket by bucket: the
// order in which ranks meet is the program's. A few buckets are under way at once. Reactor's thread
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/gradients/gradient_norm.h"
#include "core/schedule/spare_buffers.h"
#include "core/schedule/turns.h"
#include "core/sharding/reduction.h"

namespace ziggurat {

class GradientReducer {
 public:
  /// Host memory for one bucket: every rank's run, and the sum; or the codes that are sent and
  /// those that come, and the sum where it has to be copied to the device.
  static std::uint64_t bucket_bytes(const ChunkTable& table, const ReductionSettings& settings);

  /// Takes kReduceBuckets of host memory for good. `norm` gets the sums of this rank's
  /// slices. Errors: kResourceExhausted.
  GradientReducer(Context& context, const ReductionSettings& settings, GradientNorm& norm);

  /// One unit's reduction. Its accumulator is the reduction's until the last chunk is reduced.
  struct Reduction {
    UnitId unit;
    DeviceSpan<float> accumulator;
    std::vector<Signal> reduced{};         ///< by chunk of a slice
    std::vector<std::uint64_t> missing{};  ///< elements of it
  };
  /// Puts `unit` next in the order. When `reduced[i]` is set, every chunk of this rank that is
  /// number i of its slice lies at the place of its fp32 values, in the model's type. Not of chunks
  /// that are constant in every slice: nothing is sent for them.
  std::shared_ptr<Reduction> reduce(UnitId unit, DeviceSpan<float> accumulator);

 private:
  struct Bucket {
    std::shared_ptr<Reduction> of;
    std::size_t chunk = 0;    ///< of the slice
    std::uint64_t first = 0;  ///< element of the chunk
    std::uint64_t count = 0;
    std::uint64_t number = 0;  ///< of all buckets
    std::span<std::byte> buffer{};
  };
  /// A bucket's buffer where nothing is quantized.
  struct Buffer {
    std::span<std::byte> runs;  ///< every rank's, then in stage 0 every rank's sums
    std::span<std::byte> sum;
  };
  struct Codes;
  static std::uint64_t bucket_count(const ChunkTable& table, const ReductionSettings& settings);

  Task<> drain();
  Task<> round(const Bucket& bucket);
  Task<> round_on_device(const Bucket& bucket, int slice);
  Task<> send(const Bucket& bucket);
  Task<> take_in(Bucket bucket, Task<> sent);
  Task<> take_in_sum(const Bucket& bucket);
  Task<> convert(const Bucket& bucket);
  Task<> gather(const Bucket& bucket);
  Buffer parts(const Bucket& bucket) const;
  std::span<std::byte> run_sent(const Bucket& bucket, int slice) const;
  std::uint64_t chunk_begin(const Bucket& bucket, int slice) const;
  DeviceSpan<float> values(const Bucket& bucket, int slice) const;
  DeviceSpan<std::byte> place(const Bucket& bucket, int slice) const;
  std::span<std::byte> result_room(const Bucket& bucket) const;
  Task<> bring(std::span<const std::byte> result, DeviceSpan<std::byte> to);
  void put_tile(const Bucket& bucket, std::uint64_t first, std::span<const float> values,
                TypedSpan<std::byte> out);

  // quantized_reduction.cc
  Task<> encode(const Bucket& bucket);
  Task<> encode_on_device(DeviceSpan<const float> run, std::span<std::byte> codes);
  Task<> send_codes(const Bucket& bucket);
  Task<> send_node_sums(const Bucket& bucket);
  Task<> take_in_codes(const Bucket& bucket);

  Context& context_;
  ReductionSettings settings_;
  GradientNorm& norm_;
  std::uint64_t bucket_count_;  ///< elements of a slice in one bucket
  bool quantized_;
  SpareBuffers buffers_;
  Turns turns_;  ///< of second exchanges
  std::deque<std::shared_ptr<Reduction>> queue_;
  bool draining_ = false;
  std::uint64_t next_number_ = 0;  ///< of the next bucket
};

}  // namespace ziggurat
