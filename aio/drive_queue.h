// SPDX-License-Identifier: Apache-2.0
// aio/drive_queue.h: what one drive is given, and in which order: the one place of policy between
// files and an engine.
//
// An IoEngine around another. It gives the drive no more bytes at once than keep it busy, so that
// what is urgent need not wait behind what is not. Of what waits:
//   - the higher priority goes first;
//   - of equal priority, reads and writes take turns by bytes, each direction in order;
//   - a lower priority is never shut out: once `overtaken_bytes_max` bytes of higher ones have gone
//     while it waited, its oldest goes next, whatever else waits.
// A sync moves no bytes and somebody always waits for it: it goes at once. Reactor's thread.
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
  /// Given to the drive at once. An operation larger than this goes alone. `ziggurat
  /// bench io` finds how much keeps a drive busy.
  std::uint64_t outstanding_bytes_max = 32 * kMiB;
  std::uint64_t overtaken_bytes_max = 64 * kMiB;
};

class DriveQueue final : public IoEngine {
 public:
  DriveQueue(Reactor& reactor, std::unique_ptr<IoEngine> inside, DriveQueueOptions options = {});
  /// On the reactor's thread, or when the reactor does not run. What waits completes with
  /// -ECANCELED; what the drive has been given ends as the engine inside ends it.
  ~DriveQueue() override;

  /// Transfers of `memory` that wait go behind those of `priority` that wait already; those that
  /// the drive was given do not change.
  void raise(std::span<const std::byte> memory, IoPriority priority) override;
  /// Given to the drive and not yet back.
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
  /// Those of one priority.
  struct Class {
    std::array<OpQueue, 2> direction;   ///< by IoKind: reads, writes
    std::int64_t read_lead_bytes = 0;   ///< of reads over writes, while both have waited
    std::uint64_t overtaken_bytes = 0;  ///< by higher priorities, since one of these last went
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
  std::vector<std::unique_ptr<Given>> all_given_;  // records of what is outstanding, used again
  std::vector<Given*> spare_;
  bool stopping_ = false;
  std::unique_ptr<IoEngine> inside_;  // last: its end completes operations through the rest
};

}  // namespace ziggurat
