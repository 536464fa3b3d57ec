// SPDX-License-Identifier: Apache-2.0
// aio/libaio_engine.h: IoEngine on Linux's older asynchronous I/O (io_submit): as fast as io_uring
// for large direct transfers, and allowed where container runtimes forbid io_uring.
//
// Calls that would block the reactor's thread inside io_submit are made by threads: fdatasync, and
// transfers of files that are not direct. A direct write to a part of a file that has no extents
// yet may still block. Writes to the store's and the swap's files do not block, because these files
// are filled when they are made.
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
  static constexpr std::uint32_t kThreads = 4;  ///< threads for the calls that would block in
                                                ///< io_submit

  /// Errors: the errno of io_setup. EAGAIN means that the machine's fs.aio-max-nr is used up.
  static std::unique_ptr<LibaioEngine> create(Reactor& reactor,
                                              std::uint32_t queue_depth = kQueueDepth);
  /// Called on the reactor's thread, or when the reactor does not run. Waits until the kernel and
  /// the threads are done with every transfer that they were given; the others complete with
  /// -ECANCELED.
  ~LibaioEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override;
  void register_memory(std::span<std::byte>) override {}  // io_submit has no way to register memory
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override;

 private:
  class Context;
  LibaioEngine() = default;
  std::shared_ptr<Context> context_;  // shared, so that handlers that outlive the engine can see
                                      // that it is gone
};

}  // namespace ziggurat
