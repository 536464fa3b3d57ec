// SPDX-License-Identifier: Apache-2.0
// aio/simulated_engine.cc: carries out operations by timers, and decides what a power cut leaves.
#include "aio/simulated_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::size_t kSectorBytes = 512;
/// Misdirected writes land on multiples of this.
constexpr std::uint64_t kMisdirectionBytes = 64 * 1024;

/// What a crash does to unsynced work, drawn once for each file. Mostly-lost and mostly-kept are as
/// likely as an even mix, because the schedules that break stores need one particular write lost
/// (or kept) among many of the other kind.
struct Fate {
  double keep;
  double tear;
  explicit Fate(std::mt19937_64& random) {
    constexpr double kKeep[] = {0.0, 0.1, 0.5, 0.9, 1.0};
    constexpr double kTear[] = {0.0, 0.1, 0.5};
    keep = kKeep[random() % 5];
    tear = kTear[random() % 3];
  }
};

bool chance(std::mt19937_64& random, double probability) {
  return static_cast<double>(random() >> 11) * 0x1p-53 < probability;
}

std::string directory_of(const std::string& path) { return path.substr(0, path.find_last_of('/')); }

}  // namespace

void SimulatedDisk::apply(const NameOp& op, Names& names) {
  if (op.kind != NameOp::Kind::kCreate) {
    const auto at = names.find(op.from);
    if (at != names.end() && at->second == op.inode) names.erase(at);
  }
  if (op.kind != NameOp::Kind::kRemove) names[op.to] = op.inode;
}

void SimulatedDisk::apply(const Write& write, PagedBytes& bytes) {
  if (bytes.size() < write.offset_bytes + write.bytes.size())
    bytes.resize(write.offset_bytes + write.bytes.size());
  bytes.write(write.offset_bytes, write.bytes);
}

void SimulatedDisk::do_name_op(NameOp op) {
  apply(op, names_);
  unsynced_names_.push_back(std::move(op));
}

int SimulatedDisk::inode_of(const std::string& path) const {
  const auto at = names_.find(path);
  ZIGGURAT_CHECK(at != names_.end(), "no file {}", path);
  return at->second;
}

void SimulatedDisk::crash(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Fate name_fate(random);
  names_ = durable_names_;
  for (const NameOp& op : unsynced_names_) {
    if (chance(random, name_fate.keep)) apply(op, names_);
  }
  unsynced_names_.clear();
  durable_names_ = names_;
  for (auto& [id, inode] : inodes_) {
    const Fate fate(random);
    const std::size_t size =
        chance(random, fate.keep) ? inode.current.size() : inode.durable.size();
    std::ranges::shuffle(inode.unsynced, random);
    inode.durable.resize(std::max(inode.durable.size(), inode.current.size()));
    for (Write& write : inode.unsynced) {
      if (chance(random, fate.tear)) {
        const std::span<const std::byte> bytes(write.bytes);
        for (std::size_t at = 0; at < bytes.size(); at += kSectorBytes) {
          if (chance(random, 0.5)) continue;
          inode.durable.write(write.offset_bytes + at,
                              bytes.subspan(at, std::min(kSectorBytes, bytes.size() - at)));
        }
      } else if (chance(random, fate.keep)) {
        apply(write, inode.durable);
      }
    }
    inode.unsynced.clear();
    inode.durable.resize(size);
    inode.current = inode.durable;
  }
  forget_programs();
}

std::size_t SimulatedDisk::unsynced() const {
  std::size_t count = unsynced_names_.size();
  for (const auto& [id, inode] : inodes_)
    count += inode.unsynced.size() + (has_new_size(inode) ? 1 : 0);
  return count;
}

