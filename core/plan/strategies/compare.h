// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/compare.h: the strategies for a model on a machine, each with what it takes,
// what breaks first, how long its step is; and which one to begin with.
//
// Each strategy is tried with the least effort that fits: as it is, with selective recomputation,
// with every layer computed again in backward, with a loss in chunks too, and with the inputs of
// layers in host memory. What fits with none of them is shown with the one that comes nearest. A
// strategy fits if its worst instant, with a margin, and what lies beside the allocator fit a GPU,
// and what its ranks keep below fits host memory and drives of a node. Pure functions; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan/machines/machine.h"
#include "core/plan/strategies/rules.h"
#include "core/plan/strategies/step_memory.h"
#include "core/plan/strategies/step_time.h"
#include "core/plan/strategies/training.h"

namespace ziggurat {

/// What a prediction of device memory is raised by, for the allocator's blocks: with it no measured
/// run that is known here takes more (bench/oracles.py).
inline constexpr double kMemoryMargin = 0.06;
/// How far a prediction of device memory, before it is raised, was off at worst (bench/oracles.py).
inline constexpr double kMemoryWorstError = 0.10;
/// What lies on a GPU beside the allocator: a CUDA context with its libraries, and for each
/// communicator the buffers of 16 channels in two directions, 4 MiB each (NCCL_BUFFSIZE's default).
inline constexpr double kContextBytes = 0.6e9;
inline constexpr double kCommunicatorBytes = 16 * 2 * 4.0 * 1024 * 1024;
/// The share of host memory that a training may take: the rest is the system's and the loader's.
inline constexpr double kHostShare = 0.9;

/// The rule of the choice: the first of the list that fits, unless it takes more than so many times
/// as long as a later one; and none that offloads where one that does not fits.
inline constexpr double kNearlyAsFast = 1.15;

/// What is asked.
struct Job {
  ModelShape model;
  Machine machine;
  int gpus = 1;  ///< of all nodes
  std::int64_t sequence = 2048;
  std::int64_t micro_batch = 1;
  std::int64_t micro_batches = 1;  ///< of a GPU, if each has data of its own
  LoraTargets lora{};
  StateRecipe recipe{};
};

/// What a tier must hold beside its room.
struct TierNeed {
  Tier tier = Tier::kDevice;
  double bytes = 0;
  double room = 0;
  std::string most;  ///< the largest of what lies there
  double most_bytes = 0;
  bool fits() const noexcept { return bytes <= room; }
  std::string most_of_it() const;  ///< "most of it moments", where it is more than half
  double share() const noexcept { return room > 0 ? bytes / room : bytes > 0 ? 1e9 : 0; }
};
/// Returns "GPU memory", "host memory" or "the drives".
std::string_view name_of(Tier tier) noexcept;

/// Returns what the machine's devices are called: "GPU", or "machine" where its cores are the
/// device.
std::string_view device_word(const Machine& machine) noexcept;

struct Verdict {
  std::string name;  ///< "FSDP2 (ZeRO-3)"
  System system = System::kPyTorch;
  Training training;
  StepMemory memory;
  StepTime time;
  double device_bytes = 0;      ///< with the margin and what lies beside the allocator
  double host_bytes = 0;        ///< of a node
  double drive_bytes = 0;       ///< of a node
  std::vector<TierNeed> needs;  ///< of the tiers that it uses, the fullest first
  std::string refusal;          ///< the system's own rule; then nothing else is meant
  double margin_bytes() const noexcept { return memory.device_bytes() * kMemoryMargin; }
  double beside_bytes() const noexcept {
    return device_bytes - memory.device_bytes() - margin_bytes();
  }
  /// If it does not fit: what is too much, and by how much. Else what would be the first to be too
  /// much if the training grew, and how full that is.
  std::string breaks_first() const;
  bool fits() const noexcept { return refusal.empty() && needs.front().fits(); }
  /// Returns the memory of the device if the worst error known of a prediction would be too much
  /// for it; else null.
  const TierNeed* barely_fits() const noexcept;
  bool offloads() const noexcept {
    return training.layout.params != Tier::kDevice || training.layout.optimizer != Tier::kDevice;
  }
};

/// Returns the training that `job` is with this system and layout, without any recomputation: all
/// strategies compute the same tokens in a step.
Training training_of(const Job& job, System system, const ParallelLayout& layout);

/// Judges one way of training. `layout` says all but recomputation, which is chosen.
Verdict judge(const Job& job, std::string name, System system, const ParallelLayout& layout);

struct Comparison {
  std::vector<Verdict> verdicts;
  std::optional<std::size_t> best;  ///< none if nothing fits
  std::optional<std::size_t>
      second;                        ///< by the same rule among the rest; none if nothing else fits
  std::optional<std::size_t> asked;  ///< what the caller wants judged beside the usual ones
  std::int64_t fewest_by_states = 0;  ///< GPUs whose memory holds the state and nothing else
  std::int64_t fewest = 0;  ///< GPUs on which fully divided state works; 0 if more than 4,096, or
                            ///< than a machine without a network has
};

/// Judges the usual strategies, simplest first, and before them what is asked for as DeepSpeed
/// would make it.
Comparison compare(const Job& job, const std::optional<ParallelLayout>& asked = std::nullopt);

/// Returns whether it fits, with what and how long a step takes, in a sentence or two.
std::string answer(const Job& job, const Comparison& comparison);

/// Returns how the recommendation follows, in sentences.
std::string decision(const Job& job, const Comparison& comparison);

/// A flow between tiers, and the tokens of a GPU from which on compute hides it.
struct Hidden {
  std::string flow;
  double tokens = 0;
  bool of_pass = false;  ///< tokens of a micro-batch; if not, of a step
};
std::vector<Hidden> hidden_at(const Job& job);

}  // namespace ziggurat
