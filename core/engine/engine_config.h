// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_config.h: the engine's settings, with their defaults and units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/param_groups.h"
#include "core/sharding/placement.h"
#include "core/sharding/quantization.h"
#include "core/sharding/reduction.h"
#include "core/sharding/strategy.h"
#include "optimizer/state_format.h"

namespace ziggurat {

/// The optimizer and how its state is held, both for a store's life; and its settings, which may
/// change.
struct OptimizerConfig {
  StateKind state;  ///< AdamW, everything in fp32
  /// How arrays that are kept in bf16 from step to step are rounded (Roundings::state), and bf16
  /// parameters that are made of fp32 masters; the second not stochastic with StateFormat::kSplit.
  /// For a store's life: not given, they are those of the store that is there, and a new one's are
  /// stochastic and nearest. A store that does not name its own, as those before did not, is
  /// rounded to nearest unless this says otherwise.
  std::optional<Rounding> state_rounding = std::nullopt;
  std::optional<Rounding> param_rounding = std::nullopt;
  std::uint64_t rounding_seed = 0;
  float beta1 = 0.9F;  ///< SGD: the momentum
  float beta2 = 0.95F;
  float eps = 1e-8F;
  float weight_decay = 0.1F;  ///< decoupled in AdamW and Lion; the others add it to the gradient
  /// Adagrad: what a new store's sums of squares begin with. A store that is there keeps its own.
  float initial_accumulator = 0;
};

struct StoreDirectory {
  std::string path;
  std::uint64_t weight = 1;  ///< share of the state: its drive's bandwidth, in any unit
  /// Given to its drive at once, as measured to keep it busy; 0: not known. Of directories on one
  /// drive, the largest counts.
  std::uint64_t outstanding_bytes = 0;
};

/// For a config that asks for no stage and no strategy.
inline constexpr int kDefaultZeroStage = 2;
/// A limit in elements that limits nothing: more than any model has.
inline constexpr std::uint64_t kElementsMax = 1'000'000'000'000'000;

/// EngineConfig::blob_bytes_max, if not given. A store of an earlier version holds 16 bytes less.
inline constexpr std::uint64_t kBlobBytesMax = 64 * 1024;

struct StateContent;

struct EngineConfig {
  /// Where the state is, or shall be. More than one: each record lives in one of them, in
  /// proportion to the weights when the store is made; all of them, in any order, whenever it is
  /// opened. None: nothing is ever durable, and no state is on NVMe: a LentEngine; or an engine
  /// whose parameters are all frozen, which has them and no masters.
  std::vector<StoreDirectory> store;
  Placement placement;
  std::uint64_t host_budget_bytes = 0;

  /// Device memory that the trainer will take for itself; the engine leaves it free. In stage 3
  /// also what all accumulators take, where micro-batches run through the whole model.
  std::uint64_t trainer_device_bytes = 0;
  /// Units that the trainer keeps acquired, or whose gradients it keeps open, while it uses others:
  /// an embedding that is the head's matrix too. Beside them it uses one unit at a time. The least
  /// device memory that open() accepts holds these at once.
  std::vector<UnitId> trainer_held_units;

  /// Ranks that divide each layer among them: neighbours in Runtime::ranks (collectives/mesh.h);
  /// the ModelSpec is this rank's part (core/sharding/tensor_part.h). Must divide the number of
  /// ranks; all that follows is among the data-parallel ranks, which have the same part.
  int tensor_parallel = 1;
  /// Over how many data-parallel ranks each class of state is cut (core/sharding/strategy.h), and
  /// how long gathered parameters live. Stages never change bits; one rank has the whole state
  /// whatever this says. Nothing given: stage 2. Stage 3 with grad-op: every unit stays on the
  /// device from forward to backward, or the engine does not open.
  StrategyRequest strategy;
  /// Stage 3 over all ranks: parameters in int8, gradients in 8 or 4 bits between the ranks
  /// (ZeRO++'s qwZ and qgZ), in the blocks and with the errors of collectives/quantize/quantize.h.
  /// Part of what a run computes, as the number of ranks is. One node's ranks are those of
  /// ranks_per_node.
  Quantization quantization;
  /// Data-parallel ranks of a node by which quantized exchanges go: consecutive ones. What gradient
  /// bits come to depends on it. 0: all.
  int ranks_per_node = 0;
  /// The type of gradients between ranks: each rank's are rounded to it once, and so is their sum.
  /// The model's type if not given. Not with quantized ones.
  std::optional<DType> reduce_dtype;
  /// Elements of a gradient that are reduced at once, of all ranks' slices together; three such
  /// buckets are set aside in host memory. Never changes bits.
  std::uint64_t reduce_bucket_elements = kReduceBucketCount;
  /// Elements of parameters that are loaded, or in stage 3 gathered, ahead of the trainer.
  std::uint64_t prefetch_elements_max = kElementsMax;

