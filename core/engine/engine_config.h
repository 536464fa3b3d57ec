// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_config.h: the engine's settings, with their defaults and units.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/param_groups.h"
#include "core/sharding/placement.h"
#include "core/sharding/quantization.h"
#include "core/sharding/reduction.h"
#include "core/sharding/strategy.h"
#include "optimizer/state_format.h"

namespace ziggurat {

/// The optimizer, the format of its state, and its settings. The first two stay the same as long as
/// the store exists; the settings may change.
struct OptimizerConfig {
  StateKind state;  ///< by default AdamW with everything in fp32
  /// How values are rounded that are kept in bf16: the optimizer's arrays from step to step
  /// (Roundings::state), and parameters that are made from fp32 masters. The second must not be
  /// stochastic with StateFormat::kSplit. Both stay the same as long as the store exists. If they
  /// are not given, an existing store keeps its own, and a new store uses stochastic rounding for
  /// arrays and nearest for parameters. Older stores do not record their rounding; they are rounded
  /// to nearest unless this setting says otherwise.
  std::optional<Rounding> state_rounding = std::nullopt;
  std::optional<Rounding> param_rounding = std::nullopt;
  std::uint64_t rounding_seed = 0;
  float beta1 = 0.9F;  ///< SGD: the momentum
  float beta2 = 0.95F;
  float eps = 1e-8F;
  /// Decoupled in AdamW and Lion; other optimizers add it to the gradient.
  float weight_decay = 0.1F;
  /// Adagrad: the first value of the sums of squares in a new store. An existing store keeps its
  /// own.
  float initial_accumulator = 0;
};

struct StoreDirectory {
  std::string path;
  /// This directory's share of the state, in proportion to its drive's bandwidth.
  std::uint64_t weight = 1;
  /// How many bytes must be in flight to keep the drive busy, as measured; 0 if unknown. If several
  /// directories are on one drive, the largest value is used.
  std::uint64_t outstanding_bytes = 0;
};

/// Returns the most that a directory's drive has in flight, as measured; 0 if none was.
inline std::uint64_t most_outstanding_bytes(std::span<const StoreDirectory> store) {
  std::uint64_t most = 0;
  for (const StoreDirectory& directory : store) most = std::max(most, directory.outstanding_bytes);
  return most;
}

/// The stage if a config gives neither a stage nor a strategy.
inline constexpr int kDefaultZeroStage = 2;
/// A limit in elements that never has an effect, because it is more than any model has.
inline constexpr std::uint64_t kElementsMax = 1'000'000'000'000'000;

/// The default of EngineConfig::blob_bytes_max. A store of an earlier version holds 16 bytes less.
inline constexpr std::uint64_t kBlobBytesMax = 64 * 1024;

struct StateContent;

/// A parameter of which each rank has a slice, and which its trainer is brought whole.
struct WholeParam {
  std::string name;
  std::uint64_t count = 0;  ///< elements
  DType dtype = DType::kBFloat16;
  std::uint32_t unit = 0;  ///< with which it is acquired
  /// This rank's slice, a streamed parameter of that unit; none if the rank has no part of it.
  std::optional<ParamId> own = std::nullopt;
  std::uint64_t first = 0;  ///< the slice's first element in the whole
  bool trained = true;
  bool optional = false;  ///< as UnitSpec::optional
  /// Whether acquire() brings it in int8 from the other ranks, this rank's slice as if it had come
  /// so too (collectives/quantize/quantize.h). acquire_aside() brings it as it is.
  bool quantized = false;

  /// Returns the memory that it takes in its unit. It begins at a cache line, as a trainer's own
  /// does.
  std::uint64_t device_bytes() const noexcept {
    constexpr std::uint64_t kLineBytes = 64;
    return round_up(count * size_bytes(dtype), kLineBytes);
  }
};
/// Returns what the largest unit of these takes on the device.
std::uint64_t largest_unit_bytes(const std::vector<WholeParam>& wholes);

struct EngineConfig {
  /// The directories of the store. If there are several, each record lives in one of them, in
  /// proportion to the weights when the store is made. All of them must be given whenever the store
  /// is opened, in any order. If there is none, nothing is ever durable, and no state may be on
  /// NVMe. This is allowed for a LentEngine, and for an engine whose parameters are all frozen, so
  /// that it keeps no masters.
  std::vector<StoreDirectory> store;
  Placement placement;
  std::uint64_t host_budget_bytes = 0;

