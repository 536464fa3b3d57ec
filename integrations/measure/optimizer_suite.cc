// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_suite.cc: cuts memory into records, of which each thread gets one
// piece.
#include "integrations/measure/optimizer_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>

#include "base/bytes.h"
#include "base/error.h"
#include "base/numerics/simd_target.h"
#include "base/topology/limits.h"
#include "core/engine/runtime.h"
#include "integrations/measure/adam_load.h"
#include "integrations/measure/optimizer_ceiling.h"
#include "optimizer/update.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::measure {
namespace {

constexpr std::uint64_t kTilesPerRecord = 32;  // as in the engine: 6 MiB of fp32 AdamW
constexpr std::uint64_t kRecordElements = kTilesPerRecord * kTileElements;
constexpr std::uint64_t kParamsDefault = 100'000'000;
constexpr std::size_t kHalfBytes = sizeof(bf16);

/// Returns the bytes of a record with its gradient and its parameter.
std::uint64_t item_bytes(OptimizerKind kind, StateFormat format) {
  return record_format(kind, format).record_bytes(kTilesPerRecord) +
         2 * kHalfBytes * kRecordElements;
}

std::uint64_t choose_params(const OptimizerBenchOptions& options) {
  std::uint64_t largest = 0;
  for (const StateFormat format : options.formats)
    largest = std::max(largest, item_bytes(options.optimizer, format));
  const std::uint64_t free_bytes = free_memory_bytes();
  const std::uint64_t fit = free_bytes / 2 / largest * kRecordElements;
  const std::uint64_t wanted = options.params == 0 ? std::min(kParamsDefault, fit) : options.params;
  const std::uint64_t records = (wanted + kRecordElements - 1) / kRecordElements;
  if (records * largest > free_bytes || records == 0) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("the state of {} parameters takes {} of memory, but only {} are free; at most "
                    "{} parameters fit",
                    wanted, format_bytes(records * largest), format_bytes(free_bytes), 2 * fit));
  }
  return records * kRecordElements;
}

/// Returns a step with the rounding that a new store has.
OptimizerStep step_of(OptimizerKind kind, StateFormat format) {
  const Rounding of_state = rounds_state(format) ? Rounding::kStochastic : Rounding::kNearest;
  return OptimizerStep::make({.kind = kind,
                              .rounding = {.state = of_state},
                              .learning_rate = 1e-4F,
                              .beta1 = 0.9F,
                              .beta2 = 0.95F,
                              .eps = 1e-8F,
                              .weight_decay = 0.1F,
                              .grad_scale = 1.0F,
                              .t = 1000});
}

/// Holds all records one after the other, and then the gradient and the parameter of each record.
class Memory {
 public:
  Memory(const OptimizerBenchOptions& options, StateFormat format, std::uint64_t params)
      : kind_(options.optimizer),
        hashed_(options.hashed),
        format_(format),
        shape_(record_format(kind_, format)),
        records_(params / kRecordElements),
        record_bytes_(shape_.record_bytes(kTilesPerRecord)),
        mapping_({.owner = "optimizer benchmark",
                  .size_bytes = records_ * (record_bytes_ + 2 * half_bytes())}) {}

  std::size_t records() const { return records_; }
  const std::string& page_kind() const { return mapping_.page_kind(); }

