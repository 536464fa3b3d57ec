// SPDX-License-Identifier: Apache-2.0
// aio/simulated_engine.h: an IoEngine over a disk in memory, with the reactor's (virtual) time and
// a power switch.
//
// SimulatedDisk outlives the engines: it holds what a crash leaves behind. It keeps durable bytes
// apart from bytes that were only written, so that crash() may lose, tear and reorder everything in
// between, directory entries included. Any number of engines (ranks, or processes one after the
// other) share a disk. It can also act as a bad disk that loses or misdirects writes which it has
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
#include "base/absent_memory.h"
#include "base/access_ledger.h"

namespace ziggurat {

class SimulatedDisk {
 public:
  enum class Keeps : std::uint8_t {
    kWhatWasSynced,  ///< for crash() and kill()
    kAll,            ///< an operation is durable when it completes: keeps one copy, and cannot
                     ///< crash
  };
  explicit SimulatedDisk(std::uint64_t capacity_bytes = std::uint64_t{1} << 40,
                         Keeps keeps = Keeps::kWhatWasSynced)
      : capacity_bytes_(capacity_bytes), keeps_(keeps) {}

  /// Cuts the power right after the `events`-th event from now. An event is a submission, a
  /// completion or a call by name. From then on nothing reaches the disk, and everything in flight
  /// and later fails with EIO, so that programs end.
  void cut_power_after(std::uint64_t events) { power_cut_at_ = events_ + events; }
  bool power_is_off() const noexcept { return off_; }
  std::uint64_t events() const noexcept { return events_; }
  /// Returns the sizes of all files together.
  std::uint64_t used_bytes() const;

  /// Restarts the machine after a power cut. Each write that was not synced (completed or in
  /// flight) is there whole, torn into sectors of 512 bytes, or not at all, and they are applied in
  /// any order. Each directory operation that was not synced happened or not, and so did each
  /// change of a file's size. Programs are gone, and so are their locks.
  void crash(std::uint64_t seed);
  /// Returns how many operations were not synced; a file's new size counts as one. crash() keeps or
  /// loses each of them.
  std::size_t unsynced() const;
  /// Crashes like crash(), but keeps the i-th operation that was not synced if kept[i], a write as
  /// a whole. Operations are counted in the order in which they were made, which matters if
  /// unsynced_overlap().
  void crash_keeping(const std::vector<bool>& kept);
  /// Returns whether two writes that were not synced touch the same bytes.
  bool unsynced_overlap() const;
  /// Kills the process while the machine runs on: completed writes can be read but are still not
  /// durable; writes in flight happened or not.
  void kill(std::uint64_t seed);

  bool exists(const std::string& path) const { return names_.contains(path); }
  /// Overwrites durable bytes of a file, to damage it. Programs read the changed bytes.
  void overwrite(const std::string& path, std::uint64_t offset_bytes,
                 std::span<const std::byte> bytes);
  const PagedBytes& contents(const std::string& path) const;
  /// Returns what a program reads once the page cache is dropped, without what a failed sync left
  /// in the cache.
  PagedBytes contents_on_drive(const std::string& path) const;
  void truncate(const std::string& path, std::uint64_t size_bytes);
  /// Makes reads of these sectors fail with EIO until they are written to.
  void make_unreadable(const std::string& path, std::uint64_t offset_bytes,
                       std::uint64_t size_bytes);
  bool is_readable(const std::string& path, std::uint64_t offset_bytes,
                   std::uint64_t size_bytes) const;
  /// Makes a durable copy under another name, as `cp` and sync do.
  void copy_file(const std::string& from, const std::string& to);
  /// Returns the memory that the simulation uses for the bytes of its files.
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
    PagedBytes current;                  ///< what reads return
    PagedBytes durable;                  ///< what is left if every unsynced write is lost
    std::vector<Write> unsynced;         ///< those that completed stand in the order of completion
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

/// What happens to a write that is acknowledged.
enum class WriteFate : std::uint8_t {
  kWritten,
  kLost,         ///< the old bytes stay
  kMisdirected,  ///< the old bytes stay, and bytes at another place, in this file or another, are
                 ///< overwritten
};

/// When a drive will have moved all the bytes that it was asked for.
using DriveBusyUntil = std::shared_ptr<Nanoseconds>;

struct SimulatedEngineOptions {
  double read_bytes_per_second = 3e9;
  double write_bytes_per_second = 5e9;
  Nanoseconds latency{50'000};
  double jitter = 3;  ///< an operation's latency is drawn from [1, 1 + jitter] times `latency`
  std::uint64_t seed = 1;
  std::uint32_t queue_depth = 32;
  DriveBusyUntil drive = {};  ///< engines that share this share a drive; null makes a drive of the
                              ///< engine's own
  DirectAlignment alignment;
  /// Addresses without memory: a transfer there takes its time, and no byte is moved or kept. It
  /// outlives the engine; null if there are none.
  const AbsentMemory* absent = nullptr;
  /// Notes who reads and writes memory; it outlives the engine. Null if nobody looks.
  AccessLedger* ledger = nullptr;
  /// Returns whether the n-th fdatasync (from 0) of this engine only claims success. For tests that
  /// check other tests.
  std::function<bool(std::uint64_t index)> sync_is_a_lie;
  /// Returns whether the n-th fdatasync fails with EIO. The bytes that it should have made durable
  /// never become so, but are read as written until the cache is dropped, as Linux does with pages.
  std::function<bool(std::uint64_t index)> sync_fails;
  /// Returns what happens to the n-th write (from 0) of this engine.
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
  /// Does nothing. This disk has directories only as parts of file names, so a directory without
  /// files exists always and is durable.
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
    bool moves_bytes = true;
    WriteFate fate = WriteFate::kWritten;  ///< kWrite
    int inode = -1;                        ///< for kWrite: the file that it goes to
    std::uint64_t write_id = 0;
    /// For kSync: the writes that had completed when it was submitted, sorted.
    std::vector<std::uint64_t> synced;
    enum class Sync : std::uint8_t { kHonest, kLie, kFailure } sync = Sync::kHonest;
    AccessLedger::Access access{};  ///< to the memory from which or into which it moves bytes
  };

  void check_power(const char* what, const std::string& path) const;
  SimulatedDisk::Inode& inode(FileHandle file);
  std::int32_t refusal(const IoOp& op) const noexcept;
  void start(IoOp& op);
  void start_write(Started& started);
  void start_sync(Started& started);
  void start_waiting();
  void finish(Started& started, std::int32_t result);
  std::int32_t perform(const Started& started);
  std::int32_t perform_read(const IoOp& op, bool moves_bytes);
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
