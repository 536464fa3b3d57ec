// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw.cc: a record cut into decay runs, and into tiles that are hashed while they are
// in cache.
#include "optimizer/adamw.h"

#include <algorithm>

#include "base/check.h"
#include "optimizer/kernels.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

void check(const AdamWRecord& record, std::span<const DecayRun> runs) {
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
    covered = run.end;
  }
  ZIGGURAT_CHECK(covered == count, "runs cover {} of {} elements", covered, count);
}

/// Walks the runs of a record from front to back.
class Sweep {
 public:
  Sweep(const AdamWStep& step, const AdamWRecord& record, std::span<const DecayRun> runs)
      : step_(step), record_(record), run_(runs.begin()) {}

  /// Updates from where the last call ended up to element `end`.
  void update_until(std::size_t end) {
    while (at_ < end) {
      while (run_->end <= at_) ++run_;
      const std::size_t stop = std::min(end, run_->end);
      internal::adamw(step_, {.master = record_.master.data() + at_,
                              .exp_avg = record_.exp_avg.data() + at_,
                              .exp_avg_sq = record_.exp_avg_sq.data() + at_,
                              .grad = record_.grad.data() + at_,
                              .param = record_.param.data() + at_,
                              .count = stop - at_,
                              .decay_factor = run_->decay ? step_.decay_factor : 1.0f});
      at_ = stop;
    }
  }

 private:
  const AdamWStep& step_;
  const AdamWRecord& record_;
  std::span<const DecayRun>::iterator run_;
  std::size_t at_ = 0;
};

}  // namespace

void adamw_update(const AdamWStep& step, const AdamWRecord& record,
                  std::span<const DecayRun> runs) noexcept {
  check(record, runs);
  Sweep(step, record, runs).update_until(record.master.size());
}

RecordHashes adamw_update_hashed(const AdamWStep& step, const AdamWRecord& record,
                                 std::span<const DecayRun> runs, const HashedUpdate& hashing) {
  check(record, runs);
  const std::size_t count = record.master.size();
  ZIGGURAT_CHECK(count % kTileElements == 0, "{} elements are not whole tiles of {}", count,
                 kTileElements);
  const std::size_t tiles = count / kTileElements;
  RecordHash before(3 * tiles * kTileBytes);
  RecordHash after(3 * tiles * kTileBytes);
  const auto hash_tile = [&](RecordHash& hash, std::size_t tile) {
    const std::size_t begin = tile * kTileElements;
    hash.set_tile(tile, std::as_bytes(record.master.subspan(begin, kTileElements)));
    hash.set_tile(tiles + tile, std::as_bytes(record.exp_avg.subspan(begin, kTileElements)));
    hash.set_tile(2 * tiles + tile, std::as_bytes(record.exp_avg_sq.subspan(begin, kTileElements)));
  };

  Sweep sweep(step, record, runs);
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    if (hashing.verify) hash_tile(before, tile);
    sweep.update_until((tile + 1) * kTileElements);
    hash_tile(after, tile);
  }
  return {.before = hashing.verify ? before.finish(hashing.seed_before) : 0,
          .after = after.finish(hashing.seed_after)};
}

}  // namespace ziggurat
