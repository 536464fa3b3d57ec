// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_reducer.h: sums a unit's gradient over the ranks. It takes every
// rank's fp32 accumulator and gives the gradient of the chunks that this rank updates, in the
// model's type.
//
// Each rank first rounds its own sum over micro-batches once, to the type that is sent. The owner
// of an element then adds the ranks' values in fp32, in the order of ranks, and rounds the result
// once. A bucket has the same range of every rank's slice, so the size of buckets does not change
// any bit. In stage 0 the owners' results are gathered again, so every rank has the same bits. If
// there are groups of ranks that each have a copy of the state, the groups' sums of a slice are
// then summed, in the order of groups. Quantized gradients are exchanged node by node
// (quantized_reduction.cc); their bits depend on the number of ranks per node too.
//
// Ranks exchange only host memory. If the CPU cannot reach the device, a bucket's data is rounded
// or quantized on the device and copied to the bucket, and the sum is copied back.
//
// One coroutine makes the reductions, unit by unit in the order in which units are finished, and
// bucket by bucket. So all ranks exchange in the same order. A few buckets are under way at once.
// Reactor's thread only.
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
  /// Returns the host memory for one bucket. It holds every rank's range and the sum. If gradients
  /// are quantized, it holds the codes that are sent and received, and the sum if that must be
  /// copied to the device.
  static std::uint64_t bucket_bytes(const ChunkTable& table, const ReductionSettings& settings);

  /// Takes host memory for kReduceBuckets buckets for the whole run. `norm` gets the sums of
  /// squares of this rank's slices. Errors: kResourceExhausted.
  GradientReducer(Context& context, const ReductionSettings& settings, GradientNorm& norm);

  /// The reduction of one unit. Nobody else may use its accumulator until the last chunk is
  /// reduced.
  struct Reduction {
    UnitId unit;
    DeviceSpan<float> accumulator;
    std::vector<Signal> reduced{};         ///< by number of the chunk in its slice
    std::vector<std::uint64_t> missing{};  ///< elements of that chunk that are not reduced yet
  };
  /// Puts `unit` at the end of the queue. When `reduced[i]` is set, chunk number i of every slice
  /// of this rank is reduced: it lies, in the model's type, where its fp32 values began. For a
  /// chunk that is constant in every slice nothing is sent.
  std::shared_ptr<Reduction> reduce(UnitId unit, DeviceSpan<float> accumulator);

 private:
  struct Bucket {
    std::shared_ptr<Reduction> of;
    std::size_t chunk = 0;    ///< number of the chunk in its slice
    std::uint64_t first = 0;  ///< first element in the chunk
    std::uint64_t count = 0;
    std::uint64_t number = 0;  ///< counted over all buckets
    std::span<std::byte> buffer{};
  };
  /// The parts of a bucket's buffer if nothing is quantized.
  struct Buffer {
    std::span<std::byte> runs;  ///< every rank's range; afterwards, in stage 0, every rank's sums
    std::span<std::byte> sum;
  };
  struct Codes;
  static std::uint64_t bucket_count(const ChunkTable& table, const ReductionSettings& settings);

  DType sent_type(const Bucket& bucket) const;
  Task<> drain();
  Task<> round(const Bucket& bucket);
  Task<> round_on_device(const Bucket& bucket);
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
  Context::DeviceRows rows(const Bucket& bucket, DeviceSpan<std::byte> first) const;
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
  Turns turns_;  ///< orders the second exchanges
  std::deque<std::shared_ptr<Reduction>> queue_;
  bool draining_ = false;
  std::uint64_t next_number_ = 0;  ///< number of the next bucket
};

}  // namespace ziggurat
