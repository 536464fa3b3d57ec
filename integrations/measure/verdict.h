// SPDX-License-Identifier: Apache-2.0
// integrations/measure/verdict.h: judges whether a figure can be believed. It takes facts about a
// run and returns flags. All functions are pure.
//
// Reading a hole or an unwritten extent measures memset, reading a cached file measures memcpy, and
// reading zeros measures what the drive does with zeros. Such a doubt *refuses* the figure. A
// short, unsteady or small run shows something else than the sustained speed. Such a doubt *flags*
// the figure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "integrations/measure/fill.h"

namespace ziggurat::measure {

enum class Doubt : std::uint8_t {
  kHole,          ///< parts of the file were never allocated on the drive
  kUnwritten,     ///< parts were allocated but never written, and read as zeros
  kCached,        ///< O_DIRECT is not in force, or the file is in the page cache
  kZeros,         ///< pages hold a single value
  kCompressible,  ///< pages could be shrunk by a drive
  kWrong,         ///< pages differ from what was written
  kShort,         ///< under kSteadySeconds
  kUnsteady,      ///< excursion or slope is over its bound
  kSmall,         ///< a cache of the drive, or one second of its speed, is larger
};
std::string_view to_string(Doubt doubt) noexcept;  ///< "hole", "unwritten", ...

struct Flag {
  Doubt doubt;
  bool refuses;
  std::string text;  ///< what was seen, and what to do
};
bool refused(const std::vector<Flag>& flags) noexcept;

/// What the filesystem says of the parts of a file that a drive never held.
struct ExtentFacts {
  bool known = false;  ///< the filesystem has answered
  std::uint64_t hole_bytes = 0;
  std::uint64_t unwritten_bytes = 0;
  std::uint64_t encoded_bytes = 0;  ///< bytes that the filesystem compresses or encrypts
};

struct CacheFacts {
  bool direct = false;          ///< O_DIRECT is in force
  bool residency_known = true;  ///< mincore answered
  double resident_share = 0;    ///< share of the file in the page cache after the run
};

/// SNIA's Performance Test Specification judges five rounds. They are steady if they differ by at
/// most 20 % of their mean, and a fitted line climbs or falls by at most 10 % of it. In this file a
/// round is a second.
inline constexpr std::size_t kSteadySeconds = 5;
inline constexpr double kExcursionMax = 0.20;
inline constexpr double kSlopeMax = 0.10;

struct Steadiness {
  bool judged = false;   ///< the run had kSteadySeconds or more
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

/// Returns the bytes of DRAM that a drive probably has, which is about a thousandth of its
/// capacity. A smaller file may never leave it.
std::uint64_t assumed_drive_cache_bytes(std::uint64_t drive_bytes) noexcept;

std::vector<Flag> judge(const Evidence& evidence);

}  // namespace ziggurat::measure
