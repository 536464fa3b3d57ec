// SPDX-License-Identifier: Apache-2.0
// integrations/measure/verdict.h: may a figure be believed? Facts about a run in, flags out. Pure.
//
// Reading a hole or an unwritten extent measures memset, a cached file memcpy, and zeros whatever a
// drive makes of them: those *refuse* the figure. A short, unsteady or small run is a figure of
// something else than the sustained speed: those *flag* it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "integrations/measure/fill.h"

namespace ziggurat::measure {

enum class Doubt : std::uint8_t {
  kHole,          ///< parts of the file were never allocated
  kUnwritten,     ///< allocated, never written: the filesystem makes the zeros up
  kCached,        ///< no O_DIRECT in force, or the file sits in the page cache
  kZeros,         ///< pages of one value
  kCompressible,  ///< pages that a drive can shrink
  kWrong,         ///< not what was written
  kShort,         ///< under kSteadySeconds
  kUnsteady,      ///< excursion or slope over the bounds
  kSmall,         ///< a cache of the drive may hold the file, or a second of its speed does
};
std::string_view to_string(Doubt doubt) noexcept;  ///< "hole", "unwritten", ...

struct Flag {
  Doubt doubt;
  bool refuses;
  std::string text;  ///< what was seen, and what to do
};
bool refused(const std::vector<Flag>& flags) noexcept;

/// Which parts of a file a drive ever held, from the filesystem.
struct ExtentFacts {
  bool known = false;  ///< the filesystem answers
  std::uint64_t hole_bytes = 0;
  std::uint64_t unwritten_bytes = 0;
  std::uint64_t encoded_bytes = 0;  ///< compressed or encrypted by the filesystem
};

struct CacheFacts {
  bool direct = false;          ///< O_DIRECT is in force
  bool residency_known = true;  ///< mincore answered
  double resident_share = 0;    ///< of the file, in the page cache, after the run
};

/// SNIA's Performance Test Specification judges five rounds: all within 20 % of their mean, and a
/// fitted line that climbs or falls by at most 10 % of it. A round is a second here.
inline constexpr std::size_t kSteadySeconds = 5;
inline constexpr double kExcursionMax = 0.20;
inline constexpr double kSlopeMax = 0.10;

struct Steadiness {
  bool judged = false;   ///< there were kSteadySeconds of it
  double excursion = 0;  ///< (largest - smallest) / mean
  double slope = 0;      ///< |rise of the fitted line over the run| / mean
  bool steady() const noexcept {
    return judged && excursion <= kExcursionMax && slope <= kSlopeMax;
  }
};
Steadiness steadiness(const std::vector<double>& per_second);

struct Evidence {
  double seconds = 0;
  std::vector<double> gb_per_second;  ///< whole seconds
  double gb_per_s = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t drive_bytes = 0;  ///< 0: unknown
  ExtentFacts extents;
  CacheFacts cache;
  SampleFacts sample;
};

/// Drives carry about a thousandth of their capacity in DRAM: a smaller file may never leave it.
std::uint64_t assumed_drive_cache_bytes(std::uint64_t drive_bytes) noexcept;

std::vector<Flag> judge(const Evidence& evidence);

}  // namespace ziggurat::measure
