// SPDX-License-Identifier: Apache-2.0
// aio/uring_engine.cc: combines the operating system's files with a ring (uring_ring.h).
#include "aio/uring_engine.h"

#include "aio/uring_ring.h"
#include "base/check.h"

namespace ziggurat {

std::unique_ptr<UringEngine> UringEngine::create(Reactor& reactor, std::uint32_t queue_depth) {
  ZIGGURAT_CHECK(queue_depth > 0 && queue_depth <= kQueueDepthMax, "queue depth {}", queue_depth);
  std::unique_ptr<UringEngine> engine(new UringEngine());
  engine->ring_ = std::make_shared<Ring>(reactor, *engine, queue_depth);
  return engine;
}

UringEngine::~UringEngine() {
  if (ring_ != nullptr) ring_->drain();
}

std::string UringEngine::description() const { return ring_->description(); }

std::uint32_t UringEngine::queue_depth() const noexcept { return ring_->queue_depth(); }

std::size_t UringEngine::in_flight() const noexcept { return ring_->in_flight(); }

void UringEngine::close(FileHandle file) noexcept {
  ring_->forget_file(file);
  PosixFiles::close(file);
}

void UringEngine::register_memory(std::span<std::byte> memory) { ring_->register_memory(memory); }

void UringEngine::submit(IoOp& op) { ring_->submit(op); }

}  // namespace ziggurat