void SimulatedDisk::crash_keeping(const std::vector<bool>& kept) {
  ZIGGURAT_CHECK(kept.size() == unsynced(), "{} fates of {} operations", kept.size(), unsynced());
  auto fate = kept.begin();
  names_ = durable_names_;
  for (const NameOp& op : unsynced_names_) {
    if (*fate++) apply(op, names_);
  }
  unsynced_names_.clear();
  durable_names_ = names_;
  for (auto& [id, inode] : inodes_) {
    const bool grows = has_new_size(inode) && *fate++;
    const std::uint64_t size = grows ? inode.current.size() : inode.durable.size();
    inode.durable.resize(std::max(inode.durable.size(), inode.current.size()));
    for (const Write& write : inode.unsynced) {
      if (*fate++) apply(write, inode.durable);
    }
    inode.unsynced.clear();
    inode.durable.resize(size);
    inode.current = inode.durable;
  }
  forget_programs();
}

bool SimulatedDisk::unsynced_overlap() const {
  for (const auto& [id, inode] : inodes_) {
    for (const Write& a : inode.unsynced) {
      for (const Write& b : inode.unsynced) {
        if (a.id != b.id && a.offset_bytes < b.offset_bytes + b.bytes.size() &&
            b.offset_bytes < a.offset_bytes + a.bytes.size())
          return true;
      }
    }
  }
  return false;
}

void SimulatedDisk::kill(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (auto& [id, inode] : inodes_) {
    const auto in_flight = std::ranges::stable_partition(inode.unsynced, &Write::completed);
    std::ranges::shuffle(in_flight, random);
    std::erase_if(inode.unsynced,
                  [&](const Write& write) { return !write.completed && chance(random, 0.5); });
    for (Write& write : inode.unsynced) {
      if (!write.completed) apply(write, inode.current);
      write.completed = true;
    }
  }
  forget_programs();
}

void SimulatedDisk::forget_programs() {
  ZIGGURAT_CHECK(keeps_ == Keeps::kWhatWasSynced, "a disk that keeps all loses nothing");
  for (auto& [id, inode] : inodes_) {
    inode.locked = false;
    inode.open_count = 0;
  }
  forget_unnamed();
  off_ = false;
  power_cut_at_ = std::numeric_limits<std::uint64_t>::max();
}

/// Drops files that have no name, now or after a crash, and that nobody has open.
void SimulatedDisk::forget_unnamed() {
  std::erase_if(inodes_, [this](const auto& entry) {
    const auto& [id, inode] = entry;
    const auto is_it = [wanted = id](const auto& name) { return name.second == wanted; };
    return inode.open_count == 0 && std::ranges::none_of(names_, is_it) &&
           std::ranges::none_of(durable_names_, is_it) &&
           std::ranges::none_of(unsynced_names_,
                                [wanted = id](const NameOp& op) { return op.inode == wanted; });
  });
}

std::uint64_t SimulatedDisk::used_bytes() const {
  std::uint64_t used = 0;
  for (const auto& [id, inode] : inodes_) used += inode.current.size();
  return used;
}

void SimulatedDisk::overwrite(const std::string& path, std::uint64_t offset_bytes,
                              std::span<const std::byte> bytes) {
  Inode& inode = inodes_.at(inode_of(path));
  ZIGGURAT_CHECK(inode.unsynced.empty() && offset_bytes + bytes.size() <= inode.durable.size(),
                 "{}", path);
  inode.durable.write(offset_bytes, bytes);
  inode.current.write(offset_bytes, bytes);
}

const PagedBytes& SimulatedDisk::contents(const std::string& path) const {
  return inodes_.at(inode_of(path)).current;
}

PagedBytes SimulatedDisk::contents_on_drive(const std::string& path) const {
  return on_drive(inodes_.at(inode_of(path)));
}

std::uint64_t SimulatedDisk::memory_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [id, inode] : inodes_) {
    bytes += inode.current.memory_bytes() + inode.durable.memory_bytes();
    for (const Write& write : inode.unsynced) bytes += write.bytes.size();
  }
  return bytes;
}

PagedBytes SimulatedDisk::on_drive(const Inode& inode) {
  PagedBytes bytes = inode.durable;
  bytes.resize(inode.current.size());
  for (const Write& write : inode.unsynced) {
    if (write.completed) apply(write, bytes);
  }
  return bytes;
}

