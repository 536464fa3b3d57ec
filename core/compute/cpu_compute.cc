// SPDX-License-Identifier: Apache-2.0
// core/compute/cpu_compute.cc: each operation as jobs of the CPU's workers.
#include "core/compute/cpu_compute.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/runtime/async.h"
#include "collectives/quantize/quantize.h"
#include "optimizer/gradient.h"
#include "tiers/device/host_device.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// The number of bytes that one job of clear() sets to zero.
constexpr std::uint64_t kClearBytes = std::uint64_t{2} << 20;

}  // namespace

std::span<std::byte> CpuCompute::host_view(DeviceSpan<std::byte> bytes) const noexcept {
  return HostDevice::view(bytes);
}

/// Clears in pieces, so that workers share the pass and a tile of the trainer's work never waits
/// long behind one job.
Task<Event> CpuCompute::clear(DeviceSpan<std::byte> bytes) {
  std::vector<std::function<void()>> jobs;
  std::vector<Work> work;
  for (std::uint64_t begin = 0; begin < bytes.size(); begin += kClearBytes) {
    const std::uint64_t size_bytes = std::min(kClearBytes, bytes.size() - begin);
    const std::span<std::byte> piece = host_view(bytes.subspan(begin, size_bytes));
    jobs.emplace_back([piece] { std::memset(piece.data(), 0, piece.size()); });
    work.push_back({.name = "clear accumulator", .bytes = size_bytes, .written = piece});
  }
  WorkGroup group(reactor_);
  for (std::size_t i = 0; i < jobs.size(); ++i)
    group.spawn(workers_.run(reactor_, work[i], jobs[i]));
  co_await group.wait_idle();
  co_return Event();
}

/// Rounds one tile after another in a single job. `out` may begin where `values` do: then each tile
/// of 16-bit values overwrites only fp32 values that were read already.
Task<> CpuCompute::round(const Rounding& rounding) {
  const std::span<double> squares = rounding.squares;
  const std::function<void()> job = [&] {
    for (std::uint64_t row = 0; row < rounding.rows; ++row) {
      const std::span<const float> values = HostDevice::view(rounding.row(row).values);
      const TypedSpan<std::byte> out = HostDevice::view(rounding.row(row).out);
      for (std::size_t begin = 0; begin < values.size(); begin += kTileElements) {
        const double sum =
            round_gradient(values.subspan(begin, kTileElements), out.subspan(begin, kTileElements));
        if (!squares.empty()) squares[begin / kTileElements] = sum;
      }
    }
  };
  const std::uint64_t row_bytes = rounding.values.size_bytes() + rounding.out.bytes.size();
  Work work{.name = "round gradient", .bytes = rounding.rows * row_bytes};
  if (rounding.rows == 1) work.written = std::as_bytes(HostDevice::view(rounding.values));
  co_await workers_.run(reactor_, work, job);
}

Task<> CpuCompute::quantize(const Quantizing& quantizing) {
  const std::function<void()> job = [&] {
    ziggurat::quantize(quantizing.bits, as_typed(HostDevice::view(quantizing.values)),
                       quantizing.codes);
  };
  co_await workers_.run(
      reactor_, {"quantize gradient", quantizing.values.size_bytes() + quantizing.codes.size()},
      job);
}

Task<> CpuCompute::update(const Update& update) {
  const RecordView view{.format = update.format,
                        .record = HostDevice::view(update.record),
                        .grad = HostDevice::view(update.grad),
                        .param = HostDevice::view(update.param),
                        .first_element = update.first_element};
  const std::function<void()> job = [&] { update_record(update.steps, view, update.runs); };
  const std::uint64_t bytes =
      2 * view.record.size() + view.grad.bytes.size() + view.param.bytes.size();
  const Work work{.name = "update record",
                  .bytes = bytes,
                  .read = view.grad.bytes,
                  .written = view.record,
                  .also_written = view.param.bytes};
  co_await workers_.run(reactor_, work, job);
}

}  // namespace ziggurat
