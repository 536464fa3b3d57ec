// SPDX-License-Identifier: Apache-2.0
// aio/simulated_engine.h: an IoEngine over a disk in memory, with the reactor's (virtual) time, and
// a power switch.
//
// SimulatedDisk outlives engines: it is what a crash leaves behind. It keeps what was made durable
// apart from what was only written, so that crash() may lose, tear and reorder everything in
// between, directory entries included. Any number of engines (ranks, or processes one after the
// other) share a disk. It may also be a bad disk: one that loses or misdirects writes it has
// acknowledged, fails syncs, or cannot read a place. Everything is a function of the seeds.
// Reactor's thread only.
#pragma once

#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "aio/paged_bytes.h"

namespace ziggurat {

class SimulatedDisk {
 public:
  enum class Keeps : std::uint8_t {
    kWhatWasSynced,  ///< for crash() and kill()
    kAll,            ///< what completes is durable: memory for one copy, and nothing to crash
  };
  explicit SimulatedDisk(std::uint64_t capacity_bytes = std::uint64_t{1} << 40,
                         Keeps keeps = Keeps::kWhatWasSynced)
      : capacity_bytes_(capacity_bytes), keeps_(keeps) {}

  /// An event is a submission, a completion or a name-level operation. The power goes right after
  /// the `events`-th from now: nothing reaches the disk any more, and everything in flight and
  /// later fails with EIO, so that programs end.
  void cut_power_after(std::uint64_t events) { power_cut_at_ = events_ + events; }
  bool power_is_off() const noexcept { return off_; }
  std::uint64_t events() const noexcept { return events_; }

  /// The machine comes back after losing power. Each write that was not synced (completed or in
  /// flight) is there whole, torn into sectors of 512 bytes or not at all, applied in any order;
  /// each directory operation that was not synced happened or not; a file's new size likewise.
  /// Programs are gone, and so are their locks.
  void crash(std::uint64_t seed);
  /// How many operations were not synced: crash() keeps each or loses it. A file's new size is one.
  std::size_t unsynced() const;
  /// As crash(), but of the operations that were not synced the i-th is kept if kept[i], a write as
  /// a whole. They count in the order in which they were made: it matters if unsynced_overlap().
  void crash_keeping(const std::vector<bool>& kept);
  /// Two writes that were not synced are to the same bytes.
  bool unsynced_overlap() const;
  /// The process is killed, the machine lives: what completed can be read but is still not durable;
  /// what was in flight happened or not.
  void kill(std::uint64_t seed);

  bool exists(const std::string& path) const { return names_.contains(path); }
  /// The durable bytes of a file, to damage; what is changed here is what programs read.
  void overwrite(const std::string& path, std::uint64_t offset_bytes,
                 std::span<const std::byte> bytes);
  const PagedBytes& contents(const std::string& path) const;
  /// What a program reads once the page cache is dropped: not what a failed sync left there.
  PagedBytes contents_on_drive(const std::string& path) const;
  void truncate(const std::string& path, std::uint64_t size_bytes);
  /// Reads of these sectors fail with EIO, until they are written to.
  void make_unreadable(const std::string& path, std::uint64_t offset_bytes,
                       std::uint64_t size_bytes);
  bool is_readable(const std::string& path, std::uint64_t offset_bytes,
                   std::uint64_t size_bytes) const;
  /// A copy under another name, durable, as `cp` and sync make it.
  void copy_file(const std::string& from, const std::string& to);
  /// Memory that the simulation takes for the bytes of its files.
  std::uint64_t memory_bytes() const;

 private:
  friend class SimulatedEngine;

  struct Write {
    std::uint64_t id;
    std::uint64_t offset_bytes;
    std::vector<std::byte> bytes;
    bool completed = false;
  };
  struct Inode {
    PagedBytes current;           ///< what reads see
    PagedBytes durable;           ///< what is left if every unsynced write is lost
    std::vector<Write> unsynced;  ///< those that completed are in the order in which they did
    std::set<std::uint64_t> unreadable;  ///< sectors, by number
    bool locked = false;
    int open_count = 0;
  };
  struct NameOp {
    enum class Kind { kCreate, kRename, kRemove } kind;
    std::string from;
    std::string to;
    int inode;
  };
  using Names = std::map<std::string, int>;

  void count_event() {
    if (++events_ >= power_cut_at_) off_ = true;
  }
  static void apply(const NameOp& op, Names& names);
  static void apply(const Write& write, PagedBytes& bytes);
  static PagedBytes on_drive(const Inode& inode);
  static bool is_readable(const Inode& inode, std::uint64_t offset_bytes, std::uint64_t size_bytes);
  static bool has_new_size(const Inode& inode) {
    return inode.current.size() != inode.durable.size();
  }
  void do_name_op(NameOp op);
  int inode_of(const std::string& path) const;
  void forget_programs();
  void forget_unnamed();
  std::uint64_t used_bytes() const;

