// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_judge.h: what is in a folder of checkpoints after whatever happened to
// whoever wrote it, and whether it keeps what was promised.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/core/checkpoint_rig.h"

namespace ziggurat::testing {

/// What each step's state is, by the run in which nothing went wrong.
using States = std::map<std::uint64_t, TensorBytes>;

struct FoundCheckpoints {
  std::set<std::uint64_t> whole;       ///< with every byte as it should be
  std::vector<std::string> leftovers;  ///< of what was cut off: nobody takes it for a checkpoint
  std::vector<std::string> problems;   ///< a checkpoint that is not whole, or a hint to none
};
/// Looks at everything in `folder`; none of it is there where there is no folder.
FoundCheckpoints look_at_checkpoints(const std::string& folder, const States& expected);

}  // namespace ziggurat::testing
