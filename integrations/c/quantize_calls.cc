// SPDX-License-Identifier: Apache-2.0
// integrations/c/quantize_calls.cc: the C functions that encode and sum what ranks exchange in 8 or
// 4 bits.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collectives/quantize/quantize.h"
#include "core/schedule/quantized_jobs.h"
#include "integrations/c/c_call.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/wrong.h"

namespace {

using ziggurat::add_dequantized;
using ziggurat::bytes_of;
using ziggurat::guarded;
using ziggurat::kTileElements;
using ziggurat::memory_of;
using ziggurat::quantized_bytes;
using ziggurat::QuantizedBits;
using ziggurat::required;
using ziggurat::room_of;
using ziggurat::Runtime;
using ziggurat::runtimes;
using ziggurat::Task;
using ziggurat::WorkGroup;
using ziggurat::wrong;

QuantizedBits bits_of(std::uint32_t bits) {
  if (bits == 8 || bits == 4) return static_cast<QuantizedBits>(bits);
  throw wrong(fmt::format("bits is {}: give 8 or 4", bits));
}

/// Rows of codes in memory.
struct Rows {
  QuantizedBits bits;
  std::uint64_t rows;
  std::uint64_t count;  ///< elements of each
  std::uint64_t stride_bytes;

  /// Returns the bytes from the first row's to the last one's end. Errors: kInvalidArgument.
  std::uint64_t size_bytes() const {
    const std::uint64_t each = quantized_bytes(bits, count);
    if (rows > 1 && stride_bytes < each)
      throw wrong(
          fmt::format("stride_bytes is {}, but the codes of {} elements take {}: give that "
                      "or more",
                      stride_bytes, count, each));
    return rows == 0 ? 0 : (rows - 1) * stride_bytes + each;
  }
  /// Returns where elements of a row lie; `first` is where a block begins.
  template <class Byte>
  std::span<Byte> part(std::span<Byte> codes, std::uint64_t row, std::uint64_t first,
                       std::uint64_t elements) const {
    return codes.subspan(row * stride_bytes + quantized_bytes(bits, first),
                         quantized_bytes(bits, elements));
  }
};

/// Runs jobs on the runtime's workers, and waits for them.
void run_all(Runtime& runtime, ziggurat::Work all, const std::vector<std::function<void()>>& jobs) {
  if (jobs.empty()) return;
  all.bytes /= jobs.size();
  runtime.reactor.block_on([](Runtime& its, ziggurat::Work each,
                              const std::vector<std::function<void()>>& to_do) -> Task<> {
    WorkGroup group(its.reactor);
    for (const std::function<void()>& job : to_do)
      group.spawn(its.jobs().run(its.reactor, each, job));
    co_await group.wait_idle();
  }(runtime, all, jobs));
}

/// Sums a run of elements tile by tile, so that the sums stay in a core's cache.
void sum_run(const Rows& its, std::span<const std::byte> codes, std::uint64_t begin,
             std::span<float> sums) {
  for (std::uint64_t at = 0; at < sums.size(); at += kTileElements) {
    const std::uint64_t elements = std::min<std::uint64_t>(kTileElements, sums.size() - at);
    const std::span<float> tile = sums.subspan(at, elements);
    std::ranges::fill(tile, 0.0F);
    for (std::uint64_t row = 0; row < its.rows; ++row)
      add_dequantized(its.bits, its.part(codes, row, begin + at, elements), tile);
  }
}

}  // namespace

ziggurat_status ziggurat_quantized_bytes(uint32_t bits, uint64_t count, uint64_t* size_bytes) {
  return guarded(
      [&] { *required(size_bytes, "size_bytes") = quantized_bytes(bits_of(bits), count); });
}

ziggurat_status ziggurat_quantize(ziggurat_runtime runtime, uint32_t bits,
                                  const ziggurat_memory* values, uint64_t rows, void* codes,
                                  uint64_t stride_bytes) {
  return guarded([&] {
    const std::shared_ptr<Runtime> its = runtimes().find(runtime);
    const auto all = memory_of(values, "values");
    if (rows == 0 || all.count() % rows != 0)
      throw wrong(fmt::format("rows is {}, but {} values cannot be divided so: give a divisor",
                              rows, all.count()));
    const Rows to{.bits = bits_of(bits),
                  .rows = rows,
                  .count = all.count() / rows,
                  .stride_bytes = stride_bytes};
    const std::span<std::byte> room = room_of(codes, to.size_bytes(), "codes");
    std::vector<std::function<void()>> jobs;
    for (std::uint64_t row = 0; row < rows; ++row) {
      ziggurat::each_quantized_job(to.count, [&](std::uint64_t first, std::uint64_t count) {
        jobs.emplace_back([=] {
          ziggurat::quantize(to.bits, all.subspan(row * to.count + first, count),
                             to.part(room, row, first, count));
        });
      });
    }
    run_all(*its, {"quantize gradient", all.bytes.size() + room.size()}, jobs);
  });
}

ziggurat_status ziggurat_sum_quantized(ziggurat_runtime runtime, uint32_t bits, const void* codes,
                                       uint64_t rows, uint64_t stride_bytes,
                                       const ziggurat_memory* sums) {
  return guarded([&] {
    const std::shared_ptr<Runtime> its = runtimes().find(runtime);
    const std::span<float> into = ziggurat::floats_of(sums, "sums");
    const Rows from{
        .bits = bits_of(bits), .rows = rows, .count = into.size(), .stride_bytes = stride_bytes};
    const std::span<const std::byte> all = bytes_of(codes, from.size_bytes(), "codes");
    std::vector<std::function<void()>> jobs;
    ziggurat::each_quantized_job(from.count, [&](std::uint64_t first, std::uint64_t count) {
      jobs.emplace_back([&from, all, first, part = into.subspan(first, count)] {
        sum_run(from, all, first, part);
      });
    });
    run_all(*its, {"sum quantized gradient", all.size() + into.size_bytes()}, jobs);
  });
}
