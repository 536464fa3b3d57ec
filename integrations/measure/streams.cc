// SPDX-License-Identifier: Apache-2.0
// integrations/measure/streams.cc: a lane is a coroutine with a buffer of each kind that it needs,
// which moves one block after the other.
#include "integrations/measure/streams.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/runtime/async.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint32_t kFillDepth = 16;
constexpr std::size_t kReadBacks = 16;
constexpr std::uint64_t kSamplesMax = 32;

struct Kept {
  Lease lease;
  std::uint64_t offset_bytes;
};

/// The part of a row that runs on one target.
struct Share {
  explicit Share(Target& its_target) : target(its_target) {}
  Target& target;
  std::uint64_t next_read = 0;   // in blocks
  std::uint64_t next_write = 0;  // in blocks, half a file behind the reads
  std::uint64_t issued = 0;
  std::vector<std::uint64_t> written;  // offsets of blocks to read back
  std::vector<Kept> kept;
  std::vector<Lease> spare;
};

class Stream {
 public:
  Stream(const Bench& bench, Targets targets, const StreamPlan& plan)
      : bench_(bench),
        plan_(plan),
        samples_(std::min(kSamplesMax, plan.sample_bytes / plan.block_bytes)),
        recorder_(plan.name, plan.seconds, bench.progress, bench.beside) {
    for (Target* target : targets) shares_.emplace_back(*target);
  }

  Task<Measurement> run() {
    WorkGroup lanes(bench_.reactor);
    std::vector<Lane> all = prepare();
    recorder_.begin();
    for (Lane& lane : all) lanes.spawn(run_lane(lane));
    co_await lanes.wait_idle();
    Measurement measured = recorder_.finish();
    for (Share& share : shares_) co_await wind_up(share, measured);
    co_return measured;
  }

 private:
  struct Lane {
    Share* share;
    Lease read;
    Lease write;
  };

  bool reads() const { return plan_.kind != IoMix::kWrite; }
  bool writes() const { return plan_.kind != IoMix::kRead; }
  std::uint64_t blocks(const Share& share) const {
    return share.target.size_bytes() / plan_.block_bytes;
  }

  std::vector<Lane> prepare() {
    std::vector<Lane> lanes;
    for (Share& share : shares_) {
      share.next_write = plan_.kind == IoMix::kMix ? blocks(share) / 2 : 0;
      if (writes()) ++share.target.pass.number;
      for (std::uint32_t i = 0; i < plan_.depth; ++i) {
        Lane lane{&share, {}, {}};
        if (reads()) lane.read = take_buffer(bench_.pool, plan_.block_bytes);
        if (writes()) {
          lane.write = take_buffer(bench_.pool, plan_.block_bytes);
          const auto pages = static_cast<std::uint32_t>(plan_.block_bytes / kPageBytes);
          make_pages(lane.write.bytes(), share.target.pass.file_seed, i * pages);
        }
        lanes.push_back(std::move(lane));
      }
      for (std::uint32_t i = 0; reads() && i < samples_; ++i)
        share.spare.push_back(take_buffer(bench_.pool, plan_.block_bytes));
    }
    return lanes;
  }

  Task<> run_lane(Lane& lane) {
    while (recorder_.running()) {
      Share& share = *lane.share;
      const bool write = plan_.kind == IoMix::kMix ? share.issued++ % 2 == 1 : writes();
      if (write) {
        co_await write_block(lane, share);
      } else {
        co_await read_block(lane, share);
      }
    }
  }

  Task<> read_block(Lane& lane, Share& share) {
    const std::uint64_t offset = share.next_read++ % blocks(share) * plan_.block_bytes;
    const Nanoseconds started = monotonic_now();
    co_await share.target.file().read(offset, lane.read.bytes());
    recorder_.add(IoKind::kRead, plan_.block_bytes, started);
    if (share.spare.empty() || started < due(share.kept.size())) co_return;
    share.kept.push_back({std::exchange(lane.read, std::move(share.spare.back())), offset});
    share.spare.pop_back();
  }

  Task<> write_block(Lane& lane, Share& share) {
    const std::uint64_t offset = share.next_write++ % blocks(share) * plan_.block_bytes;
    const Nanoseconds cpu = thread_cpu();
    stamp_pages(lane.write.bytes(), share.target.pass, offset);
    recorder_.add_fill_cpu(thread_cpu() - cpu);
    const Nanoseconds started = monotonic_now();
    co_await share.target.file().write(offset, lane.write.bytes());
    recorder_.add(IoKind::kWrite, plan_.block_bytes, started);
    share.target.written_bytes += plan_.block_bytes;
    if (share.written.size() < kReadBacks && started >= due(share.written.size() * 2))
      share.written.push_back(offset);
  }

