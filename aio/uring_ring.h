// SPDX-License-Identifier: Apache-2.0
// aio/uring_ring.h: the ring of a UringEngine, with its registered files and buffers, and its
// submissions and completions.
#pragma once

#include <liburing.h>

#include <array>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "aio/op_queue.h"
#include "aio/uring_engine.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class UringEngine::Ring : public std::enable_shared_from_this<UringEngine::Ring> {
 public:
  /// Errors: Error from io_uring_setup or the eventfd.
  Ring(Reactor& reactor, const UringEngine& engine, std::uint32_t queue_depth);
  ~Ring();
  Ring(const Ring&) = delete;

  std::string description() const;
  std::uint32_t queue_depth() const noexcept { return queue_depth_; }
  std::size_t in_flight() const noexcept { return in_flight_; }

  void submit(IoOp& op);
  void register_memory(std::span<std::byte> memory);
  /// Unregisters a file, which would otherwise stay open. Any thread.
  void forget_file(FileHandle file);
  /// Completes every operation: see ~UringEngine.
  void drain();

 private:
  struct Buffer {
    std::byte* data = nullptr;  // nullptr if the slot is free
    std::size_t size_bytes = 0;
  };

  void set_up();
  int register_witness();
  void enable();
  void listen();
  void flush();
  void push();
  void fail_unsubmitted(int error);
  void prepare(io_uring_sqe& sqe, IoOp& op);
  bool register_file(FileHandle file, const Descriptor& descriptor);
  int registered_buffer(const IoOp& op) const noexcept;
  bool register_chunk(std::span<std::byte> chunk);
  void reap();
  void clear_event();
  bool may_have_work(std::size_t empty_looks) const;
  void abandon();
  void end_ring();
  void leave(IoOp& op, std::int32_t result);
  void finish(IoOp& op, std::int32_t result);
  bool on_ring_thread() const noexcept;

  Reactor& reactor_;
  const UringEngine& engine_;
  std::uint32_t queue_depth_;
  io_uring ring_{};
  bool ring_made_ = false;
  unsigned flags_ = 0;
  bool enabled_ = false;
  std::thread::id thread_;
  UniqueFd witness_;  // the read end of a pipe whose write end only the kernel's ring holds: see
                      // abandon()
  boost::asio::posix::stream_descriptor event_;

  OpQueue waiting_;
  std::vector<IoOp*> entered_;  // given to the ring and not completed yet; at most queue_depth_
  std::size_t in_flight_ = 0;   // entered_ and those in waiting_
  bool flush_posted_ = false;
  bool draining_ = false;
  int refusals_ = 0;  // refusals of io_uring_enter in a row
  bool retry_planned_ = false;

  bool files_registrable_ = false;
  // By handle: the serial of the file in the slot, or 0 if the slot is free.
  std::array<std::uint64_t, kRegisteredFilesMax> files_{};
  bool buffers_registrable_ = false;
  bool buffers_registered_ = false;
  std::vector<Buffer> buffers_;
};

}  // namespace ziggurat
