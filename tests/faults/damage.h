// SPDX-License-Identifier: Apache-2.0
// tests/faults/damage.h: what a drive, a copy or a hand does to saved files, drawn by a seed.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/faults/saved_states.h"

namespace ziggurat::faults {

enum class DamageKind : std::uint8_t {
  kFlip,      ///< one to eight bits
  kTear,      ///< a prefix is there, behind it lies what was there before, or zeros
  kTruncate,  ///< the file ends early
  kSwap,      ///< two blocks, or two files, lie in each other's place
  kStale,     ///< blocks, or a file, of what was there before
};
inline constexpr int kDamageKinds = 5;
const char* to_string(DamageKind kind);

struct Damage {
  DamageKind kind = DamageKind::kFlip;
  std::string what;         ///< Region::what of where it began
  bool whole_file = false;  ///< a file took another's place, or that of its past
  std::string description;
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
  };
  std::map<std::string, std::vector<Range>> touched;  ///< by path; what lies behind `end` is not
};

/// The files whose bytes, or length, are not what they were.
std::set<std::string> changed_paths(const SavedState& state, const Files& files,
                                    const Damage& damage);
/// Makes `files` what they were.
void mend(const SavedState& state, Files& files, const Damage& damage);

/// Damages `files`, which are `state.now`. The bytes may come out as they were.
Damage damage(const SavedState& state, Files& files, std::mt19937_64& random);

}  // namespace ziggurat::faults
