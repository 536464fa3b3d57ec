// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result.h: everything that a run of the benchmark found. The table, the JSON,
// the page and the machine profile are made from it.
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
std::string to_string(Workload workload);  ///< "read", "sweep + Adam": in the table
std::string key_of(Workload workload);     ///< "read", "sweep_adam": in JSON
std::string about(Workload workload);      ///< one line on what it stands for
double write_share(Workload workload);     ///< share of writes in its transfers: 0, 0.5 or 1
/// Returns the work of fio that comes closest; none for rows that are compared with another row.
std::optional<IoMix> peer_of(Workload workload);

struct Row {
  Workload workload = Workload::kRead;
  std::vector<Measurement> rounds;
  std::vector<FioFigure> fio;  ///< one for each round, or none
  std::string fio_work;        ///< what fio did, such as "the same work"; empty without fio

  /// Returns the round whose GB/s is the median (the lower one of two).
  const Measurement& median() const;
  double gb_per_s() const;      ///< returns the median of the rounds
  double cpu_s_per_gb() const;  ///< returns the median of the rounds
  std::optional<double> fio_gb_per_s() const;
  std::optional<double> fio_cpu_s_per_gb() const;
  std::optional<double> ratio() const;  ///< returns the median of the rounds' ratios to fio
  /// Returns the doubts about the whole row. Each has the text of the median round, or of the first
  /// round that had it.
  std::vector<Flag> flags() const;
};

double median_of(std::vector<double> values);

/// The speeds of one block size and depth in the search of the tuner.
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

/// Numbers of transfers in flight, chosen from those that were tried.
struct DepthChoice {
  /// The one that costs least CPU among those within kRowSlack of the fastest.
  std::uint32_t best = 0;
  std::uint32_t enough = 0;  ///< the fewest transfers within kTuneSlack of the fastest
};

/// The choices for reads, for writes and for their mix; 0 if none was tried.
struct DepthChoices {
  std::array<DepthChoice, kIoMixes> by_mix{};
  DepthChoice& operator[](IoMix mix) noexcept { return by_mix[static_cast<std::size_t>(mix)]; }
  const DepthChoice& operator[](IoMix mix) const noexcept {
    return by_mix[static_cast<std::size_t>(mix)];
  }
};

/// The results of one path, or of all paths at once.
struct SetResult {
  std::string label;
  std::vector<std::string> paths;
  std::vector<DriveFacts> drives;
  std::vector<std::string> engines;
  std::uint64_t file_bytes = 0;
  std::uint64_t written_bytes = 0;
  DepthChoices depth;
  std::uint32_t block_bytes = 0;
  std::string fio_how;  ///< how fio ran, or why it did not
  DepthChoices fio_depth;
  std::vector<double> adam_alone_gb_per_s;  ///< by round
  std::vector<Row> rows;
  std::optional<TuneResult> tune;

  const Row* find(Workload workload) const noexcept;
  /// Returns the number of transfers that training keeps in flight: enough for the optimizer's mix,
  /// or for reads if nothing was written.
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
  std::string buffer_pages;  ///< the kind of pages that our buffers have
  double seconds_per_row = 0;
  std::uint32_t rounds = 0;
  ModelShape model;
  double adam_alone_gb_per_s = 0;  ///< median; counts host memory traffic, 28 bytes per parameter
  std::vector<std::string> degraded;
  std::vector<SetResult> sets;
  double wall_s = 0;
};

/// Returns the seconds that the optimizer's records of `model` take in each step at the speed of
/// the measured sweep, with 24 bytes per parameter. None if no believable sweep was measured.
std::optional<double> optimizer_seconds(const SetResult& set, const ModelShape& model);

}  // namespace ziggurat::measure
