// SPDX-License-Identifier: Apache-2.0
// aio/direct_file.cc: a transfer lives in its coroutine's frame with all of its blocks, and ends
// when its last block has completed.
#include "aio/direct_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/container/small_vector.hpp>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/disk_full.h"
#include "base/error.h"

namespace ziggurat {
namespace {

// The n-th retry of a block waits n times this: the kernel was short of memory or of requests.
constexpr Nanoseconds kRetryDelay = std::chrono::microseconds(250);

constexpr const char* verb(IoKind kind) noexcept {
  switch (kind) {
    case IoKind::kRead: return "read";
    case IoKind::kWrite: return "write";
    case IoKind::kSync: break;
  }
  return "fdatasync";
}

}  // namespace

struct DirectFile::Transfer {
  struct Block {
    IoOp op;  // the part of the block that is under way
    Transfer* transfer = nullptr;
    std::uint64_t offset_bytes = 0;  // position of the whole block
    std::byte* data = nullptr;
    std::uint32_t size_bytes = 0;
    std::uint32_t done_bytes = 0;
    int retries = 0;
  };
  struct Range {
    std::uint64_t offset_bytes = 0;
    std::byte* data = nullptr;
    std::size_t size_bytes = 0;
  };

  Transfer(DirectFile& its_file, IoKind its_kind, Range its_range, IoPriority its_priority)
      : file(its_file),
        kind(its_kind),
        range(its_range),
        priority(its_priority),
        done(its_file.reactor_) {}

  void require_aligned() const;
  void submit();
  void submit_rest(Block& block);
  void on_result(Block& block, std::int32_t result);
  bool retry(Block& block, int error_number);
  void fail(std::exception_ptr its_error);
  std::exception_ptr failure(int error_number, const IoOp& op) const;
  Error no_progress(const Block& block);
  std::string describe(const IoOp& op) const;

  DirectFile& file;
  IoKind kind;
  Range range;
  IoPriority priority;
  boost::container::small_vector<Block, 1> blocks;  // most transfers have one block
  std::size_t blocks_left = 0;
  std::uint64_t moved_bytes = 0;
  std::exception_ptr error;  // the first
  Signal done;
};

std::string DirectFile::Transfer::describe(const IoOp& op) const {
  if (kind == IoKind::kSync) return fmt::format("cannot sync {} (fdatasync)", file.path_);
  return fmt::format("cannot {} {} bytes at offset {} of {}", verb(kind), op.size_bytes,
                     op.offset_bytes, file.path_);
}

void DirectFile::Transfer::require_aligned() const {
  if (kind == IoKind::kSync || !file.direct_) return;
  const DirectAlignment& need = file.alignment_;
  const bool aligned = range.offset_bytes % need.offset_bytes == 0 &&
                       range.size_bytes % need.offset_bytes == 0 &&
                       reinterpret_cast<std::uintptr_t>(range.data) % need.memory_bytes == 0;
  if (aligned) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("cannot {} {} bytes at offset {} of {} (memory at {}): direct transfers of "
                  "this file need an offset and a "
                  "length in multiples of {} bytes and memory aligned to {}",
                  verb(kind), range.size_bytes, range.offset_bytes, file.path_,
                  fmt::ptr(range.data), need.offset_bytes, need.memory_bytes));
}

void DirectFile::Transfer::submit() {
  const std::size_t count =
      kind == IoKind::kSync ? 1 : (range.size_bytes + kBlockBytes - 1) / kBlockBytes;
  blocks.resize(count);
  blocks_left = count;
  for (std::size_t i = 0; i < count; ++i) {
    Block& block = blocks[i];
    const std::size_t begin = i * kBlockBytes;
    block.transfer = this;
    block.op.priority = priority;
    block.offset_bytes = range.offset_bytes + begin;
    block.data = range.data + begin;
    block.size_bytes =
        static_cast<std::uint32_t>(std::min<std::size_t>(kBlockBytes, range.size_bytes - begin));
    submit_rest(block);
  }
}

// Submits the part of the block that has not been moved yet. A short direct transfer may end
// anywhere, but the next one must begin aligned, so a few bytes may be moved twice.
void DirectFile::Transfer::submit_rest(Block& block) {
  const std::uint32_t grain =
      file.direct_ ? std::max(file.alignment_.offset_bytes, file.alignment_.memory_bytes) : 1;
  const std::uint32_t begin = block.done_bytes / grain * grain;
  const IoPriority raised = block.op.priority;  // may have been raised while the operation waited
  block.op = IoOp{};
  block.op.priority = raised;
  block.op.kind = kind;
  block.op.file = file.file_;
  block.op.offset_bytes = block.offset_bytes + begin;
  block.op.data = kind == IoKind::kSync ? nullptr : block.data + begin;
  block.op.size_bytes = block.size_bytes - begin;
  block.op.user = &block;
  block.op.complete = [](IoOp& op, std::int32_t result) {
    Block& mine = *static_cast<Block*>(op.user);
    mine.transfer->on_result(mine, result);
  };
  file.engine_.submit(block.op);
}