void SimulatedDisk::truncate(const std::string& path, std::uint64_t size_bytes) {
  Inode& inode = inodes_.at(inode_of(path));
  inode.current.resize(size_bytes);
  inode.durable.resize(size_bytes);
}

void SimulatedDisk::make_unreadable(const std::string& path, std::uint64_t offset_bytes,
                                    std::uint64_t size_bytes) {
  Inode& inode = inodes_.at(inode_of(path));
  for (std::uint64_t at = offset_bytes; at < offset_bytes + size_bytes; at += kSectorBytes)
    inode.unreadable.insert(at / kSectorBytes);
}

bool SimulatedDisk::is_readable(const std::string& path, std::uint64_t offset_bytes,
                                std::uint64_t size_bytes) const {
  return is_readable(inodes_.at(inode_of(path)), offset_bytes, size_bytes);
}

bool SimulatedDisk::is_readable(const Inode& inode, std::uint64_t offset_bytes,
                                std::uint64_t size_bytes) {
  const auto bad = inode.unreadable.lower_bound(offset_bytes / kSectorBytes);
  return bad == inode.unreadable.end() || *bad * kSectorBytes >= offset_bytes + size_bytes;
}

void SimulatedDisk::copy_file(const std::string& from, const std::string& to) {
  Inode copy;
  copy.current = copy.durable = contents(from);
  const int id = next_inode_++;
  inodes_.emplace(id, std::move(copy));
  names_[to] = durable_names_[to] = id;
  forget_unnamed();
}

SimulatedEngine::SimulatedEngine(Reactor& reactor, SimulatedDisk& disk,
                                 SimulatedEngineOptions options)
    : reactor_(reactor),
      disk_(disk),
      options_(std::move(options)),
      random_state_(mix_seed(options_.seed, 0)) {
  ZIGGURAT_CHECK(disk.keeps_ == SimulatedDisk::Keeps::kWhatWasSynced || !options_.write_fate,
                 "a disk that keeps all loses nothing");
  if (!options_.drive) options_.drive = std::make_shared<Nanoseconds>(0);
}

SimulatedEngine::~SimulatedEngine() {
  ZIGGURAT_CHECK(in_flight() == 0, "{} operations in flight", in_flight());
}

std::string SimulatedEngine::description() const {
  return fmt::format("simulated ({:.1f} GB/s read, {:.1f} GB/s write, {} us)",
                     options_.read_bytes_per_second / 1e9, options_.write_bytes_per_second / 1e9,
                     options_.latency.count() / 1000);
}

void SimulatedEngine::check_power(const char* what, const std::string& path) const {
  if (disk_.off_)
    throw system_error(EIO, fmt::format("cannot {} {} (simulated: the power is off)", what, path));
}

SimulatedDisk::Inode& SimulatedEngine::inode(FileHandle file) {
  return disk_.inodes_.at(handles_.at(file.id).inode);
}

FileHandle SimulatedEngine::open(const std::string& path, const OpenOptions& options) {
  check_power("open", path);
  int id = -1;
  if (options.unnamed) {
    id = disk_.next_inode_++;
    disk_.inodes_[id];
  } else if (options.create) {
    if (disk_.names_.contains(path))
      throw system_error(EEXIST, fmt::format("cannot create {}", path));
    id = disk_.next_inode_++;
    disk_.inodes_[id];
    disk_.do_name_op({SimulatedDisk::NameOp::Kind::kCreate, "", path, id});
    disk_.count_event();
  } else {
    if (!disk_.names_.contains(path)) throw system_error(ENOENT, fmt::format("open {}", path));
    id = disk_.names_.at(path);
  }
  auto& node = disk_.inodes_.at(id);
  if (options.lock) {
    if (node.locked)
      throw Error(
          ErrorCode::kUnavailable,
          fmt::format("{} is in use by another process (this process waited {} ms for its lock)",
                      path, options.lock_wait.count()));
    node.locked = true;
  }
  ++node.open_count;
  handles_.push_back({id, options.lock, options.direct});
  return {static_cast<int>(handles_.size()) - 1};
}

