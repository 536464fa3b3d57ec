// SPDX-License-Identifier: Apache-2.0
// aio/uring_engine.h: IoEngine on io_uring: one ring, used by the reactor's thread only, woken
// through an eventfd.
//
// Uses SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1), registered files and registered buffers where
// the kernel has and allows them; description() says what is in force. The ring is made disabled
// and belongs to the thread that first submits: the reactor's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aio/posix_files.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class UringEngine final : public PosixFiles {
 public:
  static constexpr std::uint32_t kQueueDepth = 64;
  static constexpr std::uint32_t kQueueDepthMax = 4096;
  static constexpr unsigned kRegisteredFilesMax = 64;
  static constexpr unsigned kRegisteredBuffersMax = 256;

  /// Errors: io_uring_setup's errno. That it succeeds proves little: see probe.h.
  static std::unique_ptr<UringEngine> create(Reactor& reactor,
                                             std::uint32_t queue_depth = kQueueDepth);
  /// On the reactor's thread, or when the reactor does not run. Waits until the kernel is done with
  /// every transfer; what it had not been given yet completes with -ECANCELED.
  ~UringEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override;
  void close(FileHandle file) noexcept override;
  /// `memory` must stay mapped as long as the engine lives: the kernel holds its pages. Memory that
  /// overlaps what was registered before replaces it.
  void register_memory(std::span<std::byte> memory) override;
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override;

 private:
  class Ring;
  UringEngine() = default;
  std::shared_ptr<Ring> ring_;  // handlers that outlive the engine find it gone
};

}  // namespace ziggurat