  /// Makes a state that is some steps old, with values as in training. Returns its last hashes.
  UpdateHashes fill(std::size_t index) {
    std::vector<float> masters(kRecordElements);
    std::minstd_rand random(static_cast<std::uint32_t>(index + 1));
    std::uniform_real_distribution<float> values(-0.05F, 0.05F);
    for (float& value : masters) value = values(random);
    write_record(kind_, format_, masters, record(index));
    make_gradients(grad(index), index);
    update(index);
    return update(index);
  }
  UpdateHashes update(std::size_t index) {
    const RecordView view{
        .format = format_,
        .record = record(index),
        .grad = as_typed(std::span<const bf16>(grad(index))),
        .param = holds_param(format_) ? TypedSpan<std::byte>{} : as_typed(param(index))};
    const DecayRun whole{0, kRecordElements, true};
    const UpdateHashing hashing{.verify = true, .seed_before = 1, .seed_after = 2};
    return update_record(step_of(kind_, format_), view, {&whole, 1}, hashed_ ? &hashing : nullptr);
  }
  void run_ceiling(std::size_t index, const CeilingWalk& walk) {
    CeilingShape shape;
    std::size_t streams = 0;
    const auto segments = shape_.segments();
    for (std::size_t i = 0; i < segments.size() && streams < shape.in_place.size(); ++i) {
      const std::size_t element_bytes = segments[i].tile_bytes / kTileElements;
      if (element_bytes == 0) continue;  // scales are under a hundredth of the traffic
      shape.in_place[streams++] = {record(index).data() + shape_.offset(i, kTilesPerRecord),
                                   element_bytes};
    }
    shape.read = {reinterpret_cast<std::byte*>(grad(index).data()), kHalfBytes};
    if (!holds_param(format_))
      shape.written = {reinterpret_cast<std::byte*>(param(index).data()), kHalfBytes};
    measure::run_ceiling(shape, walk, kRecordElements);
  }
  double ceiling_bytes() const {
    double bytes = static_cast<double>(beside_bytes());
    for (const auto& segment : shape_.segments())
      bytes += 2.0 * static_cast<double>(segment.tile_bytes / kTileElements);
    return bytes;
  }
  double moved_bytes() const {
    return 2.0 * static_cast<double>(shape_.tile_bytes()) / kTileElements +
           static_cast<double>(beside_bytes());
  }
  double record_bytes_per_param() const {
    return static_cast<double>(shape_.tile_bytes()) / kTileElements;
  }
  std::span<const std::byte> everything() const { return mapping_.bytes(); }

 private:
  static constexpr std::uint64_t half_bytes() { return kHalfBytes * kRecordElements; }
  /// Returns the bytes per parameter of the gradient, which is read, and of the parameter, which is
  /// written if it has an array of its own.
  std::size_t beside_bytes() const { return (holds_param(format_) ? 1 : 2) * kHalfBytes; }

  std::span<std::byte> record(std::size_t index) const {
    return mapping_.bytes().subspan(index * record_bytes_, record_bytes_);
  }
  bf16* halves(std::size_t index) const {
    std::byte* const all = mapping_.bytes().data() + records_ * record_bytes_;
    return reinterpret_cast<bf16*>(all + index * 2 * half_bytes());
  }
  std::span<bf16> grad(std::size_t index) const { return {halves(index), kRecordElements}; }
  std::span<bf16> param(std::size_t index) const {
    return {halves(index) + kRecordElements, kRecordElements};
  }

  OptimizerKind kind_;
  bool hashed_;
  StateFormat format_;
  RecordFormat shape_;
  std::size_t records_;
  std::uint64_t record_bytes_;
  HostMapping mapping_;
};

/// Forces a SIMD target, and restores the former choice when it is destroyed.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::string_view name) : before_(simd_target()) { force_simd_target(name); }
  ~ForcedTarget() { force_simd_target(before_); }
  ForcedTarget(const ForcedTarget&) = delete;

 private:
  std::string before_;
};

void require_specification(const OptimizerBenchOptions& options, StateFormat format) {
  const std::string target(simd_target());
  Memory got(options, format, kRecordElements), want(options, format, kRecordElements);
  const UpdateHashes hashes = got.fill(0);
  const auto wanted = [&] {
    const ForcedTarget scalar("scalar");
    return want.fill(0);
  }();
  if (hashes.before != wanted.before || hashes.after != wanted.after ||
      !std::ranges::equal(got.everything(), want.everything())) {
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("{} in {} on {} does not give the specification's bits, so it is not measured",
                    to_string(options.optimizer), to_string(format), target));
  }
}