void SimulatedEngine::close(FileHandle file) noexcept {
  const Handle handle = std::exchange(handles_[file.id], {});
  const auto at = disk_.inodes_.find(handle.inode);
  if (disk_.off_ || at == disk_.inodes_.end()) return;
  if (handle.locked) at->second.locked = false;
  --at->second.open_count;
  disk_.forget_unnamed();
}

std::uint64_t SimulatedEngine::file_size_bytes(FileHandle file) {
  return inode(file).current.size();
}

void SimulatedEngine::allocate(FileHandle file, std::uint64_t size_bytes) {
  check_power("allocate", "a file");
  auto& bytes = inode(file).current;
  const std::uint64_t used = disk_.used_bytes() - bytes.size();
  if (used + size_bytes > disk_.capacity_bytes_)
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("simulated disk: {} are needed, but only {} are free",
                            format_bytes(size_bytes), format_bytes(disk_.capacity_bytes_ - used)));
  bytes.resize(std::max<std::uint64_t>(bytes.size(), size_bytes));
  disk_.count_event();
}

DirectAlignment SimulatedEngine::alignment(FileHandle) { return options_.alignment; }

void SimulatedEngine::rename(const std::string& from, const std::string& to) {
  check_power("rename", from);
  if (!disk_.names_.contains(from))
    throw system_error(ENOENT, fmt::format("rename {} to {}", from, to));
  disk_.do_name_op({SimulatedDisk::NameOp::Kind::kRename, from, to, disk_.names_.at(from)});
  disk_.count_event();
}

void SimulatedEngine::remove(const std::string& path) {
  check_power("remove", path);
  if (!disk_.names_.contains(path)) throw system_error(ENOENT, fmt::format("remove {}", path));
  disk_.do_name_op({SimulatedDisk::NameOp::Kind::kRemove, path, "", disk_.names_.at(path)});
  disk_.count_event();
}

bool SimulatedEngine::exists(const std::string& path) {
  check_power("look for", path);
  return disk_.names_.contains(path);
}

void SimulatedEngine::sync_directory(const std::string& path) {
  check_power("sync", path);
  std::erase_if(disk_.unsynced_names_, [&](const SimulatedDisk::NameOp& op) {
    if (directory_of(op.to.empty() ? op.from : op.to) != path) return false;
    SimulatedDisk::apply(op, disk_.durable_names_);
    return true;
  });
  disk_.count_event();
}

void SimulatedEngine::make_directory(const std::string& path) { check_power("make", path); }

void SimulatedEngine::remove_directory(const std::string& path) {
  check_power("remove", path);
  if (!names_in(path).empty())
    throw system_error(ENOTEMPTY, fmt::format("remove directory {}", path));
}

std::vector<std::string> SimulatedEngine::names_in(const std::string& directory) {
  check_power("list", directory);
  std::set<std::string> names;
  const std::string prefix = directory + "/";
  for (const auto& [path, inode] : disk_.names_) {
    if (!path.starts_with(prefix)) continue;
    names.insert(path.substr(prefix.size(), path.find('/', prefix.size()) - prefix.size()));
  }
  return {names.begin(), names.end()};
}

std::uint64_t SimulatedEngine::free_bytes(const std::string& directory) {
  check_power("look at the space of", directory);
  return disk_.capacity_bytes_ - std::min(disk_.capacity_bytes_, disk_.used_bytes());
}

void SimulatedEngine::drop_cache(FileHandle file) {
  if (disk_.keeps_ == SimulatedDisk::Keeps::kAll) return;
  auto& node = inode(file);
  node.current = SimulatedDisk::on_drive(node);
}

std::uint64_t SimulatedEngine::random() {
  random_state_ = random_state_ * 0x5851'f42d'4c95'7f2d + 0x1405'7b7e'f767'814f;
  return random_state_ >> 33;
}

