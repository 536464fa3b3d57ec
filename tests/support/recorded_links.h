// SPDX-License-Identifier: Apache-2.0
// tests/support/recorded_links.h: what a run gives to its drives and says to other ranks, in order:
// a drive and a communicator that write it down and pass it on.
//
// Reactor's thread, but for the logs, which are read when the run is over.
#pragma once

#include <fmt/format.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aio/io_engine.h"
#include "collectives/communicator.h"

namespace ziggurat::testing {

/// The transfers of each link, by the link's name, in the order in which they were begun.
using LinkLog = std::map<std::string, std::vector<std::string>>;

/// Notes the transfers that a drive is given, file by file. Ends those of one direction in the
/// order in which they were begun: which of two ends first is up to the drive, and the engine goes
/// on with it.
class RecordedDrive final : public IoEngine {
 public:
  RecordedDrive(std::unique_ptr<IoEngine> inside, LinkLog& log)
      : inside_(std::move(inside)), log_(log) {}

  std::string description() const override { return inside_->description(); }
  std::uint32_t queue_depth() const noexcept override { return inside_->queue_depth(); }
  FileHandle open(const std::string& path, const OpenOptions& options) override {
    return inside_->open(path, options);
  }
  void close(FileHandle file) noexcept override { inside_->close(file); }
  std::uint64_t file_size_bytes(FileHandle file) override { return inside_->file_size_bytes(file); }
  void allocate(FileHandle file, std::uint64_t size_bytes) override {
    inside_->allocate(file, size_bytes);
  }
  DirectAlignment alignment(FileHandle file) override { return inside_->alignment(file); }
  void rename(const std::string& from, const std::string& to) override {
    inside_->rename(from, to);
  }
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
  std::size_t in_flight() const noexcept override { return inside_->in_flight(); }

  void submit(IoOp& op) override {
    static constexpr const char* kNames[] = {"drive reads", "drive writes", "drive syncs"};
    const auto kind = static_cast<std::size_t>(op.kind);
    const std::size_t file = files_.try_emplace(op.file.id, files_.size()).first->second;
    log_[fmt::format("{}, file {}", kNames[kind], file)].push_back(
        fmt::format("at {}: {}", op.offset_bytes, op.size_bytes));
    auto passed = std::make_unique<Passed>(Passed{.op = op, .asked = &op, .its = this});
    passed->op.user = passed.get();
    passed->op.complete = [](IoOp& done, std::int32_t result) {
      auto& of = *static_cast<Passed*>(done.user);
      of.result = result;
      of.ended = true;
      of.its->end(static_cast<std::size_t>(done.kind));
    };
    IoOp& inner = passed->op;
    under_way_[kind].push_back(std::move(passed));
    inside_->submit(inner);
  }

 private:
  struct Passed {
    IoOp op;
    IoOp* asked;
    RecordedDrive* its;
    std::int32_t result = 0;
    bool ended = false;
  };

  void end(std::size_t kind) {
    std::deque<std::unique_ptr<Passed>>& line = under_way_[kind];
    while (!line.empty() && line.front()->ended) {
      const std::unique_ptr<Passed> first = std::move(line.front());
      line.pop_front();
      first->asked->complete(*first->asked, first->result);
    }
  }

  std::unique_ptr<IoEngine> inside_;
  LinkLog& log_;
  std::map<int, std::size_t> files_;  // by handle: numbers in the order of their first transfers
  std::deque<std::unique_ptr<Passed>> under_way_[3];  // by IoKind
};

/// Notes the calls that a rank makes, by communicator: each split() makes the next number.
class RecordedRanks final : public Communicator {
 public:
  RecordedRanks(std::unique_ptr<Communicator> inside, LinkLog& log)
      : RecordedRanks(std::move(inside), log, std::make_shared<int>(0)) {}

  int rank() const noexcept override { return inside_->rank(); }
  int world_size() const noexcept override { return inside_->world_size(); }
  Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) override {
    note("all_gather", input.size());
    return inside_->all_gather(input, output);
  }
  Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                        DType dtype) override {
    note("reduce_scatter", output.size());
    return inside_->reduce_scatter(input, output, dtype);
  }
  Task<> all_reduce(std::span<std::byte> values, DType dtype) override {
    note("all_reduce", values.size());
    return inside_->all_reduce(values, dtype);
  }
  Task<> all_reduce(std::span<double> values, Op op) override {
    note("all_reduce of values", values.size_bytes());
    return inside_->all_reduce(values, op);
  }
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) override {
    note("all_reduce of values", values.size_bytes());
    return inside_->all_reduce(values, op);
  }
  Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override {
    note("all_to_all", input.size());
    return inside_->all_to_all(input, output);
  }
  Task<> barrier() override {
    note("barrier", 0);
    return inside_->barrier();
  }
  Task<> send(std::span<const std::byte> bytes, int to) override {
    note("send", bytes.size());
    return inside_->send(bytes, to);
  }
  Task<> recv(std::span<std::byte> bytes, int from) override {
    note("recv", bytes.size());
    return inside_->recv(bytes, from);
  }
  void on_send(std::function<void(int from)> hear) override { inside_->on_send(std::move(hear)); }
  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return std::unique_ptr<Communicator>(new RecordedRanks(inside_->split(members), log_, count_));
  }
  Traffic traffic() const override { return inside_->traffic(); }
  std::string description() const override { return inside_->description(); }
  void abort(const std::string& reason) override { inside_->abort(reason); }

 private:
  RecordedRanks(std::unique_ptr<Communicator> inside, LinkLog& log, std::shared_ptr<int> count)
      : inside_(std::move(inside)),
        log_(log),
        count_(std::move(count)),
        link_(fmt::format("rank messages {}", (*count_)++)) {}
  void note(const char* what, std::size_t size_bytes) {
    log_[link_].push_back(fmt::format("{}: {}", what, size_bytes));
  }

  std::unique_ptr<Communicator> inside_;
  LinkLog& log_;
  std::shared_ptr<int> count_;
  std::string link_;
};

}  // namespace ziggurat::testing