  /// The device memory that the trainer takes for itself; the engine leaves it free. In stage 3 it
  /// includes all accumulators, if each micro-batch runs through the whole model.
  std::uint64_t trainer_device_bytes = 0;
  /// Units that the trainer keeps acquired, or whose gradients it keeps open, while it uses other
  /// units (for example an embedding that is also the head's matrix). Apart from these the trainer
  /// uses one unit at a time. The smallest device memory that open() accepts holds all of them at
  /// once.
  std::vector<UnitId> trainer_held_units;

  /// The number of neighbouring ranks in Runtime::ranks that divide each layer among them
  /// (collectives/mesh.h). The ModelSpec is this rank's part (core/sharding/tensor_part.h). The
  /// number of ranks must be a multiple of it. All settings below concern the data-parallel ranks,
  /// which have the same part.
  int tensor_parallel = 1;
  /// Over how many data-parallel ranks each class of state is cut (core/sharding/strategy.h), and
  /// how long gathered parameters live. Stages never change bits. A single rank always has the
  /// whole state. The default is stage 2. In stage 3 with grad-op every unit stays on the device
  /// from forward to backward; if there is no room for that, the engine does not open.
  StrategyRequest strategy;
  /// Stage 3 over all ranks: parameters in int8, and gradients in 8 or 4 bits, between the ranks
  /// (qwZ and qgZ of ZeRO++), with the blocks and errors of collectives/quantize/quantize.h. Like
  /// the number of ranks, this changes what a run computes. The ranks of a node follow from
  /// ranks_per_node.
  Quantization quantization;
  /// The number of consecutive data-parallel ranks that form a node for quantized exchanges; 0 if
  /// all do. The bits of gradients depend on it.
  int ranks_per_node = 0;
  /// The type of gradients between ranks: each rank's gradient is rounded to it once, and so is
  /// their sum. The default is the model's type. Must not be used with quantized gradients.
  std::optional<DType> reduce_dtype;
  /// The number of elements of a gradient that are reduced at once, in all ranks' slices together.
  /// Three buckets of this size are set aside in host memory. Never changes bits.
  std::uint64_t reduce_bucket_elements = kReduceBucketCount;
  /// The most elements of parameters that are loaded, or in stage 3 gathered, ahead of the trainer.
  std::uint64_t prefetch_elements_max = kElementsMax;

  OptimizerConfig optimizer;
  /// Parameters whose settings differ from those of `optimizer`.
  std::vector<ParamGroup> param_groups;
  /// The largest global 2-norm of the gradient; 0 turns clipping off.
  float clip_norm = 1.0F;

  /// Whether updates start before the step is known to be good, guessing that its norm is finite
  /// and needs no clipping (core/schedule/optimizer/speculation.h). If the guess is wrong, they are
  /// undone or made again. Needs records on NVMe in two slots; without them no update starts early.
  /// Never changes bits.
  enum class Speculation : std::uint8_t {
    kAuto,    ///< if the guess has been right most of the time
    kNever,   ///< for comparison
    kAlways,  ///< for tests, and to measure the cost of wrong guesses
  };
  Speculation speculation = Speculation::kAuto;

  /// The most elements of parameters on the device beyond those acquired (prefetch and reuse).
  std::uint64_t max_live_parameters = kElementsMax;
  /// A released unit is kept if it is used again before this many elements of other units are used.
  std::uint64_t max_reuse_distance = kElementsMax;
  /// Units with at most this many elements stay on the device once they are there, and do not count
  /// as live; 0 if there are none.
  std::uint64_t param_persistence_threshold = 0;

