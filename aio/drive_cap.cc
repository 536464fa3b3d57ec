// SPDX-License-Identifier: Apache-2.0
// aio/drive_cap.cc: the rounds go over all caps in turn, so that a drive that drifts does so for
// all of them.
#include "aio/drive_cap.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kBlock = DirectFile::kBlockBytes;

class Sampler {
 public:
  Sampler(Reactor& reactor, DirectFile& file, std::span<std::byte> memory,
          const DriveCapSearch& search)
      : reactor_(reactor), file_(file), memory_(memory), search_(search) {}

  /// Bytes per second with `lanes` blocks in flight.
  Task<double> sample(std::size_t lanes) {
    left_ = std::max<std::uint64_t>(search_.sample_bytes / kBlock, lanes);
    const double bytes = static_cast<double>(left_ * kBlock);
    const Nanoseconds start = reactor_.clock().now();
    WorkGroup group(reactor_);
    for (std::size_t lane = 0; lane < lanes; ++lane) group.spawn(follow(lane));
    co_await group.wait_idle();
    const std::chrono::duration<double> time = reactor_.clock().now() - start;
    co_return bytes / std::max(time.count(), 1e-9);
  }

 private:
  Task<> follow(std::size_t lane) {
    const auto block = memory_.subspan(lane * kBlock, kBlock);
    while (left_ > 0) {
      --left_;
      const std::uint64_t offset = next_++ % (search_.range_bytes / kBlock) * kBlock;
      if (search_.kind == IoKind::kWrite) {
        co_await file_.write(offset, block);
      } else {
        co_await file_.read(offset, block);
      }
    }
  }

  Reactor& reactor_;
  DirectFile& file_;
  std::span<std::byte> memory_;
  DriveCapSearch search_;
  std::uint64_t next_ = 0;
  std::uint64_t left_ = 0;
};

}  // namespace

Task<DriveCap> find_drive_cap(Reactor& reactor, DirectFile& file, std::span<std::byte> memory,
                              DriveCapSearch search) {
  if (memory.size() < kBlock || search.range_bytes < kBlock) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the drive of {} is measured in blocks of {}: memory of {} or a range "
                            "of {} holds none",
                            file.path(), format_bytes(kBlock), format_bytes(memory.size()),
                            format_bytes(search.range_bytes)));
  }
  Sampler sampler(reactor, file, memory, search);
  std::vector<std::pair<std::size_t, std::vector<double>>> measured;
  for (std::size_t lanes = 1; lanes * kBlock <= memory.size(); lanes *= 2) {
    measured.push_back({lanes, {}});
  }
  for (int round = 0; round < std::max(search.rounds, 1); ++round) {
    for (auto& [lanes, speeds] : measured) speeds.push_back(co_await sampler.sample(lanes));
  }
  DriveCap cap;
  double best = 0;
  for (auto& [lanes, speeds] : measured) {
    std::sort(speeds.begin(), speeds.end());
    const double speed = speeds[speeds.size() / 2];
    best = std::max(best, speed);
    cap.samples.push_back({lanes * kBlock, speed});
  }
  const auto enough =
      std::find_if(cap.samples.begin(), cap.samples.end(), [&](const DriveCap::Sample& each) {
        return each.bytes_per_second >= best * (1 - search.tolerance);
      });
  cap.outstanding_bytes = enough->outstanding_bytes;
  cap.bytes_per_second = enough->bytes_per_second;
  co_return cap;
}

}  // namespace ziggurat
