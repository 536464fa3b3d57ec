// SPDX-License-Identifier: Apache-2.0
// aio/uring_engine.h: IoEngine on io_uring: one ring, used by the reactor's thread only and woken
// through an eventfd.
//
// Uses SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1), registered files and registered buffers if the
// kernel has and allows them; description() says what is used. The ring is made disabled and
// belongs to the thread that submits first, which is the reactor's.
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

  /// Errors: the errno of io_uring_setup. Success does not prove that io_uring works: see probe.h.
  static std::unique_ptr<UringEngine> create(Reactor& reactor,
                                             std::uint32_t queue_depth = kQueueDepth);
  /// Called on the reactor's thread, or when the reactor does not run. Waits until the kernel is
  /// done with every transfer that it was given; the others complete with -ECANCELED.
  ~UringEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override;
  void close(FileHandle file) noexcept override;
  /// Registers `memory`, which must stay mapped as long as the engine lives, because the kernel
  /// holds its pages. It replaces registered memory that it overlaps.
  void register_memory(std::span<std::byte> memory) override;
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override;

 private:
  class Ring;
  UringEngine() = default;
  std::shared_ptr<Ring> ring_;  // shared, so that handlers that outlive the engine can see that it
                                // is gone
};

}  // namespace ziggurat
