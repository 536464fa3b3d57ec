// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_device.cc: makes a device, and copies for callers that have no stream.
#include "integrations/c/embedded_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "integrations/c/wrong.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"

namespace ziggurat {
namespace {

/// How much is copied at once between a GPU and memory that is not registered with it.
constexpr std::uint64_t kStagingBytes = kMiB;

}  // namespace

Handles<OpenDevice>& devices() {
  static auto& all = *new Handles<OpenDevice>("device");
  return all;
}

std::shared_ptr<EmbeddedDevice> taken_device(std::uint64_t handle, const Runtime& runtime) {
  std::shared_ptr<OpenDevice> open = devices().find(handle);
  if (open->runtime.get() != &runtime)
    throw wrong(fmt::format("`device={}` is of another runtime: open it on the engine's", handle));
  if (open->taken.exchange(true))
    throw wrong(fmt::format("`device={}` is in use: close the other engine first", handle));
  EmbeddedDevice* const its = &open->device;
  return {its, [kept = std::move(open)](EmbeddedDevice* device) {
            device->forget_streams();
            kept->taken = false;
          }};
}

EmbeddedDevice::EmbeddedDevice(Runtime& runtime, const Memory& memory) : runtime_(runtime) {
  if (memory.gpu) {
    std::unique_ptr<CudaDevice> gpu =
        CudaDevice::create(runtime_.reactor, {.index = *memory.gpu,
                                              .capacity_bytes = memory.size_bytes,
                                              .lent_memory = memory.address,
                                              .metrics = &runtime_.metrics});
    gpu_ = gpu.get();
    device_ = std::move(gpu);
  } else if (memory.address != nullptr) {
    const std::span<std::byte> lent(static_cast<std::byte*>(memory.address), memory.size_bytes);
    device_ = HostDevice::create(runtime_.reactor, lent);
  } else {
    device_ = HostDevice::create(runtime_.reactor, memory.size_bytes);
  }
}

EmbeddedDevice::~EmbeddedDevice() = default;

StreamRef& EmbeddedDevice::stream(void* handle) {
  if (gpu_ == nullptr) {
    if (handle == nullptr) return host_;
    throw wrong("a stream was given, but this engine's parameters are in host memory: give null");
  }
  const std::lock_guard lock(mutex_);
  auto its = streams_.find(handle);
  if (its == streams_.end()) its = streams_.emplace(handle, gpu_->caller_stream(handle)).first;
  return *its->second;
}

void EmbeddedDevice::forget_streams() {
  std::map<void*, std::unique_ptr<StreamRef>> ended;
  const std::lock_guard lock(mutex_);
  ended.swap(streams_);
}

void EmbeddedDevice::read(DeviceSpan<const std::byte> from, std::span<std::byte> to) {
  if (gpu_ == nullptr) {
    copy_bytes(HostDevice::view(from), to);
    return;
  }
  auto* const source = reinterpret_cast<std::byte*>(from.address());
  const std::vector<Event> after = queued();
  runtime_.reactor.block_on(copy_in_pieces(to, source, Stream::Direction::kToHost, after));
}

void EmbeddedDevice::write(DeviceSpan<std::byte> to, std::span<const std::byte> from) {
  if (gpu_ == nullptr) {
    copy_bytes(from, HostDevice::view(to));
    return;
  }
  auto* const place = reinterpret_cast<std::byte*>(to.address());
  const std::span<std::byte> source(const_cast<std::byte*>(from.data()), from.size());
  const std::vector<Event> after = queued();
  runtime_.reactor.block_on(copy_in_pieces(source, place, Stream::Direction::kToDevice, after));
}

/// Returns what happens when the caller's streams have done all that they have now.
std::vector<Event> EmbeddedDevice::queued() {
  const std::lock_guard lock(mutex_);
  std::vector<Event> events;
  for (const auto& [handle, stream] : streams_) events.push_back(stream->record());
  return events;
}

std::span<std::byte> EmbeddedDevice::staging() {
  if (!registration_) {
    staging_.emplace(HostMappingOptions{.owner = "copies to a GPU", .size_bytes = kStagingBytes});
    registration_ = device_->register_host_memory(staging_->bytes());
  }
  return staging_->bytes();
}

/// Copies through staging(), on a stream of its own. `host` is only written if the direction says
/// so.
Task<> EmbeddedDevice::copy_in_pieces(std::span<std::byte> host, std::byte* on_device,
                                      Stream::Direction direction,
                                      const std::vector<Event>& after) {
  const std::span<std::byte> between = staging();
  const std::unique_ptr<Stream> stream = device_->create_stream("embedder");
  for (const Event& event : after) stream->wait(event);
  const bool to_host = direction == Stream::Direction::kToHost;
  for (std::size_t at = 0; at < host.size(); at += between.size()) {
    const std::span<std::byte> piece = host.subspan(at, std::min(between.size(), host.size() - at));
    if (!to_host) copy_bytes(piece, between);
    const Stream::Copy request{.destination = to_host ? between.data() : on_device + at,
                               .source = to_host ? on_device + at : between.data(),
                               .size_bytes = piece.size(),
                               .direction = direction};
    co_await copy(runtime_.reactor, *stream, request);
    if (to_host) copy_bytes(between.first(piece.size()), piece);
  }
}

}  // namespace ziggurat