  OptimizerConfig optimizer;
  std::vector<ParamGroup> param_groups;  ///< parameters with other settings than optimizer's
  /// Global 2-norm. 0 turns clipping off.
  float clip_norm = 1.0F;

  /// Updates that start before the step is known to be good, on the guess that its norm is finite
  /// and demands no clipping (core/schedule/optimizer/speculation.h), and are undone or made again
  /// if not. Needs records on NVMe, in two slots; elsewhere nothing starts early. Never changes
  /// bits.
  enum class Speculation : std::uint8_t {
    kAuto,    ///< while the guess has mostly been right
    kNever,   ///< to measure against
    kAlways,  ///< to measure what a wrong guess costs, and to test it
  };
  Speculation speculation = Speculation::kAuto;

  /// Elements of parameters that may be on the device beyond those acquired (prefetch and reuse).
  std::uint64_t max_live_parameters = kElementsMax;
  /// A released unit stays if it is used again within this many elements of other parameters.
  std::uint64_t max_reuse_distance = kElementsMax;
  /// Units of at most so many elements stay on the device once they are there, and do not count as
  /// live. 0: none.
  std::uint64_t param_persistence_threshold = 0;

  int slots = 2;  ///< 2: every step durable (A/B slots). 1: half the space, a kill in mid-sweep
                  ///< loses the run
  /// The longest StepOptions::blob: room that a new store sets aside, twice.
  std::uint64_t blob_bytes_max = kBlobBytesMax;
  /// Where optimizer state is in memory: seconds of training from one checkpoint of it to the next.
  /// A kill loses at most that, the step under way and the time that a checkpoint takes. It is
  /// written beside the next step's forward and backward. By rank 0's clock; 0: only make_durable()
  /// stores. State on NVMe is durable at every step without it. Never changes bits.
  double durable_every_s = 300;
  /// With optimizer state on NVMe: steps from one that becomes durable to the next. 1: every step.
  /// More write less: records that stay in memory are written for those steps alone, and a kill
  /// loses what came after the last one. Needs two slots: between them the other slot of each
  /// record is written over. Never changes bits.
  std::uint64_t durable_every_steps = 1;
  /// Checkpoints that leave (StepOptions::checkpoint).
  struct Checkpoint {
    /// Checkpoints may be asked for; host memory for four records is set aside for them.
    bool saves = false;
    std::uint64_t bandwidth_bytes_per_s = 0;  ///< that a rank writes at most; 0: no limit
    /// The longest that training waits for all of a save; then it is given up.
    double stall_max_s = 60;
  };
  Checkpoint checkpoint;
  enum class Resume : std::uint8_t {
    kAuto,
    kNever,  ///< a store that is there is replaced
    kNew,    ///< a store that is there is an error
    /// As kAuto, but a store of other ranks, another stage, tensor-parallel degree or state format
    /// is first cut anew in its place. Its directories hold both until then, and every rank must
    /// reach all its files. Its run_identity becomes this config's.
    kReshard,
  };
  Resume resume = Resume::kAuto;

  /// What may not change at resume, as text the trainer chose ("data=<hash> seed=1 batch=2 ..."):
  /// compared word by word.
  std::string run_identity;
  /// What changes forward's and backward's bits ("oneDNN 2.6.3 avx512_core_bf16"): a change is
  /// reported, not refused.
  std::string numerics_fingerprint;

  /// Progress of what takes over two seconds at open (writing a new store, reading an old one), on
  /// the engine's thread.
  std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
      progress;

  /// With Resume::kReshard: called with what the store says before it is cut anew, on the engine's
  /// thread; refuses by throwing.
  std::function<void(const StateContent& content)> before_reshard;

  /// A trainer that lends slices of parameters says which element of the whole one each unit's
  /// first is. Empty: they are whole.
  std::vector<std::uint64_t> first_elements;
  /// A trainer that lends its memory says how many steps the parameter of each unit has made, as
  /// `blob` says, which is empty where there is none yet. With it stochastic rounding of parameters
  /// does not ask for every gradient in every step.
  std::function<std::vector<std::uint64_t>(std::span<const std::byte> blob)> param_steps;

  /// Called on the engine's thread just before a generation may become durable; for logs that must
  /// not lag behind it.
  std::function<void(std::uint64_t generation)> before_seal;
};

}  // namespace ziggurat
