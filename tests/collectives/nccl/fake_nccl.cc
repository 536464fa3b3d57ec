// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/fake_nccl.cc: groups that meet at a table; the last to come does the work.
#include "tests/collectives/nccl/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "collectives/rank_sum.h"

namespace ziggurat {
namespace {

struct Table {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::span<const std::byte>> in;
  std::vector<std::span<std::byte>> out;
  std::size_t arrived = 0;
  std::size_t rounds = 0;
};

std::shared_ptr<Table> table_of(const NcclGroup::Id& id) {
  static std::mutex mutex;
  static std::map<NcclGroup::Id, std::weak_ptr<Table>> tables;
  const std::lock_guard lock(mutex);
  auto table = tables[id].lock();
  if (!table) tables[id] = table = std::make_shared<Table>();
  return table;
}

class FakeGroup final : public NcclGroup {
 public:
  void join(const Id& id, int place, int world_size) override {
    table_ = table_of(id);
    place_ = static_cast<std::size_t>(place);
    world_ = static_cast<std::size_t>(world_size);
    {
      const std::lock_guard lock(table_->mutex);
      table_->in.resize(world_);
      table_->out.resize(world_);
    }
    meet({}, {}, [] {});
  }
  void all_gather(std::span<const std::byte> input, std::span<std::byte> output) override {
    meet(input, output, [this] {
      for (const auto& to : table_->out) {
        for (std::size_t r = 0; r < world_; ++r) put(table_->in[r], to, r * table_->in[r].size());
      }
    });
  }
  void reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                      DType dtype) override {
    meet(input, output, [this, dtype] {
      std::vector<std::vector<std::byte>> sums;
      for (std::size_t r = 0; r < world_; ++r) {
        sums.push_back(sum(r * table_->out[r].size(), table_->out[r].size(), dtype));
      }
      for (std::size_t r = 0; r < world_; ++r) put(sums[r], table_->out[r], 0);
    });
  }
  void all_reduce(std::span<std::byte> values, DType dtype) override {
    meet(values, values, [this, dtype] {
      const auto total = sum(0, table_->in[0].size(), dtype);
      for (const auto& to : table_->out) put(total, to, 0);
    });
  }
  void all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override {
    meet(input, output, [this] {
      const std::size_t each = table_->in[0].size() / world_;
      for (std::size_t to = 0; to < world_; ++to) {
        for (std::size_t from = 0; from < world_; ++from) {
          put(table_->in[from].subspan(to * each, each), table_->out[to], from * each);
        }
      }
    });
  }
  void broadcast(std::span<std::byte> bytes, int root) override {
    meet(bytes, bytes, [this, root] {
      for (const auto& to : table_->out) put(table_->in[static_cast<std::size_t>(root)], to, 0);
    });
  }
  void abort() noexcept override {
    aborted_ = true;
    if (table_) table_->changed.notify_all();
  }

 private:
  static void put(std::span<const std::byte> from, std::span<std::byte> to, std::size_t at) {
    if (!from.empty()) std::memmove(to.data() + at, from.data(), from.size());
  }
  std::vector<std::byte> sum(std::size_t at, std::size_t length, DType dtype) const {
    std::vector<const std::byte*> terms;
    for (const auto& from : table_->in) terms.push_back(from.data() + at);
    std::vector<std::byte> total(length);
    sum_in_rank_order(terms, dtype, length / size_bytes(dtype), total.data());
    return total;
  }
  void meet(std::span<const std::byte> in, std::span<std::byte> out,
            const std::function<void()>& work) {
    std::unique_lock lock(table_->mutex);
    table_->in[place_] = in;
    table_->out[place_] = out;
    const std::size_t round = table_->rounds;
    if (++table_->arrived == world_) {
      work();
      table_->arrived = 0;
      ++table_->rounds;
      table_->changed.notify_all();
      return;
    }
    // A real NCCL is asked again and again too: abort() may come between two looks.
    while (table_->rounds == round) {
      if (aborted_) throw Error(ErrorCode::kUnavailable, "given up, since a rank failed");
      table_->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  std::shared_ptr<Table> table_;
  std::size_t place_ = 0;
  std::size_t world_ = 1;
  std::atomic<bool> aborted_{false};
};

class FakeDevice final : public NcclDevice {
 public:
  NcclGroup::Id new_id() override {
    static std::atomic<std::uint64_t> next{1};
    const std::uint64_t number = next++;
    NcclGroup::Id id{};
    std::memcpy(id.data(), &number, sizeof(number));
    return id;
  }
  std::unique_ptr<NcclGroup> new_group() override { return std::make_unique<FakeGroup>(); }
  std::string description() const override { return "a fake NCCL"; }
};

}  // namespace

std::shared_ptr<NcclDevice> fake_nccl() { return std::make_shared<FakeDevice>(); }

}  // namespace ziggurat
