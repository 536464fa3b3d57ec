// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/step_memory.h: what one rank holds at the worst instant of a step, line by
// line and tier by tier.
//
// Three instants can be the worst, and what is resident differs: the loss (logits, and activations
// of all layers), the backward of the last layer (its activations are there once more, its gradient
// is not reduced yet), and the update. Lines of different instants are never added. The formulas
// are in layout.h and activations.h; what is not a formula is in Software. Pure functions; any
// thread.
#pragma once

#include <string>
#include <vector>

#include "core/plan/strategies/training.h"

namespace ziggurat {

struct MemoryLine {
  std::string what;
  Tier tier = Tier::kDevice;
  double bytes = 0;
};

/// An instant of a step, with what is on the device then.
struct Instant {
  std::string name;
  std::vector<MemoryLine> lines;
  double bytes() const noexcept;
};

struct StepMemory {
  std::vector<Instant> instants;  ///< of the device, in the order of a step
  std::vector<MemoryLine> below;  ///< in host memory and on NVMe, of one rank, all the time
  const Instant& worst() const noexcept;
  double device_bytes() const noexcept { return worst().bytes(); }
  double bytes(Tier tier) const noexcept;  ///< of host or NVMe
};

StepMemory step_memory(const Training& training);

/// The parameters of the rank that holds most, by how they are divided.
struct RankParameters {
  double dense = 0;    ///< attention, dense MLPs, norms, embedding and head
  double experts = 0;  ///< what is left after expert ranks have taken their part
  double head = 0;     ///< the head's table, which is the embedding's too where they are tied
  double layer = 0;    ///< the largest layer
  double layer_adapters = 0;
  double adapters = 0;  ///< low-rank pairs of all copies
  double total() const noexcept { return dense + experts; }
  /// Returns how many parameters a rank updates, if only adapters are trained those.
  double updated_by_a_rank(const ParallelLayout& layout) const noexcept;
};
RankParameters rank_parameters(const Training& training);

}  // namespace ziggurat
