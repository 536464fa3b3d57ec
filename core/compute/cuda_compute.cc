// SPDX-License-Identifier: Apache-2.0
// core/compute/cuda_compute.cc: each operation as kernels that run in the order of one stream.
#include "core/compute/cuda_compute.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "collectives/quantize/cuda/quantize.h"
#include "optimizer/cuda/gradient.h"
#include "optimizer/cuda/update.h"
#include "tiers/device/cuda_context.h"
#include "tiers/store/record_format.h"

namespace ziggurat {
namespace {

/// Converts a span of device memory to the type that kernel launchers take. The CPU never reads it.
template <class T>
std::span<T> as_argument(DeviceSpan<T> span) noexcept {
  return {reinterpret_cast<T*>(span.address()), span.size()};
}

template <class Byte>
TypedSpan<Byte> as_argument(TypedDeviceSpan<Byte> span) noexcept {
  return {span.dtype, as_argument(span.bytes)};
}

/// The number of elements that one kernel quantizes: whole blocks, few enough to need little
/// memory, and enough for the launch to cost less than the copy.
constexpr std::uint64_t kCodedAtOnce = std::uint64_t{1} << 18;

class CudaCompute final : public Compute {
 public:
  CudaCompute(CudaDevice& device, Reactor& reactor, const ComputeLimits& limits)
      : device_(device),
        reactor_(reactor),
        stream_(device.create_stream("compute", StreamPriority::kNormal)),
        squares_(device.allocate(limits.round_count_max / kTileElements * sizeof(double),
                                 Purpose::kStaging)),
        scratch_(device.allocate(cuda::kUpdateScratchBytes, Purpose::kStaging)) {
    if (limits.quantizes)
      codes_ = device.allocate(quantized_bytes(QuantizedBits::k8, kCodedAtOnce), Purpose::kStaging);
  }

  std::span<std::byte> host_view(DeviceSpan<std::byte>) const noexcept override { return {}; }

  Task<> after(const Event& event) override {
    stream_->wait(event);
    co_return;
  }

  Task<Event> clear(DeviceSpan<std::byte> bytes) override {
    const std::exception_ptr failed = launch("clear", bytes.size(), [&](StreamHandle stream) {
      cuda::clear(stream, as_argument(bytes));
    });
    if (failed) co_await fail(failed);
    co_return stream_->record();
  }

  /// Shares `squares_` with the next round(): its kernel runs on the same stream, after this call's
  /// copy.
  Task<> round(const Rounding& rounding) override {
    const std::size_t tiles = rounding.values.size() / kTileElements;
    ZIGGURAT_CHECK(tiles * sizeof(double) <= squares_.size_bytes(), "{} tiles at once", tiles);
    const std::span<double> squares = squares_.as<double>().first(tiles);
    ZIGGURAT_CHECK(rounding.rows == 1 || rounding.squares.empty(), "sums of {} rows",
                   rounding.rows);
    for (std::uint64_t row = 0; row < rounding.rows; ++row) {
      const Rounding its = rounding.row(row);
      const std::exception_ptr failed =
          launch("round_gradient", its.values.size_bytes(), [&](StreamHandle stream) {
            cuda::round_gradient(stream, as_argument(its.values), as_argument(its.out), squares);
          });
      if (failed) co_await fail(failed);
    }
    if (rounding.squares.empty()) {
      const Event rounded = stream_->record();
      co_await rounded.wait();
      co_return;
    }
    const Stream::Copy request{.destination = std::as_writable_bytes(rounding.squares).data(),
                               .source = std::as_bytes(squares).data(),
                               .size_bytes = rounding.squares.size_bytes(),
                               .direction = Stream::Direction::kToHost};
    co_await copy(reactor_, *stream_, request);
  }

  /// Quantizes piece by piece, because all pieces share `codes_`: each waits for the copy of the
  /// one before.
  Task<> quantize(const Quantizing& quantizing) override {
    const std::uint64_t count = quantizing.values.size();
    for (std::uint64_t first = 0; first < count; first += kCodedAtOnce) {
      const std::uint64_t elements = std::min(kCodedAtOnce, count - first);
      const std::uint64_t bytes = quantized_bytes(quantizing.bits, elements);
      const DeviceSpan<const float> values = quantizing.values.subspan(first, elements);
      const DeviceSpan<std::byte> codes = device_span(codes_).first(bytes);
      const std::exception_ptr failed =
          launch("quantize", values.size_bytes(), [&](StreamHandle stream) {
            cuda::quantize(stream, quantizing.bits, as_typed(as_argument(values)),
                           as_argument(codes));
          });
      if (failed) co_await fail(failed);
      const Stream::Copy request{
          .destination = quantizing.codes.data() + quantized_bytes(quantizing.bits, first),
          .source = as_argument(codes).data(),
          .size_bytes = bytes,
          .direction = Stream::Direction::kToHost};
      co_await copy(reactor_, *stream_, request);
    }
  }

  /// Shares `scratch_` with the next update(): its kernels run on the same stream, after these.
  Task<> update(const Update& update) override {
    const RecordView view{.format = update.format,
                          .record = as_argument(update.record),
                          .grad = as_argument(update.grad),
                          .param = as_argument(update.param),
                          .first_element = update.first_element};
    const std::exception_ptr failed =
        launch("update_record", update.record.size(), [&](StreamHandle stream) {
          cuda::update_record(stream, update.steps, view, update.runs, scratch_.as<std::byte>());
        });
    if (failed) co_await fail(failed);
    const Event updated = stream_->record();
    co_await updated.wait();
  }

 private:
  /// Throws `launched` after earlier launches have ended: they still use their memory until then.
  Task<> fail(std::exception_ptr launched) {
    const Event before = stream_->record();
    try {
      co_await before.wait();
    } catch (const Error&) {  // the error of the launch matters more
    }
    std::rethrow_exception(std::move(launched));
  }

  /// Launches a kernel and returns its error, or null. After a launch that failed, nothing on the
  /// device can be relied on.
  template <class Queue>
  std::exception_ptr launch(const char* kernel, std::uint64_t size_bytes, const Queue& queue) {
    CudaContext& context = device_.context();
    try {
      context.call({kernel, size_bytes}, [&] {
        queue(stream_->native_handle());
        return cudaSuccess;
      });
      return nullptr;
    } catch (const Error& error) {
      // Errors of the context itself name the device already.
      if (std::string_view(error.what()).starts_with(context.description()))
        return std::current_exception();
      if (error.code() == ErrorCode::kUnavailable && !context.lost()) context.give_up(error.what());
      return std::make_exception_ptr(
          Error(error.code(), fmt::format("{}: {}", context.description(), error.what()),
                error.native()));
    }
  }

  CudaDevice& device_;
  Reactor& reactor_;
  std::unique_ptr<Stream> stream_;
  DeviceBuffer squares_;  // sums of the round() that is under way, tile by tile
  DeviceBuffer scratch_;  // used by update()
  DeviceBuffer codes_;    // used by quantize()
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(CudaDevice& device, Reactor& reactor,
                                           const ComputeLimits& limits) {
  return std::make_unique<CudaCompute>(device, reactor, limits);
}

}  // namespace ziggurat
