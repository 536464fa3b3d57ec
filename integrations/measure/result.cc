// SPDX-License-Identifier: Apache-2.0
// integrations/measure/result.cc: names the workloads, and calculates medians and what follows from
// a row.
#include "integrations/measure/result.h"

#include <algorithm>

#include "base/check.h"

namespace ziggurat::measure {
namespace {

constexpr double kStepBytes = 24;  // per parameter: 12 are read and 12 are written

template <class Get>
double median_over(const std::vector<Measurement>& rounds, const Get& get) {
  std::vector<double> values;
  for (const Measurement& round : rounds) values.push_back(get(round));
  return median_of(values);
}

}  // namespace

std::string to_string(Workload workload) {
  switch (workload) {
    case Workload::kRead: return "read";
    case Workload::kWrite: return "write";
    case Workload::kMix: return "50/50 mix";
    case Workload::kSweep: return "sweep";
    case Workload::kSweepAdam: return "sweep + Adam";
    case Workload::kPrefetch: return "prefetch";
    case Workload::kReadBesideAdam: return "read | Adam";
    case Workload::kWriteBesideAdam: return "write | Adam";
    case Workload::kPrefetchBesideAdam: return "prefetch | Adam";
  }
  return "?";
}

std::string key_of(Workload workload) {
  switch (workload) {
    case Workload::kRead: return "read";
    case Workload::kWrite: return "write";
    case Workload::kMix: return "mix";
    case Workload::kSweep: return "sweep";
    case Workload::kSweepAdam: return "sweep_adam";
    case Workload::kPrefetch: return "prefetch";
    case Workload::kReadBesideAdam: return "read_beside_adam";
    case Workload::kWriteBesideAdam: return "write_beside_adam";
    case Workload::kPrefetchBesideAdam: return "prefetch_beside_adam";
  }
  return "?";
}

double write_share(Workload workload) {
  switch (workload) {
    case Workload::kWrite:
    case Workload::kWriteBesideAdam: return 1;
    case Workload::kMix:
    case Workload::kSweep:
    case Workload::kSweepAdam: return 0.5;
    default: return 0;
  }
}

std::optional<IoMix> peer_of(Workload workload) {
  switch (workload) {
    case Workload::kRead: return IoMix::kRead;
    case Workload::kWrite: return IoMix::kWrite;
    case Workload::kMix:
    case Workload::kSweep: return IoMix::kMix;
    default: return std::nullopt;
  }
}

std::string about(Workload workload) {
  switch (workload) {
    case Workload::kRead: return "parameters streamed in, sequentially";
    case Workload::kWrite: return "a checkpoint's burst, sequentially";
    case Workload::kMix:
      return "half of the transfers read and half of them write, both sequentially";
    case Workload::kSweep:
      return "optimizer records are read from one slot and written to the other, without compute";
    case Workload::kSweepAdam:
      return "optimizer records are also updated by AdamW, with both checksums, on the workers";
    case Workload::kPrefetch:
      return "units of the model are read, each of which must be there in time";
    case Workload::kReadBesideAdam:
      return "the drive is read while AdamW keeps all workers busy in memory";
    case Workload::kWriteBesideAdam:
      return "the drive is written while AdamW keeps all workers busy in memory";
    case Workload::kPrefetchBesideAdam:
      return "units with deadlines are read while AdamW keeps all workers busy in memory";
  }
  return "?";
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

const Measurement& Row::median() const {
  ZIGGURAT_CHECK(!rounds.empty(), "a row without rounds");
  std::vector<const Measurement*> order;
  for (const Measurement& round : rounds) order.push_back(&round);
  std::sort(order.begin(), order.end(), [](const Measurement* a, const Measurement* b) {
    return a->gb_per_s() < b->gb_per_s();
  });
  return *order[(order.size() - 1) / 2];
}

double Row::gb_per_s() const {
  return median_over(rounds, [](const Measurement& m) { return m.gb_per_s(); });
}

double Row::cpu_s_per_gb() const {
  return median_over(rounds, [](const Measurement& m) { return m.cpu_s_per_gb(); });
}

std::optional<double> Row::fio_gb_per_s() const {
  if (fio.empty()) return std::nullopt;
  std::vector<double> values;
  for (const FioFigure& figure : fio) values.push_back(figure.gb_per_s);
  return median_of(values);
}

std::optional<double> Row::fio_cpu_s_per_gb() const {
  if (fio.empty()) return std::nullopt;
  std::vector<double> values;
  for (const FioFigure& figure : fio) values.push_back(figure.cpu_s_per_gb);
  return median_of(values);
}

std::optional<double> Row::ratio() const {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(fio.size(), rounds.size()); ++i)
    ratios.push_back(rounds[i].gb_per_s() / fio[i].gb_per_s);
  if (ratios.empty()) return std::nullopt;
  return median_of(ratios);
}

std::vector<Flag> Row::flags() const {
  std::vector<Flag> all = median().flags;
  for (const Measurement& round : rounds) {
    for (const Flag& flag : round.flags) {
      const bool known = std::any_of(all.begin(), all.end(),
                                     [&](const Flag& other) { return other.doubt == flag.doubt; });
      if (!known) all.push_back(flag);
    }
  }
  return all;
}

const Row* SetResult::find(Workload workload) const noexcept {
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const Row& row) { return row.workload == workload; });
  return found == rows.end() || found->rounds.empty() ? nullptr : &*found;
}

std::uint32_t SetResult::training_depth() const noexcept {
  const std::uint32_t mix = depth[IoMix::kMix].enough;
  return mix > 0 ? mix : depth[IoMix::kRead].enough;
}

std::optional<double> optimizer_seconds(const SetResult& set, const ModelShape& model) {
  const Row* const sweep = set.find(Workload::kSweepAdam);
  if (sweep == nullptr || refused(sweep->flags()) || sweep->gb_per_s() <= 0) return std::nullopt;
  return model.params * kStepBytes / (sweep->gb_per_s() * 1e9);
}

}  // namespace ziggurat::measure
