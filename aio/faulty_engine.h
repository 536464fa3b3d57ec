// SPDX-License-Identifier: Apache-2.0
// aio/faulty_engine.h: wraps any IoEngine and fails the calls that a plan names, so that tests can
// show that every failure is noticed.
//
// Reactor's thread. Calls that the plan does not name go straight to the engine inside.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "aio/io_engine.h"
#include "base/runtime/clock.h"

namespace ziggurat {

/// The calls that a fault can strike: the three transfers, and the calls by name.
enum class FaultPoint : std::uint8_t {
  kRead,
  kWrite,
  kSync,
  kOpen,
  kFileSize,
  kAllocate,
  kAlignment,
  kRename,
  kRemove,
  kExists,
  kSyncDirectory,
  kMakeDirectory,
  kRemoveDirectory,
  kNamesIn,
  kCount,
};

/// One planned failure. Make one with the functions below, then say when it strikes:
/// `Fault::fail(FaultPoint::kWrite, EIO).at(3).from_then_on()`.
struct Fault {
  enum class Effect : std::uint8_t { kErrno, kShort, kZero, kMisdirect, kDelay };

  FaultPoint point = FaultPoint::kRead;
  Effect effect = Effect::kErrno;
  int error_number = 0;              ///< kErrno
  std::uint32_t short_bytes = 0;     ///< kShort
  std::int64_t misdirect_bytes = 0;  ///< kMisdirect
  Nanoseconds delay{0};              ///< kDelay
  std::uint64_t position =
      0;  ///< which call of `point` it strikes, counted from 0 since the engine was made
  bool persistent = false;        ///< strikes that call and all after it
  std::string path{};             ///< strikes only transfers of this file (as it was opened)
  std::uint64_t begin_bytes = 0;  ///< that touch [begin_bytes, end_bytes) of it; if empty, any
                                  ///< bytes
  std::uint64_t end_bytes = 0;
  std::uint64_t times = ~std::uint64_t{0};  ///< how often it strikes at most

  /// Makes the operation fail with `error_number` without being carried out. For any point.
  static Fault fail(FaultPoint point, int error_number);
  /// Makes the transfer move and report this many bytes fewer than it was asked for. For reads and
  /// writes.
  static Fault shorten(FaultPoint point, std::uint32_t by_bytes);
  /// Makes the transfer move nothing and report 0. For reads and writes.
  static Fault zero(FaultPoint point);
  /// Makes the write land `by_bytes` further on and report success.
  static Fault misdirect(std::int64_t by_bytes);
  /// Makes the transfer wait for `delay` of the reactor's clock before it is carried out. For
  /// reads, writes and syncs.
  static Fault slow(FaultPoint point, Nanoseconds delay);

  Fault at(std::uint64_t call) const;
  Fault from_then_on() const;
  /// Limits the fault to transfers that touch these bytes of `path`.
  Fault within(const std::string& path, std::uint64_t offset_bytes, std::uint64_t size_bytes) const;
};

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(Reactor& reactor, std::unique_ptr<IoEngine> inside);
  /// Called on the reactor's thread, or when the reactor does not run. Operations that a fault
  /// holds complete with -ECANCELED.
  ~FaultyEngine() override;

  /// Adds a fault to the plan. If several faults would strike one call, the first planned one does.
  void plan(const Fault& fault);
  void clear_plan() { plan_.clear(); }
  /// Called before every call that no planned fault strikes. Returns 0, or the errno with which the
  /// call fails. For faults that are counted over several points, or over several engines.
  using Gate = std::function<int(FaultPoint point)>;
  void set_gate(Gate gate) { gate_ = std::move(gate); }
  /// The number of calls of `point` so far, and of those that a fault has struck.
  std::uint64_t calls(FaultPoint point) const { return at(calls_, point); }
  std::uint64_t injected(FaultPoint point) const { return at(injected_, point); }

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override { return inside_->queue_depth(); }
  FileHandle open(const std::string& path, const OpenOptions& options) override;
  void close(FileHandle file) noexcept override { inside_->close(file); }
  std::uint64_t file_size_bytes(FileHandle file) override;
  void allocate(FileHandle file, std::uint64_t size_bytes) override;
  DirectAlignment alignment(FileHandle file) override;
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
  std::size_t in_flight() const noexcept override;

 private:
  using Counts = std::array<std::uint64_t, static_cast<std::size_t>(FaultPoint::kCount)>;
  struct Held;
  struct Altered;

  static std::uint64_t at(const Counts& counts, FaultPoint point) {
    return counts[static_cast<std::size_t>(point)];
  }
  const std::string& path_of(FileHandle file) const;
  const Fault* strike(FaultPoint point, const IoOp* op = nullptr);
  const Fault* ask_gate(FaultPoint point);
  bool touches(const Fault& fault, const IoOp* op) const;
  void strike_name(FaultPoint point, const std::string& what);
  void hold(IoOp& op, std::int32_t result, bool carry_out, Nanoseconds delay);
  void release(IoOp& op, std::int32_t result, bool carry_out);
  void submit_altered(IoOp& op, const Fault& fault);

  Reactor& reactor_;
  std::unique_ptr<IoEngine> inside_;
  std::vector<std::string> paths_;  // by handle; each as its file was opened
  std::vector<Fault> plan_;         // `times` counts down
  Gate gate_;
  Fault gated_;  // the fault that `gate_` last asked for
  Counts calls_{};
  Counts injected_{};
  std::shared_ptr<Held> held_;
};

}  // namespace ziggurat