  std::uint64_t capacity_bytes_;
  Keeps keeps_;
  std::map<int, Inode> inodes_;
  Names names_;
  Names durable_names_;
  std::vector<NameOp> unsynced_names_;
  int next_inode_ = 0;
  std::uint64_t next_write_ = 0;
  std::uint64_t events_ = 0;
  std::uint64_t power_cut_at_ = std::numeric_limits<std::uint64_t>::max();
  bool off_ = false;
};

/// What becomes of a write that is acknowledged.
enum class WriteFate : std::uint8_t {
  kWritten,
  kLost,         ///< what was there stays
  kMisdirected,  ///< and what was somewhere else, in this file or another, is overwritten
};

/// When a drive has moved all that was asked of it.
using DriveBusyUntil = std::shared_ptr<Nanoseconds>;

struct SimulatedEngineOptions {
  double read_bytes_per_second = 3e9;
  double write_bytes_per_second = 5e9;
  Nanoseconds latency{50'000};
  double jitter = 3;  ///< an operation's latency is drawn from [1, 1 + jitter] times `latency`
  std::uint64_t seed = 1;
  std::uint32_t queue_depth = 32;
  DriveBusyUntil drive = {};  ///< engines with the same one share a drive; null: of its own
  DirectAlignment alignment;
  /// For tests of tests: says of the n-th fdatasync (from 0) of this engine whether the drive only
  /// claims to have done it.
  std::function<bool(std::uint64_t index)> sync_is_a_lie;
  /// Whether the n-th fdatasync fails with EIO. What it should have made durable never will be,
  /// but is read as written until the cache is dropped, as Linux does with pages.
  std::function<bool(std::uint64_t index)> sync_fails;
  /// What becomes of the n-th write (from 0) of this engine.
  std::function<WriteFate(std::uint64_t index)> write_fate;
};

class SimulatedEngine final : public IoEngine {
 public:
  SimulatedEngine(Reactor& reactor, SimulatedDisk& disk, SimulatedEngineOptions options = {});
  ~SimulatedEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override { return options_.queue_depth; }

  FileHandle open(const std::string& path, const OpenOptions& options) override;
  void close(FileHandle file) noexcept override;
  std::uint64_t file_size_bytes(FileHandle file) override;
  void allocate(FileHandle file, std::uint64_t size_bytes) override;
  DirectAlignment alignment(FileHandle file) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool exists(const std::string& path) override;
  void sync_directory(const std::string& path) override;
  /// Directories are the names of files alone: one that has none is always there, and durable.
  void make_directory(const std::string& path) override;
  void remove_directory(const std::string& path) override;
  std::vector<std::string> names_in(const std::string& directory) override;
  std::uint64_t free_bytes(const std::string& directory) override;
  void drop_cache(FileHandle file) override;
  void register_memory(std::span<std::byte>) override {}
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override { return in_flight_ + waiting_.size(); }

 private:
  struct Handle {
    int inode = -1;
    bool locked = false;
    bool direct = true;
  };
  struct Started {
    IoOp* op;
    WriteFate fate = WriteFate::kWritten;  ///< kWrite
    int inode = -1;                        ///< kWrite: where it goes
    std::uint64_t write_id = 0;
    /// For kSync: writes that had completed when it was submitted, sorted
    std::vector<std::uint64_t> synced;
    enum class Sync : std::uint8_t { kHonest, kLie, kFailure } sync = Sync::kHonest;
  };

  void check_power(const char* what, const std::string& path) const;
  SimulatedDisk::Inode& inode(FileHandle file);
  std::int32_t refusal(const IoOp& op) const noexcept;
  void start(IoOp& op);
  void start_write(Started& started);
  void start_sync(Started& started);
  void start_waiting();
  void finish(const Started& started, std::int32_t result);
  std::int32_t perform(const Started& started);
  std::int32_t perform_read(const IoOp& op);
  std::int32_t perform_write(const Started& started);
  void write_through(const Started& started);
  std::int32_t perform_sync(const Started& started);
  Nanoseconds duration(const IoOp& op);
  std::uint64_t random();

  Reactor& reactor_;
  SimulatedDisk& disk_;
  SimulatedEngineOptions options_;
  std::vector<Handle> handles_;
  std::deque<IoOp*> waiting_;
  std::size_t in_flight_ = 0;
  std::uint64_t random_state_;
  std::uint64_t syncs_ = 0;
  std::uint64_t writes_ = 0;
};

}  // namespace ziggurat