void DirectFile::Transfer::on_result(Block& block, std::int32_t result) {
  if (result < 0) {
    if (retry(block, -result)) return;
    fail(failure(-result, block.op));
  } else if (kind != IoKind::kSync) {
    const auto count = static_cast<std::uint32_t>(result);
    ZIGGURAT_CHECK(count <= block.op.size_bytes, "{} bytes moved of {}", count,
                   block.op.size_bytes);
    const std::uint32_t begin = block.size_bytes - block.op.size_bytes;
    if (begin + count <= block.done_bytes) {
      fail(std::make_exception_ptr(no_progress(block)));
    } else {
      moved_bytes += begin + count - block.done_bytes;
      block.done_bytes = begin + count;
      if (block.done_bytes < block.size_bytes && !error) return submit_rest(block);
    }
  }
  if (--blocks_left == 0) done.set();
}

bool DirectFile::Transfer::retry(Block& block, int error_number) {
  // A failed fdatasync has dropped the dirty state: a second one would succeed and prove nothing.
  if (kind == IoKind::kSync || error || block.retries == kRetriesMax) return false;
  if (error_number != EAGAIN && error_number != EINTR) return false;
  ++block.retries;
  file.reactor_.clock().after(block.retries * kRetryDelay, [this, &block] { submit_rest(block); });
  return true;
}

void DirectFile::Transfer::fail(std::exception_ptr its_error) {
  if (!error) error = std::move(its_error);
}

std::exception_ptr DirectFile::Transfer::failure(int error_number, const IoOp& op) const {
  const Error its_error = system_error(error_number, describe(op));
  if (error_number != ENOSPC && error_number != EDQUOT && error_number != EFBIG)
    return std::make_exception_ptr(its_error);
  return std::make_exception_ptr(DiskFull(file.path_, its_error.what(), error_number));
}

Error DirectFile::Transfer::no_progress(const Block& block) {
  const std::uint64_t reached = block.offset_bytes + block.done_bytes;
  if (kind == IoKind::kWrite) {
    return {ErrorCode::kUnavailable,
            fmt::format("{}: the drive took none of the bytes from offset {} on, and gave no errno",
                        describe(block.op), reached)};
  }
  std::string why;
  try {
    const std::uint64_t size = file.size_bytes();
    why = size <= reached ? fmt::format("the file ends at {}: it was cut short", size)
                          : fmt::format("no bytes came from offset {} on, although the file has {}",
                                        reached, size);
  } catch (const Error& size_error) {
    why = fmt::format("no bytes came from offset {} on ({})", reached, size_error.what());
  }
  return {ErrorCode::kDataLoss, fmt::format("{}: {}", describe(block.op), why)};
}

DirectFile::DirectFile(Reactor& reactor, IoEngine& engine, std::string path, IoObservers observers)
    : reactor_(reactor), engine_(engine), path_(std::move(path)), observers_(observers) {
  if (observers_.activity == nullptr) {
    own_activity_ = std::make_unique<IoActivity>();
    observers_.activity = own_activity_.get();
  }
}

std::unique_ptr<DirectFile> DirectFile::open(Reactor& reactor, IoEngine& engine,
                                             const std::string& path, const OpenOptions& options,
                                             IoObservers observers) {
  std::unique_ptr<DirectFile> file(new DirectFile(reactor, engine, path, observers));
  file->file_ = engine.open(path, options);
  file->direct_ = options.direct;
  file->alignment_ = engine.alignment(file->file_);
  return file;
}

DirectFile::~DirectFile() {
  ZIGGURAT_CHECK(transfers_ == 0, "{} transfers of {} are in flight", transfers_, path_);
  if (file_.id >= 0) engine_.close(file_);
}

std::uint64_t DirectFile::size_bytes() { return engine_.file_size_bytes(file_); }

void DirectFile::allocate(std::uint64_t size_bytes) { engine_.allocate(file_, size_bytes); }

Task<> DirectFile::read(std::uint64_t offset_bytes, std::span<std::byte> memory,
                        IoPriority priority) {
  return run(IoKind::kRead, offset_bytes, memory, priority);
}

Task<> DirectFile::write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
                         IoPriority priority) {
  // One request type serves both directions. A write only reads the memory, so the cast is safe.
  return run(IoKind::kWrite, offset_bytes, {const_cast<std::byte*>(memory.data()), memory.size()},
             priority);
}

Task<> DirectFile::sync() { return run(IoKind::kSync, 0, {}, IoPriority::kDemand); }

Task<> DirectFile::run(IoKind kind, std::uint64_t offset_bytes, std::span<std::byte> memory,
                       IoPriority priority) {
  Transfer transfer(*this, kind, {offset_bytes, memory.data(), memory.size()}, priority);
  transfer.require_aligned();
  if (transfer.kind != IoKind::kSync && transfer.range.size_bytes == 0) co_return;
  const IoActivity::Seat seat =
      observers_.activity->begin(transfer.kind, reactor_.clock().now(), observers_.trace);
  ++transfers_;
  transfer.submit();
  co_await transfer.done.wait();
  --transfers_;
  observers_.activity->end(seat, reactor_.clock().now(), observers_.metrics, observers_.trace);
  if (observers_.metrics != nullptr && transfer.moved_bytes > 0) {
    observers_.metrics->add(
        transfer.kind == IoKind::kRead ? Counter::kNvmeReadBytes : Counter::kNvmeWriteBytes,
        transfer.moved_bytes);
  }
  if (transfer.error) std::rethrow_exception(transfer.error);
}

}  // namespace ziggurat