/// Returns how long the operation takes. The drive moves the bytes of one operation at a time, but
/// latencies overlap, so operations finish out of order.
Nanoseconds SimulatedEngine::duration(const IoOp& op) {
  const double rate =
      op.kind == IoKind::kRead ? options_.read_bytes_per_second : options_.write_bytes_per_second;
  const double transfer = op.kind == IoKind::kSync ? 0 : 1e9 * op.size_bytes / rate;
  const Nanoseconds now = reactor_.clock().now();
  Nanoseconds& busy_until = *options_.drive;
  busy_until = std::max(busy_until, now) + Nanoseconds(static_cast<std::int64_t>(transfer));
  const double stretch = 1 + options_.jitter * static_cast<double>(random()) * 0x1p-31;
  return busy_until - now +
         Nanoseconds(
             static_cast<std::int64_t>(stretch * static_cast<double>(options_.latency.count())));
}

/// What O_DIRECT refuses.
std::int32_t SimulatedEngine::refusal(const IoOp& op) const noexcept {
  if (op.kind == IoKind::kSync || !handles_.at(op.file.id).direct) return 0;
  const auto& a = options_.alignment;
  const bool aligned = op.offset_bytes % a.offset_bytes == 0 &&
                       op.size_bytes % a.offset_bytes == 0 &&
                       reinterpret_cast<std::uintptr_t>(op.data) % a.memory_bytes == 0;
  return aligned ? 0 : -EINVAL;
}

void SimulatedEngine::submit(IoOp& op) {
  op.next = nullptr;
  waiting_.push_back(&op);
  start_waiting();
}

void SimulatedEngine::start_waiting() {
  while (!waiting_.empty() && in_flight_ < options_.queue_depth) {
    IoOp& op = *waiting_.front();
    waiting_.pop_front();
    ++in_flight_;
    start(op);
  }
}

void SimulatedEngine::start(IoOp& op) {
  auto started = std::make_shared<Started>();
  started->op = &op;
  if (const std::int32_t result = disk_.off_ ? -EIO : refusal(op); result != 0) {
    reactor_.clock().after(Nanoseconds(0), [this, started, result] { finish(*started, result); });
    return;
  }
  started->moves_bytes =
      op.kind != IoKind::kSync && (options_.absent == nullptr || !options_.absent->lacks(op.data));
  if (op.kind == IoKind::kWrite && started->moves_bytes) start_write(*started);
  if (op.kind == IoKind::kSync) start_sync(*started);
  disk_.count_event();
  if (op.kind != IoKind::kSync) {
    const std::span<const std::byte> memory(op.data, op.size_bytes);
    started->access = op.kind == IoKind::kRead
                          ? AccessLedger::write(options_.ledger, memory, "a drive's read")
                          : AccessLedger::read(options_.ledger, memory, "a drive's write");
  }
  reactor_.clock().after(
      duration(op), [this, started] { finish(*started, disk_.off_ ? -EIO : perform(*started)); });
}

void SimulatedEngine::start_write(Started& started) {
  const IoOp& op = *started.op;
  if (options_.write_fate) started.fate = options_.write_fate(writes_++);
  if (started.fate == WriteFate::kLost) return;
  started.inode = handles_.at(op.file.id).inode;
  if (disk_.keeps_ == SimulatedDisk::Keeps::kAll) return;
  std::uint64_t offset_bytes = op.offset_bytes;
  if (started.fate == WriteFate::kMisdirected) {
    // The write goes to any place of any file that is long enough.
    auto at = disk_.inodes_.begin();
    std::advance(at, random() % disk_.inodes_.size());
    const std::size_t size = at->second.current.size();
    if (size < op.size_bytes) {
      started.fate = WriteFate::kLost;
      return;
    }
    started.inode = at->first;
    const std::uint64_t places = 1 + (size - op.size_bytes) / kMisdirectionBytes;
    offset_bytes = random() % places * kMisdirectionBytes;
  }
  started.write_id = disk_.next_write_++;
  disk_.inodes_.at(started.inode)
      .unsynced.push_back(
          {started.write_id, offset_bytes, {op.data, op.data + op.size_bytes}, false});
}