  /// 2: every step is durable (A/B slots). 1: takes half the space, but a kill during a sweep loses
  /// the run.
  int slots = 2;
  /// The largest StepOptions::blob. A new store sets this room aside twice.
  std::uint64_t blob_bytes_max = kBlobBytesMax;
  /// Seconds of training between two checkpoints of optimizer state that is in memory. A kill loses
  /// at most this time, the step under way and the time that a checkpoint takes. The checkpoint is
  /// written during the next step's forward and backward. Rank 0's clock decides. With 0 only
  /// make_durable() stores the state. State on NVMe does not need this: it is durable at every
  /// step. Never changes bits.
  double durable_every_s = 300;
  /// The number of steps from one durable step to the next, with optimizer state on NVMe. 1 makes
  /// every step durable. A larger number writes less, because records that stay in memory are
  /// written only for the durable steps, but a kill loses the steps after the last of these. Needs
  /// two slots, because the other slot of each record is overwritten between durable steps. Never
  /// changes bits.
  std::uint64_t durable_every_steps = 1;
  /// Checkpoints that other runs can read (StepOptions::checkpoint).
  struct Checkpoint {
    /// Whether checkpoints may be requested. Host memory for four records is then set aside.
    bool saves = false;
    /// The most that a rank writes; 0 if there is no limit.
    std::uint64_t bandwidth_bytes_per_s = 0;
    /// The longest time that training waits for one save in all. Then the save is given up.
    double stall_max_s = 60;
  };
  Checkpoint checkpoint;
  enum class Resume : std::uint8_t {
    kAuto,
    kNever,  ///< an existing store is replaced
    kNew,    ///< an existing store is an error
    /// Like kAuto, but a store of another number of ranks, stage, tensor-parallel degree or state
    /// format is first converted in place. Until that is done, its directories hold both stores,
    /// and every rank must be able to read all files of the old one. The store gets this config's
    /// run_identity. The pieces of a trainer that lends need ParamSpec::whole, in the store too.
    kReshard,
  };
  Resume resume = Resume::kAuto;

  /// Facts that must not change at resume, as text chosen by the trainer ("data=<hash> seed=1
  /// batch=2 ..."). They are compared word by word.
  std::string run_identity;
  /// Facts that change the bits of forward and backward ("oneDNN 2.6.3 avx512_core_bf16"). A change
  /// at resume is reported, but not refused.
  std::string numerics_fingerprint;

  /// Called on the engine's thread with the progress of work that takes over two seconds at open
  /// (writing a new store, reading an old one).
  std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
      progress;

  /// Called on the engine's thread, with Resume::kReshard, before a store is converted. `content`
  /// is what the store says of itself. Throws to refuse the conversion.
  std::function<void(const StateContent& content)> before_reshard;

  /// For a trainer that lends slices of parameters: the number of each unit's first element in the
  /// whole parameter. Empty if the parameters are whole.
  std::vector<std::uint64_t> first_elements;
  /// For a trainer whose streamed parameters are slices: the whole ones that it is brought. All
  /// streamed parameters are slices then. The list is the same on all ranks, but for each rank's
  /// own slices. If every G consecutive ranks have all slices, as the G ranks before them, units
  /// are put together of those G ranks' slices, and the trainer gives all that have a slice the
  /// same gradients. Empty if each rank has whole parameters.
  std::vector<WholeParam> wholes;
  /// For a trainer that lends its memory: the engine counts the steps of each parameter, and takes
  /// GroupStep::steps from that, whatever the trainer gives. The counts are stored before the
  /// trainer's blob (core/checkpoint/steps_blob.h), and a store that is divided anew has them by
  /// whole tensors. With them stochastic rounding of parameters does not need every gradient in
  /// every step. Each parameter has a group of its own (ParamSpec::group).
  bool counts_steps = false;

  /// Called on the engine's thread just before a generation may become durable. It is for logs that
  /// must not lag behind the store.
  std::function<void(std::uint64_t generation)> before_seal;
};

}  // namespace ziggurat
