// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw.cc: a record cut into decay runs, and into tiles that are hashed while they are
// in cache.
#include "optimizer/adamw.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "optimizer/kernels.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

void check(StepView steps, const AdamWRecord& record, std::span<const DecayRun> runs) {
  const std::size_t count = record.master.size();
  ZIGGURAT_CHECK(record.exp_avg.size() == count && record.exp_avg_sq.size() == count &&
                     record.grad.size() == count && record.param.size() == count,
                 "master {}, exp_avg {}, exp_avg_sq {}, grad {}, param {} elements", count,
                 record.exp_avg.size(), record.exp_avg_sq.size(), record.grad.size(),
                 record.param.size());
  std::size_t covered = 0;
  for (const DecayRun& run : runs) {
    ZIGGURAT_CHECK(run.begin == covered && run.end >= run.begin,
                   "run [{}, {}) after a run that ended at {}", run.begin, run.end, covered);
    ZIGGURAT_CHECK(run.group < steps.size(), "a run of group {}, and {} steps", run.group,
                   steps.size());
    covered = run.end;
  }
  ZIGGURAT_CHECK(covered == count, "runs cover {} of {} elements", covered, count);
}

/// Walks the runs of a record from front to back.
class Sweep {
 public:
  Sweep(StepView steps, const AdamWRecord& record, std::span<const DecayRun> runs)
      : steps_(steps), record_(record), run_(runs.begin()) {}

  /// The elements from where the last one ended up to `end`, or to the end of the run if that is
  /// nearer.
  internal::AdamWSlice next(std::size_t end) {
    while (run_->end <= at_) ++run_;
    const std::size_t begin = at_;
    at_ = std::min(end, run_->end);
    return {.master = record_.master.data() + begin,
            .exp_avg = record_.exp_avg.data() + begin,
            .exp_avg_sq = record_.exp_avg_sq.data() + begin,
            .grad = record_.grad.data() + begin,
            .param = record_.param.data() + begin,
            .count = at_ - begin,
            .decay_factor = run_->decay ? step().decay_factor : step().no_decay_factor};
  }
  /// Of the elements that next() gave.
  const AdamWStep& step() const { return steps_[run_->group]; }
  std::size_t at() const { return at_; }

 private:
  StepView steps_;
  const AdamWRecord& record_;
  std::span<const DecayRun>::iterator run_;
  std::size_t at_ = 0;
};

/// Most tiles lie in one run. One that does not is hashed around its updates.
void update_tile(Sweep& sweep, bool verify, internal::TileHashes& hashes) {
  const std::size_t end = sweep.at() + kTileElements;
  internal::AdamWSlice slice = sweep.next(end);
  if (slice.count == kTileElements) {
    internal::adamw_hashed(sweep.step(), slice, verify, hashes);
    return;
  }
  internal::AdamWSlice tile = slice;
  tile.count = kTileElements;
  internal::hash_around(tile, verify, hashes, [&] {
    internal::adamw(sweep.step(), slice);
    while (sweep.at() < end) {
      slice = sweep.next(end);
      internal::adamw(sweep.step(), slice);
    }
  });
}

}  // namespace

void adamw_update(StepView steps, const AdamWRecord& record,
                  std::span<const DecayRun> runs) noexcept {
  check(steps, record, runs);
  Sweep sweep(steps, record, runs);
  while (sweep.at() < record.master.size()) {
    const internal::AdamWSlice slice = sweep.next(record.master.size());
    internal::adamw(sweep.step(), slice);
  }
}

RecordHashes adamw_update_hashed(StepView steps, const AdamWRecord& record,
                                 std::span<const DecayRun> runs, const HashedUpdate& hashing) {
  check(steps, record, runs);
  const std::size_t count = record.master.size();
  ZIGGURAT_CHECK(count % kTileElements == 0, "{} elements are not whole tiles of {}", count,
                 kTileElements);
  const std::size_t tiles = count / kTileElements;
  // In the order of offsets in the record: the masters' tiles, then exp_avg's, then exp_avg_sq's.
  std::vector<std::uint64_t> before(hashing.verify ? 3 * tiles : 0);
  std::vector<std::uint64_t> after(3 * tiles);

  Sweep sweep(steps, record, runs);
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    internal::TileHashes hashes;
    update_tile(sweep, hashing.verify, hashes);
    for (std::size_t array = 0; array < 3; ++array) {
      if (hashing.verify) before[array * tiles + tile] = hashes.before[array];
      after[array * tiles + tile] = hashes.after[array];
    }
  }
  // As RecordHash::finish does.
  return {
      .before = hashing.verify ? hash64(std::as_bytes(std::span(before)), hashing.seed_before) : 0,
      .after = hash64(std::as_bytes(std::span(after)), hashing.seed_after)};
}

}  // namespace ziggurat