  /// Returns when the next sample is to be taken. Samples are taken evenly over the row.
  Nanoseconds due(std::size_t taken) const {
    return recorder_.begun() +
           (recorder_.deadline() - recorder_.begun()) * taken / std::max<std::size_t>(1, samples_);
  }

  Task<> wind_up(Share& share, Measurement& measured) {
    Target& target = share.target;
    if (writes()) {
      const Nanoseconds begun = monotonic_now();
      co_await target.file().sync();
      measured.flush_s += std::chrono::duration<double>(monotonic_now() - begun).count();
      co_await read_back(share, measured);
    }
    for (const Kept& kept : share.kept) {
      SampleFacts facts = look_at(kept.lease.bytes());
      facts.verified = target.ours();
      if (facts.verified) {
        facts.wrong_pages =
            wrong_pages(kept.lease.bytes(), target.pass, target.first_pass, kept.offset_bytes);
      }
      measured.sample.add(facts);
    }
  }

  /// Reads some written blocks back. If the drive acknowledged a write and lost it, the block still
  /// has the stamp of an older pass.
  Task<> read_back(Share& share, Measurement& measured) {
    const Lease buffer = take_buffer(bench_.pool, plan_.block_bytes);
    for (const std::uint64_t offset : share.written) {
      co_await share.target.file().read(offset, buffer.bytes());
      SampleFacts facts = look_at(buffer.bytes());
      facts.verified = true;
      const std::uint32_t number = share.target.pass.number;
      facts.wrong_pages = wrong_pages(buffer.bytes(), share.target.pass, number, offset);
      measured.sample.add(facts);
    }
  }

  const Bench& bench_;
  const StreamPlan& plan_;
  const std::uint64_t samples_;
  Recorder recorder_;
  std::vector<Share> shares_;
};

struct Filling {
  const Bench& bench;
  Target& target;
  std::uint64_t next = 0;
  Nanoseconds live{0};
};

Task<> fill_lane(Filling& filling, Lease buffer) {
  Target& target = filling.target;
  while (filling.next < target.size_bytes()) {
    const std::uint64_t offset = std::exchange(filling.next, filling.next + buffer.bytes().size());
    const auto part = buffer.bytes().first(
        std::min<std::uint64_t>(buffer.bytes().size(), target.size_bytes() - offset));
    stamp_pages(part, target.pass, offset);
    co_await target.file().write(offset, part);
    target.written_bytes += part.size();
    const Nanoseconds now = monotonic_now();
    if (now < filling.live) continue;
    filling.live = now + std::chrono::milliseconds(250);
    filling.bench.progress.live(fmt::format("filling {}: {} of {}", target.label(),
                                            format_bytes(offset),
                                            format_bytes(target.size_bytes())));
  }
}

Task<> run_fill(const Bench& bench, Target& target) {
  ++target.pass.number;
  WorkGroup lanes(bench.reactor);
  Filling filling{bench, target, 0, monotonic_now() + std::chrono::seconds(1)};
  constexpr std::uint32_t kPages = DirectFile::kBlockBytes / kPageBytes;
  for (std::uint32_t i = 0; i < kFillDepth; ++i) {
    Lease buffer = take_buffer(bench.pool, DirectFile::kBlockBytes);
    make_pages(buffer.bytes(), target.pass.file_seed, i * kPages);
    Task<> lane = fill_lane(filling, std::move(buffer));
    lanes.spawn(std::move(lane));
  }
  co_await lanes.wait_idle();
  co_await target.file().sync();
  target.content = Target::Content::kPages;
  target.first_pass = target.pass.number;
  ++target.fill_count;
}

}  // namespace

Lease take_buffer(PinnedPool& pool, std::uint64_t size_bytes) {
  Lease lease = pool.try_acquire(
      {.purpose = Purpose::kStaging, .size_bytes = size_bytes, .holder = "benchmark"});
  ZIGGURAT_CHECK(static_cast<bool>(lease), "the benchmark's pool is too small:\n{}",
                 pool.holder_table());
  return lease;
}

Measurement run_stream(const Bench& bench, Targets targets, const StreamPlan& plan) {
  Stream stream(bench, targets, plan);
  return bench.reactor.block_on(stream.run());
}

void fill(const Bench& bench, Target& target) { bench.reactor.block_on(run_fill(bench, target)); }

}  // namespace ziggurat::measure