void SimulatedEngine::start_sync(Started& started) {
  for (const auto& write : inode(started.op->file).unsynced) {
    if (write.completed) started.synced.push_back(write.id);
  }
  std::ranges::sort(started.synced);
  const std::uint64_t index = syncs_++;
  if (options_.sync_is_a_lie && options_.sync_is_a_lie(index)) started.sync = Started::Sync::kLie;
  if (options_.sync_fails && options_.sync_fails(index)) started.sync = Started::Sync::kFailure;
}

std::int32_t SimulatedEngine::perform(const Started& started) {
  std::int32_t result = 0;
  switch (started.op->kind) {
    case IoKind::kRead: result = perform_read(*started.op, started.moves_bytes); break;
    case IoKind::kWrite: result = perform_write(started); break;
    case IoKind::kSync: result = perform_sync(started); break;
  }
  disk_.count_event();
  return result;
}

std::int32_t SimulatedEngine::perform_read(const IoOp& op, bool moves_bytes) {
  const auto& node = inode(op.file);
  if (op.offset_bytes >= node.current.size()) return 0;
  if (!SimulatedDisk::is_readable(node, op.offset_bytes, op.size_bytes)) return -EIO;
  const auto size = std::min<std::uint64_t>(op.size_bytes, node.current.size() - op.offset_bytes);
  if (moves_bytes) node.current.read(op.offset_bytes, {op.data, size});
  return static_cast<std::int32_t>(size);
}

void SimulatedEngine::write_through(const Started& started) {
  const IoOp& op = *started.op;
  PagedBytes& bytes = disk_.inodes_.at(started.inode).current;
  if (bytes.size() < op.offset_bytes + op.size_bytes) bytes.resize(op.offset_bytes + op.size_bytes);
  bytes.write(op.offset_bytes, {op.data, op.size_bytes});
}

std::int32_t SimulatedEngine::perform_write(const Started& started) {
  if (!started.moves_bytes) return static_cast<std::int32_t>(started.op->size_bytes);
  if (disk_.keeps_ == SimulatedDisk::Keeps::kAll) {
    write_through(started);
  } else if (started.fate != WriteFate::kLost) {
    auto& node = disk_.inodes_.at(started.inode);
    const auto write =
        std::ranges::find(node.unsynced, started.write_id, &SimulatedDisk::Write::id);
    SimulatedDisk::apply(*write, node.current);
    const auto first = node.unreadable.lower_bound(write->offset_bytes / kSectorBytes);
    node.unreadable.erase(first, node.unreadable.lower_bound(
                                     (write->offset_bytes + write->bytes.size()) / kSectorBytes));
    write->completed = true;
    // A sync makes writes durable in the order in which they completed.
    std::rotate(write, write + 1, node.unsynced.end());
  }
  return static_cast<std::int32_t>(started.op->size_bytes);
}

std::int32_t SimulatedEngine::perform_sync(const Started& started) {
  if (started.sync == Started::Sync::kLie || disk_.keeps_ == SimulatedDisk::Keeps::kAll) return 0;
  const bool fails = started.sync == Started::Sync::kFailure;
  auto& node = inode(started.op->file);
  node.durable.resize(node.current.size());
  std::erase_if(node.unsynced, [&](const SimulatedDisk::Write& write) {
    if (!std::ranges::binary_search(started.synced, write.id)) return false;
    if (!fails) SimulatedDisk::apply(write, node.durable);
    return true;
  });
  return fails ? -EIO : 0;
}

void SimulatedEngine::finish(Started& started, std::int32_t result) {
  --in_flight_;
  started.access.end();
  started.op->complete(*started.op, result);
  start_waiting();
}

}  // namespace ziggurat
