// SPDX-License-Identifier: Apache-2.0
// tests/faults/corruption_judge.h: reads everything of a damaged state as a user would, and judges
// what came of it: damage is named, or the bits are those that were written.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/runtime/worker_pool.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/stored_state.h"
#include "tests/faults/damage.h"
#include "tests/support/memory_files.h"

namespace ziggurat::faults {

enum class Verdict : std::uint8_t {
  kUnchanged,      ///< the bytes came out as they were: no case
  kRefused,        ///< not opened, and the file is named
  kTensorNamed,    ///< opened; what was hit is not given out: file and tensor, or chunk, are named
  kFoundByVerify,  ///< every tensor has its bits; reading everything names the file
  kFellBack,       ///< the generation before, whole, and the notes name file and generation
  kOlderCopy,      ///< the whole file of a store of one file is an older one: a whole older state
  kHarmlessSaid,   ///< the right bits, and the notes name what another copy stood in for
  kHarmless,       ///< the right bits: nothing that was damaged belongs to the state
  kFinding,        ///< anything else
};
inline constexpr int kVerdicts = 9;
const char* to_string(Verdict verdict);

/// What reading said.
struct Reading {
  std::string refusal;  ///< of open(); empty: opened
  std::uint64_t step = 0;
  std::vector<std::string> notes;
  std::map<std::string, std::string> errors;  ///< by tensor
  std::set<std::string> wrong;                ///< tensors given out with other bits
  std::vector<std::string> verify;            ///< what reading everything else says
  std::string fault;                          ///< what may never happen
};

class Judge {
 public:
  Judge() : workers_(WorkerPoolOptions{.threads = 1, .cpus = {}}), io_(reactor_) {}

  /// `files`, which are `state.now` damaged. `why`: of a finding.
  Verdict judge(const SavedState& state, Files& files, const Damage& damage, std::string& why);

 private:
  Task<> read(const SavedState& state, Reading& reading);
  Task<> read_checkpoint(const SavedState& state, Reading& reading);
  Task<> read_store(const SavedState& state, Reading& reading);
  Task<> read_tensors(StateSource& source, const SavedState& state, Reading& reading);

  Reactor reactor_;
  WorkerPool workers_;
  test::MemoryFiles io_;
};

}  // namespace ziggurat::faults
