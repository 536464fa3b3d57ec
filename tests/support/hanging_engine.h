// SPDX-License-Identifier: Apache-2.0
// tests/support/hanging_engine.h: a target that dies in the middle of its work, as a server does
// that is gone: from one call on, none of its calls returns until it is brought back.
//
// A Target is what dies; engines of all ranks look at it. Calls that name files block the thread
// that makes them; where that is the reactor's, nothing would go on any more, so they go through
// and are counted instead. From any thread.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aio/io_engine.h"

namespace ziggurat::test {

class HangingEngine;

class HangingTarget {
 public:
  enum class Call : std::uint8_t { kOpen, kWrite, kSync, kRename, kOther, kCount };

  /// Dies at the n-th of these calls (from 0), of all engines together.
  void die_at(Call call, std::uint64_t position);
  /// What hangs is carried out, and it never dies again.
  void come_back();

  bool is_dead() const;
  bool has_died() const;
  std::uint64_t calls(Call call) const;
  /// Calls that name files, made on a reactor's thread.
  std::uint64_t on_reactor() const;
  /// The first of them.
  std::string first_on_reactor() const;

 private:
  friend class HangingEngine;
  /// True: whoever makes the call is not answered now.
  bool count(Call call);
  void name(Call call, const Reactor& reactor, const std::string& what);

  mutable std::mutex mutex_;
  std::condition_variable back_;
  std::array<std::uint64_t, static_cast<std::size_t>(Call::kCount)> calls_{};
  Call dies_in_ = Call::kCount;
  std::uint64_t dies_at_ = 0;
  bool dead_ = false;
  bool died_ = false;
  std::uint64_t on_reactor_ = 0;
  std::string first_on_reactor_;
  std::vector<HangingEngine*> engines_;
};

class HangingEngine final : public IoEngine {
 public:
  using Call = HangingTarget::Call;
  HangingEngine(Reactor& reactor, std::unique_ptr<IoEngine> inside, HangingTarget& target);
  ~HangingEngine() override;

  std::string description() const override { return inside_->description() + ", may hang"; }
  std::uint32_t queue_depth() const noexcept override { return inside_->queue_depth(); }
  FileHandle open(const std::string& path, const OpenOptions& options) override;
  void close(FileHandle file) noexcept override { inside_->close(file); }
  std::uint64_t file_size_bytes(FileHandle file) override { return inside_->file_size_bytes(file); }
  void allocate(FileHandle file, std::uint64_t size_bytes) override;
  DirectAlignment alignment(FileHandle file) override { return inside_->alignment(file); }
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool exists(const std::string& path) override;
  void sync_directory(const std::string& path) override;
  void make_directory(const std::string& path) override;
  void remove_directory(const std::string& path) override;
  std::vector<std::string> names_in(const std::string& directory) override;
  std::uint64_t free_bytes(const std::string& directory) override {
    return inside_->free_bytes(directory);
  }
  void drop_cache(FileHandle file) override { inside_->drop_cache(file); }
  void register_memory(std::span<std::byte> memory) override { inside_->register_memory(memory); }
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override { return inside_->in_flight() + held_.size(); }

 private:
  friend class HangingTarget;
  void submit_held();

  Reactor& reactor_;
  std::unique_ptr<IoEngine> inside_;
  HangingTarget& target_;
  std::vector<IoOp*> held_;  // the reactor's thread's
};

}  // namespace ziggurat::test
