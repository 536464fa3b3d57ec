// SPDX-License-Identifier: Apache-2.0
// integrations/measure/verdict.cc: the rules by which a figure is judged, one function for each
// kind of doubt.
#include "integrations/measure/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/bytes.h"

namespace ziggurat::measure {
namespace {

constexpr double kResidentMax = 0.01;
constexpr double kConstantMax = 0.01;
constexpr double kThinMax = 0.25;
// The fewest bytes of holes that put a file in doubt. A filesystem may keep an odd last block.
constexpr std::uint64_t kHoleMin = 4096;

std::string percent(double share) { return fmt::format("{:.0f} %", 100 * share); }

void judge_extents(const Evidence& e, std::vector<Flag>& flags) {
  if (e.extents.hole_bytes >= kHoleMin) {
    flags.push_back({Doubt::kHole, true,
                     fmt::format("{} of the file are holes, which are read without asking the "
                                 "drive; give a file that was written from end to end",
                                 format_bytes(e.extents.hole_bytes))});
  }
  if (e.extents.unwritten_bytes >= kHoleMin) {
    flags.push_back(
        {Doubt::kUnwritten, true,
         fmt::format("{} of the file are allocated but were never written, so the filesystem "
                     "returns zeros without asking the drive; write the file first",
                     format_bytes(e.extents.unwritten_bytes))});
  }
  if (e.extents.encoded_bytes > 0) {
    flags.push_back({Doubt::kCompressible, false,
                     fmt::format("the filesystem stores {} of the file compressed or encrypted, so "
                                 "the figure is the filesystem's speed and not the drive's",
                                 format_bytes(e.extents.encoded_bytes))});
  }
}

void judge_cache(const Evidence& e, std::vector<Flag>& flags) {
  if (!e.cache.direct) {
    flags.push_back({Doubt::kCached, true,
                     "O_DIRECT is not in force for this file, so the page cache was measured; use "
                     "a filesystem that allows O_DIRECT (ext4, XFS)"});
  } else if (!e.cache.residency_known) {
    flags.push_back(
        {Doubt::kCached, false,
         "the file belongs to another user, so the kernel does not tell whether it is in the page "
         "cache; O_DIRECT is in force, but some filesystems read through the cache all the same"});
  } else if (e.cache.resident_share > kResidentMax) {
    flags.push_back({Doubt::kCached, true,
                     fmt::format("{} of the file is in the page cache, so what was read may not "
                                 "have come from the drive; drop the file from the cache first (dd "
                                 "of=FILE oflag=nocache conv=notrunc,fdatasync count=0)",
                                 percent(e.cache.resident_share))});
  }
}

void judge_sample(const Evidence& e, std::vector<Flag>& flags) {
  const SampleFacts& sample = e.sample;
  if (sample.pages == 0) return;
  const auto share = [&](std::uint64_t pages) {
    return static_cast<double>(pages) / static_cast<double>(sample.pages);
  };
  if (sample.verified && sample.wrong_pages > 0) {
    flags.push_back({Doubt::kWrong, true,
                     fmt::format("{} of {} pages that were read differ from what was written; do "
                                 "not keep anything on this drive",
                                 sample.wrong_pages, sample.pages)});
    return;
  }
  if (share(sample.constant_pages) > kConstantMax) {
    flags.push_back(
        {Doubt::kZeros, true,
         fmt::format("{} of the pages that were read hold a single value (mostly zeros), which "
                     "drives return without touching flash; give real data",
                     percent(share(sample.constant_pages)))});
  }
  if (share(sample.thin_pages) > kThinMax) {
    flags.push_back(
        {Doubt::kCompressible, true,
         fmt::format("{} of the pages that were read would shrink by a quarter or more if they "
                     "were compressed, as some drives do; give data like that of a checkpoint",
                     percent(share(sample.thin_pages)))});
  }
}

void judge_course(const Evidence& e, std::vector<Flag>& flags) {
  const Steadiness course = steadiness(e.gb_per_second);
  if (!course.judged) {
    flags.push_back({Doubt::kShort, false,
                     fmt::format("{:.1f} s show no steady state, which is judged from {} whole "
                                 "seconds; give `seconds={}` or more",
                                 e.seconds, kSteadySeconds, kSteadySeconds)});
  } else if (!course.steady()) {
    flags.push_back({Doubt::kUnsteady, false,
                     fmt::format("the speed differs between seconds by {} of the mean and drifts "
                                 "by {} (steady would be {} and {}). A cache that fills, heat or "
                                 "other users may be the cause; give more `seconds`",
                                 percent(course.excursion), percent(course.slope),
                                 percent(kExcursionMax), percent(kSlopeMax))});
  }
}

void judge_size(const Evidence& e, std::vector<Flag>& flags) {
  const std::uint64_t cache = assumed_drive_cache_bytes(e.drive_bytes);
  const auto second = static_cast<std::uint64_t>(e.gb_per_s * 1e9);
  if (e.file_bytes >= std::max(cache, second)) return;
  flags.push_back(
      {Doubt::kSmall, false,
       fmt::format(
           "the file has {}, which is less than {}, so a cache may hold all of it; give `size={}`",
           format_bytes(e.file_bytes),
           cache > second ? "the DRAM that a drive of this size has"
                          : "what one second at this speed moves",
           format_bytes(round_up(std::max(cache, second), kGiB)))});
}

}  // namespace

std::string_view to_string(Doubt doubt) noexcept {
  switch (doubt) {
    case Doubt::kHole: return "hole";
    case Doubt::kUnwritten: return "unwritten";
    case Doubt::kCached: return "cached";
    case Doubt::kZeros: return "zeros";
    case Doubt::kCompressible: return "compressible";
    case Doubt::kWrong: return "wrong";
    case Doubt::kShort: return "short";
    case Doubt::kUnsteady: return "unsteady";
    case Doubt::kSmall: return "small";
  }
  return "?";
}

bool refused(const std::vector<Flag>& flags) noexcept {
  return std::any_of(flags.begin(), flags.end(), [](const Flag& flag) { return flag.refuses; });
}

Steadiness steadiness(const std::vector<double>& per_second) {
  Steadiness result;
  const std::size_t count = per_second.size();
  if (count < kSteadySeconds) return result;
  const double mean =
      std::accumulate(per_second.begin(), per_second.end(), 0.0) / static_cast<double>(count);
  if (mean <= 0) return result;
  const auto [low, high] = std::minmax_element(per_second.begin(), per_second.end());
  double covariance = 0;
  double variance = 0;
  const double middle = static_cast<double>(count - 1) / 2;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(i) - middle;
    covariance += x * (per_second[i] - mean);
    variance += x * x;
  }
  result.judged = true;
  result.excursion = (*high - *low) / mean;
  result.slope = std::abs(covariance / variance) * static_cast<double>(count - 1) / mean;
  return result;
}

std::uint64_t assumed_drive_cache_bytes(std::uint64_t drive_bytes) noexcept {
  return drive_bytes / 1000;
}

std::vector<Flag> judge(const Evidence& evidence) {
  std::vector<Flag> flags;
  judge_extents(evidence, flags);
  judge_cache(evidence, flags);
  judge_sample(evidence, flags);
  judge_course(evidence, flags);
  judge_size(evidence, flags);
  return flags;
}

}  // namespace ziggurat::measure
