// SPDX-License-Identifier: Apache-2.0
// integrations/measure/prefetch.cc: lanes read blocks in the order of units, and one coroutine
// consumes the units.
#include "integrations/measure/prefetch.h"

#include <algorithm>
#include <utility>

#include "base/runtime/async.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint64_t kUnitsAhead = 2;

class Prefetch {
 public:
  Prefetch(const Bench& bench, Targets targets, const PrefetchPlan& plan)
      : bench_(bench),
        targets_(targets),
        plan_(plan),
        blocks_per_unit_(std::max<std::uint64_t>(1, plan.unit_bytes / plan.block_bytes)),
        moved_(bench.reactor),
        recorder_(plan.name, plan.seconds, bench.progress, bench.beside),
        next_(targets.size()),
        last_(plan.depth * targets.size()) {}

  Task<Measurement> run() {
    std::vector<Lease> buffers;
    for (std::size_t i = 0; i < plan_.depth * targets_.size(); ++i)
      buffers.push_back(take_buffer(bench_.pool, plan_.block_bytes));
    WorkGroup work(bench_.reactor);
    recorder_.begin();
    for (std::size_t i = 0; i < buffers.size(); ++i) work.spawn(run_lane(i, buffers[i]));
    work.spawn(consume());
    co_await work.wait_idle();
    Measurement measured = recorder_.finish();
    deadlines_.unit_bytes = blocks_per_unit_ * plan_.block_bytes;
    deadlines_.pace_gb_per_s = plan_.pace_gb_per_s;
    measured.deadlines = deadlines_;
    measured.sample = last_blocks(buffers);
    co_return measured;
  }

 private:
  struct Unit {
    std::uint64_t blocks_left;
    Nanoseconds ready{0};
  };

  Task<> run_lane(std::size_t lane, const Lease& buffer) {
    try {
      while (!over_) co_await read_next(lane, buffer);
    } catch (...) {
      over_ = true;  // nothing may wait for a unit that will not come
      wake();
      throw;
    }
  }

  // Reads the next block of the lane's target. The blocks of a unit are spread over the targets in
  // turn.
  Task<> read_next(std::size_t lane, const Lease& buffer) {
    const std::size_t which = lane % targets_.size();
    Target& target = *targets_[which];
    const std::uint64_t mine = next_[which]++;
    const std::uint64_t unit = (mine * targets_.size() + which) / blocks_per_unit_;
    while (!over_ && unit > in_use_ + kUnitsAhead) co_await moved_.wait();
    if (over_) co_return;
    const std::uint64_t blocks = target.size_bytes() / plan_.block_bytes;
    const std::uint64_t offset = mine % blocks * plan_.block_bytes;
    const Nanoseconds started = monotonic_now();
    co_await target.file().read(offset, buffer.bytes());
    recorder_.add(IoKind::kRead, plan_.block_bytes, started);
    last_[lane] = {&target, offset};
    arrived(unit);
  }

  void arrived(std::uint64_t unit) {
    while (units_.size() <= unit) units_.push_back({blocks_per_unit_});
    if (--units_[unit].blocks_left > 0) return;
    units_[unit].ready = monotonic_now();
    wake();
  }

  bool ready(std::uint64_t unit) const {
    return unit < units_.size() && units_[unit].blocks_left == 0;
  }

  void wake() {
    moved_.set();
    moved_.reset();
  }

  Task<> consume() {
    const Nanoseconds compute(
        static_cast<std::int64_t>(static_cast<double>(blocks_per_unit_ * plan_.block_bytes) /
                                  plan_.pace_gb_per_s));  // bytes / (GB/s) is nanoseconds
    Nanoseconds due{0};
    for (std::uint64_t unit = 0; recorder_.running(); ++unit) {
      while (!ready(unit) && !over_) co_await moved_.wait();
      if (over_) co_return;
      const Nanoseconds begin = std::max(due, units_[unit].ready);
      if (unit > 0) note(begin - due);
      in_use_ = unit;
      due = begin + compute;
      wake();
      co_await sleep_until(due);
    }
    over_ = true;
    wake();
  }

  void note(Nanoseconds late) {
    ++deadlines_.units;
    if (late <= Nanoseconds(0)) return;
    ++deadlines_.missed;
    deadlines_.worst_late_s = std::max(deadlines_.worst_late_s, in_seconds(late));
    deadlines_.stalled_s += in_seconds(late);
  }

  Task<> sleep_until(Nanoseconds when) {
    const Nanoseconds now = monotonic_now();
    if (now >= when) co_return;
    Signal woken(bench_.reactor);
    bench_.reactor.clock().after(when - now, [&woken] { woken.set(); });
    co_await woken.wait();
  }

  /// Checks the blocks that were read last, which the buffers hold at the end.
  SampleFacts last_blocks(const std::vector<Lease>& buffers) const {
    SampleFacts sample;
    for (std::size_t lane = 0; lane < buffers.size(); ++lane) {
      const Block& block = last_[lane];
      if (block.target == nullptr) continue;
      const std::span<const std::byte> bytes = buffers[lane].bytes();
      SampleFacts facts = look_at(bytes);
      facts.verified = block.target->ours();
      if (facts.verified) {
        facts.wrong_pages =
            wrong_pages(bytes, block.target->pass, block.target->first_pass, block.offset_bytes);
      }
      sample.add(facts);
    }
    return sample;
  }

  struct Block {
    const Target* target = nullptr;
    std::uint64_t offset_bytes = 0;
  };

  const Bench& bench_;
  Targets targets_;
  const PrefetchPlan& plan_;
  const std::uint64_t blocks_per_unit_;
  Signal moved_;  // a unit arrived, or the consumer went on
  Recorder recorder_;
  std::vector<std::uint64_t> next_;  // block, by target
  std::vector<Unit> units_;
  std::uint64_t in_use_ = 0;
  bool over_ = false;
  std::vector<Block> last_;  // by lane
  Deadlines deadlines_;
};

}  // namespace

Measurement run_prefetch(const Bench& bench, Targets targets, const PrefetchPlan& plan) {
  Prefetch prefetch(bench, targets, plan);
  return bench.reactor.block_on(prefetch.run());
}

}  // namespace ziggurat::measure
