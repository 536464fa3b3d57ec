// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result.h: everything a run of the benchmark found; what the table, the JSON,
// the page and the machine profile are made from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "integrations/measure/file_facts.h"
#include "integrations/measure/fio.h"
#include "integrations/measure/measurement.h"

namespace ziggurat::measure {

/// The workloads, in the order of the table.
enum class Workload : std::uint8_t {
  kRead,
  kWrite,
  kMix,
  kSweep,
  kSweepAdam,
  kPrefetch,
  kReadBesideAdam,
  kWriteBesideAdam,
  kPrefetchBesideAdam,
};
inline constexpr std::size_t kWorkloads = 9;
std::string to_string(Workload workload);  ///< "sequential read", ...
std::string key_of(Workload workload);     ///< "read", "sweep_adam": in JSON
std::string about(Workload workload);      ///< one line of what it stands for
double write_share(Workload workload);     ///< of its transfers: 0, 0.5 or 1
/// What fio can do that comes closest; nullopt for rows that are compared with another row.
std::optional<IoMix> peer_of(Workload workload);

struct Row {
  Workload workload = Workload::kRead;
  std::vector<Measurement> rounds;
  std::vector<FioFigure> fio;  ///< one a round, or none
  std::string fio_work;        ///< "the same" or what comes closest; empty without fio

  /// The round whose GB/s is the median (the lower of two).
  const Measurement& median() const;
  double gb_per_s() const;      ///< median of the rounds
  double cpu_s_per_gb() const;  ///< median of the rounds
  std::optional<double> fio_gb_per_s() const;
  std::optional<double> fio_cpu_s_per_gb() const;
  std::optional<double> ratio() const;  ///< median of the rounds' ratios to fio
  /// Doubts about the whole row: each once, as the median round put it, or the first that had it.
  std::vector<Flag> flags() const;
};

double median_of(std::vector<double> values);

/// One cell of the tuner's search.
struct TuneCell {
  std::uint32_t block_bytes = 0;
  std::uint32_t depth = 0;
  double read_gb_per_s = 0;
  double write_gb_per_s = 0;
  double mix_gb_per_s = 0;
};
struct TuneChoice {
  std::uint32_t block_bytes = 0;
  std::uint32_t depth = 0;
  double gb_per_s = 0;
  double cpu_s_per_gb = 0;
  std::uint64_t outstanding_bytes() const noexcept {
    return static_cast<std::uint64_t>(block_bytes) * depth;
  }
};
struct TuneResult {
  std::vector<TuneCell> cells;
  TuneChoice read, write, mix;
  double seconds = 0;
};

/// Transfers in flight, of those tried.
struct DepthChoice {
  std::uint32_t best =
      0;  ///< of those within kRowSlack of the fastest, the one that costs least CPU
  std::uint32_t enough = 0;  ///< the fewest within kTuneSlack of the fastest
};

/// By what is moved; 0: not tried.
struct DepthChoices {
  std::array<DepthChoice, kIoMixes> by_mix{};
  DepthChoice& operator[](IoMix mix) noexcept { return by_mix[static_cast<std::size_t>(mix)]; }
  const DepthChoice& operator[](IoMix mix) const noexcept {
    return by_mix[static_cast<std::size_t>(mix)];
  }
};

/// Everything about one path, or about all of them at once.
struct SetResult {
  std::string label;
  std::vector<std::string> paths;
  std::vector<DriveFacts> drives;
  std::vector<std::string> engines;
  std::uint64_t file_bytes = 0;
  std::uint64_t written_bytes = 0;
  DepthChoices depth;
  std::uint32_t block_bytes = 0;
  std::string fio_how;  ///< or why there is none
  DepthChoices fio_depth;
  std::vector<double> adam_alone_gb_per_s;  ///< by round
  std::vector<Row> rows;
  std::optional<TuneResult> tune;

  const Row* find(Workload workload) const noexcept;
  /// What training keeps in flight here: enough for the optimizer's mix, or for reads where nothing
  /// was written.
  std::uint32_t training_depth() const noexcept;
};

struct ModelShape {
  std::string name;  ///< as given
  double params = 0;
  std::uint32_t units = 0;  ///< blocks
  std::uint64_t unit_bytes() const noexcept {
    return static_cast<std::uint64_t>(params * 2 / units);
  }
};

struct BenchResult {
  std::string cpu_model;
  std::string kernel;
  std::string started_at;  ///< ISO 8601, UTC
  std::size_t workers = 0;
  std::string buffer_pages;  ///< what our buffers are made of
  double seconds_per_row = 0;
  std::uint32_t rounds = 0;
  ModelShape model;
  double adam_alone_gb_per_s = 0;  ///< median; of host memory traffic, 28 B a parameter
  std::vector<std::string> degraded;
  std::vector<SetResult> sets;
  double wall_s = 0;
};

/// Seconds the optimizer's records of `model` take each step at the measured sweep: 24 B a
/// parameter. nullopt where no believable sweep was measured.
std::optional<double> optimizer_seconds(const SetResult& set, const ModelShape& model);

}  // namespace ziggurat::measure