/// Returns the seconds that `threads` threads take for `action` on all records. Each thread takes
/// an equal piece of them.
double seconds_of(std::size_t threads, std::size_t records, WorkerPool& workers,
                  const std::function<void(std::size_t)>& action) {
  const auto start = std::chrono::steady_clock::now();
  workers.for_each(threads, [&](std::size_t thread) {
    const std::size_t end = records * (thread + 1) / threads;
    for (std::size_t i = records * thread / threads; i < end; ++i) action(i);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

OptimizerRow measure(Memory& memory, std::size_t threads, std::uint32_t rounds,
                     WorkerPool& workers) {
  OptimizerRow row;
  row.target = simd_target();
  row.threads = threads;
  row.record_bytes = memory.record_bytes_per_param();
  row.moved_bytes = memory.moved_bytes();
  const std::function<void(std::size_t)> kernel = [&](std::size_t i) { memory.update(i); };
  // The ceiling leaves out the scales, so their bytes are charged at the ceiling's speed.
  const double charge = memory.moved_bytes() / memory.ceiling_bytes();
  const auto ceiling_seconds = [&] {
    double best = std::numeric_limits<double>::max();
    for (const CeilingWalk& walk : kCeilingWalks) {
      const std::function<void(std::size_t)> pass = [&](std::size_t i) {
        memory.run_ceiling(i, walk);
      };
      best = std::min(best, charge * seconds_of(threads, memory.records(), workers, pass));
    }
    return best;
  };
  seconds_of(threads, memory.records(), workers, kernel);
  for (std::uint32_t round = 0; round < rounds; ++round) {
    row.seconds.push_back(seconds_of(threads, memory.records(), workers, kernel));
    row.ceiling_seconds.push_back(ceiling_seconds());
  }
  return row;
}

}  // namespace

double OptimizerRow::params_per_s(std::uint64_t params) const {
  return static_cast<double>(params) / median(seconds);
}
double OptimizerRow::gb_per_s(std::uint64_t params) const {
  return moved_bytes * params_per_s(params) / 1e9;
}
double OptimizerRow::ceiling_gb_per_s(std::uint64_t params) const {
  return moved_bytes * static_cast<double>(params) / std::ranges::min(ceiling_seconds) / 1e9;
}
double OptimizerRow::share() const { return std::ranges::min(ceiling_seconds) / median(seconds); }
double OptimizerRow::best_share() const {
  return std::ranges::min(ceiling_seconds) / std::ranges::min(seconds);
}

OptimizerBenchResult run_optimizer_bench(const OptimizerBenchOptions& options,
                                         const Progress& progress) {
  OptimizerBenchResult result;
  result.params = choose_params(options);
  result.optimizer = options.optimizer;
  result.rounds = options.rounds;
  std::vector<std::string> targets = options.targets;
  if (targets.empty()) targets.emplace_back(simd_target());
  const auto runtime = Runtime::create({.threads = options.threads, .trace_path = {}});
  WorkerPool& workers = *runtime->workers;
  for (const StateFormat format : options.formats) {
    for (const std::string& target : targets) {
      const ForcedTarget forced(target);
      require_specification(options, format);
    }
    progress.live(fmt::format("making {} parameters in {}", result.params, to_string(format)));
    Memory memory(options, format, result.params);
    result.page_kind = memory.page_kind();
    workers.for_each(memory.records(), [&](std::size_t i) { memory.fill(i); });
    for (const std::string& target : targets) {
      const ForcedTarget forced(target);
      for (std::size_t threads = 1; threads <= workers.threads(); ++threads) {
        progress.live(fmt::format("{} on {}, {} thread{}", to_string(format), target, threads,
                                  threads == 1 ? "" : "s"));
        OptimizerRow row = measure(memory, threads, options.rounds, workers);
        row.format = format;
        result.rows.push_back(std::move(row));
      }
    }
  }
  return result;
}

}  // namespace ziggurat::measure
