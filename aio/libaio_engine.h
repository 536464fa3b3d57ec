// SPDX-License-Identifier: Apache-2.0
// aio/libaio_engine.h: IoEngine on Linux's older asynchronous I/O (io_submit): as fast as io_uring
// for large direct transfers, and allowed where container runtimes forbid io_uring.
//
// What would block the reactor's thread inside io_submit goes to threads instead: fdatasync, and
// transfers of files that are not direct. A direct write that must first find its extents may
// still block there; the store's and the swap's files are filled when they are made, so theirs do
// not.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aio/posix_files.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class LibaioEngine final : public PosixFiles {
 public:
  static constexpr std::uint32_t kQueueDepth = 64;
  static constexpr std::uint32_t kThreads = 4;  ///< for what io_submit would block on

  /// Errors: io_setup's errno; EAGAIN: the machine's fs.aio-max-nr is used up.
  static std::unique_ptr<LibaioEngine> create(Reactor& reactor,
                                              std::uint32_t queue_depth = kQueueDepth);
  /// On the reactor's thread, or when the reactor does not run. Waits until the kernel and the
  /// threads are done with every transfer; what they had not been given yet completes with
  /// -ECANCELED.
  ~LibaioEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override;
  void register_memory(std::span<std::byte>) override {}  // the kernel has no such call here
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override;

 private:
  class Context;
  LibaioEngine() = default;
  std::shared_ptr<Context> context_;  // handlers that outlive the engine find it gone
};

}  // namespace ziggurat
