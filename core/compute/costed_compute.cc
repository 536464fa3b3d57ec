// SPDX-License-Identifier: Apache-2.0
// core/compute/costed_compute.cc: queues each operation's bytes, and waits for its end.
#include "core/compute/costed_compute.h"

namespace ziggurat {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const DeviceSpan<T>& span) noexcept {
  return {reinterpret_cast<const std::byte*>(span.address()), span.size_bytes()};
}

}  // namespace

Task<> CostedCompute::after(const Event& event) {
  stream_->wait(event);
  co_return;
}

Task<Event> CostedCompute::clear(DeviceSpan<std::byte> bytes) {
  stream_->use_memory(bytes.size(), {.written = bytes_of(bytes)});
  co_return stream_->record();
}

/// The sums of squares come to the host, and are zero as all gradients here.
Task<> CostedCompute::round(const Rounding& rounding) {
  // The rounded values may lie where the values are.
  const std::uint64_t row_bytes = rounding.values.size_bytes() + rounding.out.bytes.size();
  stream_->use_memory(rounding.rows * row_bytes, {.written = bytes_of(rounding.values),
                                                  .rows = rounding.rows,
                                                  .written_stride_bytes = rounding.stride_bytes});
  if (!rounding.squares.empty()) stream_->bring_to_host(rounding.squares.size_bytes());
  const Event ended = stream_->record();
  co_await ended.wait();
}

Task<> CostedCompute::quantize(const Quantizing& quantizing) {
  stream_->use_memory(quantizing.values.size_bytes() + quantizing.codes.size(),
                      {.read = bytes_of(quantizing.values)});
  stream_->bring_to_host(quantizing.codes.size());
  const Event ended = stream_->record();
  co_await ended.wait();
}

Task<> CostedCompute::update(const Update& update) {
  stream_->use_memory(
      2 * update.record.size() + update.grad.bytes.size() + update.param.bytes.size(),
      {.read = bytes_of(update.grad.bytes), .written = bytes_of(update.record)});
  const Event ended = stream_->record();
  co_await ended.wait();
}

}  // namespace ziggurat
