// SPDX-License-Identifier: Apache-2.0
// tests/support/memory_files.h: an IoEngine over files in memory, for readers: a map that a test
// changes while nothing is open. Reads are answered in the reactor's next turn; nothing is written.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "aio/io_engine.h"
#include "base/error.h"

namespace ziggurat::test {

class MemoryFiles final : public IoEngine {
 public:
  using Bytes = std::vector<std::byte>;

  explicit MemoryFiles(Reactor& reactor) : reactor_(reactor) {}

  /// By path.
  std::map<std::string, Bytes> files;

  std::string description() const override { return "memory"; }
  std::uint32_t queue_depth() const noexcept override { return 1; }
  FileHandle open(const std::string& path, const OpenOptions& options) override {
    const auto found = files.find(path);
    if (options.create || options.writable) throw system_error(EROFS, "open " + path);
    if (found == files.end()) throw system_error(ENOENT, "open " + path);
    if (open_count_++ == 0) opened_.clear();
    opened_.push_back(&found->second);
    return {static_cast<int>(opened_.size() - 1)};
  }
  void close(FileHandle) noexcept override { --open_count_; }
  std::uint64_t file_size_bytes(FileHandle file) override { return bytes_of(file).size(); }
  void allocate(FileHandle, std::uint64_t) override { refuse(); }
  DirectAlignment alignment(FileHandle) override { return {}; }
  void rename(const std::string&, const std::string&) override { refuse(); }
  void remove(const std::string&) override { refuse(); }
  bool exists(const std::string& path) override { return files.contains(path); }
  void sync_directory(const std::string&) override {}
  void make_directory(const std::string&) override { refuse(); }
  void remove_directory(const std::string&) override { refuse(); }
  std::vector<std::string> names_in(const std::string& directory) override {
    std::vector<std::string> names;
    const std::string begin = directory + "/";
    for (const auto& [path, bytes] : files) {
      if (!path.starts_with(begin)) continue;
      const std::string name =
          path.substr(begin.size(), path.find('/', begin.size()) - begin.size());
      if (names.empty() || names.back() != name) names.push_back(name);
    }
    if (names.empty()) throw system_error(ENOENT, "names in " + directory);
    return names;
  }
  std::uint64_t free_bytes(const std::string&) override { refuse(); }
  void drop_cache(FileHandle) override {}
  void register_memory(std::span<std::byte>) override {}
  std::size_t in_flight() const noexcept override { return in_flight_; }

  void submit(IoOp& op) override {
    ++in_flight_;
    reactor_.post([this, &op] {
      --in_flight_;
      op.complete(op, answer(op));
    });
  }

 private:
  [[noreturn]] static void refuse() { throw system_error(EROFS, "files in memory"); }
  const Bytes& bytes_of(FileHandle file) const {
    return *opened_[static_cast<std::size_t>(file.id)];
  }
  std::int32_t answer(const IoOp& op) const {
    if (op.kind != IoKind::kRead) return -EROFS;
    const Bytes& bytes = bytes_of(op.file);
    const std::size_t begin = std::min<std::size_t>(op.offset_bytes, bytes.size());
    const std::size_t count = std::min<std::size_t>(op.size_bytes, bytes.size() - begin);
    if (count > 0) std::memcpy(op.data, bytes.data() + begin, count);
    return static_cast<std::int32_t>(count);
  }

  Reactor& reactor_;
  std::vector<const Bytes*> opened_;  // by handle; anew when all are closed
  std::size_t open_count_ = 0;
  std::size_t in_flight_ = 0;
};

}  // namespace ziggurat::test
