// SPDX-License-Identifier: Apache-2.0
// aio/drive_queue.h: decides what one drive is given, and in which order. It is the only place of
// policy between files and an engine.
//
// DriveQueue is an IoEngine around another one. It gives the drive only as many bytes at once as
// keep it busy, so that urgent operations need not wait behind others. The rest waits, in this
// order:
// - The higher priority goes first.
// - Of equal priority, reads and writes take turns by bytes, each direction in order.
// - A lower priority is never shut out: once `overtaken_bytes_max` bytes of higher priorities have
//   gone while it waited, its oldest operation goes next. A sync goes to the drive at once, because
//   it moves no bytes and the caller waits for it. Reactor's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "aio/op_queue.h"
#include "base/bytes.h"

namespace ziggurat {

struct DriveQueueOptions {
  /// The most bytes that the drive is given at once. A larger operation is given alone. `ziggurat
  /// bench io` finds how much keeps a drive busy.
  std::uint64_t outstanding_bytes_max = 32 * kMiB;
  std::uint64_t overtaken_bytes_max = 64 * kMiB;
};

class DriveQueue final : public IoEngine {
 public:
  DriveQueue(Reactor& reactor, std::unique_ptr<IoEngine> inside, DriveQueueOptions options = {});
  /// Called on the reactor's thread, or when the reactor does not run. Operations that wait
  /// complete with -ECANCELED; the engine inside ends those that the drive was given.
  ~DriveQueue() override;

  /// Puts waiting transfers of `memory` behind those that already wait with `priority`. Transfers
  /// that the drive was given do not change.
  void raise(std::span<const std::byte> memory, IoPriority priority) override;
  /// Returns the bytes that were given to the drive and have not completed yet.
  std::uint64_t outstanding_bytes() const noexcept { return outstanding_bytes_; }
  const DriveQueueOptions& options() const noexcept { return options_; }

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override { return inside_->queue_depth(); }
  FileHandle open(const std::string& path, const OpenOptions& options) override;
  void close(FileHandle file) noexcept override { inside_->close(file); }
  std::uint64_t file_size_bytes(FileHandle file) override;
  void allocate(FileHandle file, std::uint64_t size_bytes) override;
  DirectAlignment alignment(FileHandle file) override { return inside_->alignment(file); }
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override { inside_->remove(path); }
  bool exists(const std::string& path) override { return inside_->exists(path); }
  void sync_directory(const std::string& path) override { inside_->sync_directory(path); }
  void make_directory(const std::string& path) override { inside_->make_directory(path); }
  void remove_directory(const std::string& path) override { inside_->remove_directory(path); }
  std::vector<std::string> names_in(const std::string& directory) override {
    return inside_->names_in(directory);
  }
  std::uint64_t free_bytes(const std::string& directory) override {
    return inside_->free_bytes(directory);
  }
  void drop_cache(FileHandle file) override { inside_->drop_cache(file); }
  void register_memory(std::span<std::byte> memory) override { inside_->register_memory(memory); }
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override { return waiting_ + outstanding_; }

 private:
  /// The waiting operations of one priority.
  struct Class {
    std::array<OpQueue, 2> direction;   ///< by IoKind: reads, writes
    std::int64_t read_lead_bytes = 0;   ///< bytes of reads minus those of writes, while both waited
    std::uint64_t overtaken_bytes = 0;  ///< bytes of higher priorities since an operation of this
                                        ///< class last went
    bool empty() const noexcept { return direction[0].empty() && direction[1].empty(); }
  };
  struct Given;

  Class& class_of(IoPriority priority) { return classes_[static_cast<std::size_t>(priority)]; }
  std::size_t next_class() const noexcept;
  static std::size_t next_direction(const Class& from) noexcept;
  void give_all_that_fit();
  void account(std::size_t given_class, std::size_t direction, std::uint32_t size_bytes);
  void give(IoOp& op);
  void take_back(Given& given, std::int32_t result);

  Reactor& reactor_;
  DriveQueueOptions options_;
  std::array<Class, kIoPriorities> classes_;
  std::size_t waiting_ = 0;
  std::size_t outstanding_ = 0;  // operations
  std::uint64_t outstanding_bytes_ = 0;
  std::vector<std::unique_ptr<Given>> all_given_;  // copies of outstanding operations, used again
  std::vector<Given*> spare_;
  bool stopping_ = false;
  std::unique_ptr<IoEngine> inside_;  // last, because its destructor completes operations through
                                      // the other members
};

}  // namespace ziggurat
