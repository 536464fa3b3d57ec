// SPDX-License-Identifier: Apache-2.0
// tests/aio/io_testing.h: what the tests of aio share: aligned memory, patterns, a directory of
// their own, raw transfers.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/bytes.h"
#include "base/runtime/async.h"

namespace ziggurat::testing_support {

/// Zeroed memory at an address that any direct transfer accepts.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t size_bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(size_bytes, 4096)))),
        size_bytes_(size_bytes) {
    std::fill_n(memory_.get(), size_bytes_, std::byte{0});
  }
  std::span<std::byte> span() const { return {memory_.get(), size_bytes_}; }
  std::span<std::byte> part(std::size_t offset, std::size_t size) const {
    return span().subspan(offset, size);
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_bytes_;
};

/// Fills with bytes that differ from place to place and from seed to seed.
inline void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
  }
}

inline bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

/// A directory that goes with the test.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& parent = std::filesystem::temp_directory_path()) {
    std::string name = parent + "/ziggurat-aio-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline IoOp read_op(FileHandle file, std::uint64_t offset_bytes, std::span<std::byte> memory) {
  IoOp op;
  op.kind = IoKind::kRead;
  op.file = file;
  op.offset_bytes = offset_bytes;
  op.data = memory.data();
  op.size_bytes = static_cast<std::uint32_t>(memory.size());
  return op;
}

inline IoOp write_op(FileHandle file, std::uint64_t offset_bytes, std::span<std::byte> memory) {
  IoOp op = read_op(file, offset_bytes, memory);
  op.kind = IoKind::kWrite;
  return op;
}

inline IoOp sync_op(FileHandle file) {
  IoOp op;
  op.kind = IoKind::kSync;
  op.file = file;
  return op;
}

/// Transfers submitted together, and how their completions came.
struct Submitted {
  explicit Submitted(Reactor& its_reactor) : reactor(&its_reactor), done(its_reactor) {}

  void submit(IoEngine& engine, std::vector<IoOp> its_ops) {
    ops = std::move(its_ops);
    results.assign(ops.size(), kNotYet);
    left = ops.size();
    for (IoOp& op : ops) {
      op.user = this;
      op.complete = [](IoOp& finished, std::int32_t result) {
        static_cast<Submitted*>(finished.user)->take(finished, result);
      };
      submitting = true;
      engine.submit(op);
      submitting = false;
    }
    in_flight_after_submit = engine.in_flight();
    if (left == 0) done.set();
  }

  void take(IoOp& op, std::int32_t result) {
    inside_submit = inside_submit || submitting;
    off_thread = off_thread || !reactor->on_reactor_thread();
    std::int32_t& slot = results[static_cast<std::size_t>(&op - ops.data())];
    twice = twice || slot != kNotYet;
    slot = result;
    if (--left == 0) done.set();
  }

  static constexpr std::int32_t kNotYet = -1'000'000;
  Reactor* reactor;
  std::vector<IoOp> ops;
  std::vector<std::int32_t> results;
  std::size_t left = 0;
  std::size_t in_flight_after_submit = 0;
  bool submitting = false;
  bool inside_submit = false;
  bool off_thread = false;
  bool twice = false;
  Signal done;
};

inline Task<> submit_and_wait(IoEngine& engine, Submitted& submitted, std::vector<IoOp>& ops) {
  submitted.submit(engine, std::move(ops));
  co_await submitted.done.wait();
}

/// Submits all, waits for all, returns the results in the same order.
inline std::vector<std::int32_t> transfer(Reactor& reactor, IoEngine& engine,
                                          std::vector<IoOp> ops) {
  Submitted submitted(reactor);
  reactor.block_on(submit_and_wait(engine, submitted, ops));
  return submitted.results;
}

}  // namespace ziggurat::testing_support
