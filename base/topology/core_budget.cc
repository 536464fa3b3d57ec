// SPDX-License-Identifier: Apache-2.0
// base/topology/core_budget.cc: reads what launchers say, and cuts a host's cores into even runs.
#include "base/topology/core_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/topology/limits.h"

namespace ziggurat {
namespace {

struct Variables {
  const char* rank;  // on the host
  const char* count;
  const char* world_rank;
  const char* world_count;
};
// In order: torchrun, DeepSpeed and our own `launch`; Open MPI; Intel MPI and MPICH; Slurm.
constexpr Variables kLaunchers[] = {
    {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE"},
    {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"},
    {"SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};

std::optional<std::size_t> parse_count(std::string_view text) {
  std::size_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Returns this node's entry of a list by Slurm, which counts the tasks of each node: "8", "8(x2)",
/// "8(x2),4".
std::string own_entry(const std::string& list, const Environment& environment) {
  std::size_t node = parse_count(environment("SLURM_NODEID").value_or("0")).value_or(0);
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string entry = list.substr(begin, end - begin);
    const std::size_t times = entry.find("(x");
    const std::size_t nodes =
        times == std::string::npos
            ? 1
            : parse_count(entry.substr(times + 2, entry.size() - times - 3)).value_or(1);
    if (node < nodes) return entry.substr(0, times);
    node -= nodes;
    begin = end + 1;
  }
  return list;
}

/// Reads a rank and its count; nothing unless both variables are set.
std::optional<std::pair<std::size_t, std::size_t>> read_place(const char* rank_name,
                                                              const char* count_name,
                                                              const char* where,
                                                              const Environment& environment) {
  const auto rank_text = environment(rank_name);
  const auto count_text = environment(count_name);
  if (!rank_text || !count_text) return std::nullopt;
  const auto rank = parse_count(*rank_text);
  const auto count = parse_count(own_entry(*count_text, environment));
  if (!rank || !count || *rank >= *count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} does not fit {}={}: the ranks {} must be whole numbers from 0 "
                            "to one less than their count. Give each process a number of its own, "
                            "or unset both variables to run alone",
                            rank_name, *rank_text, count_name, *count_text, where));
  }
  return std::pair(*rank, *count);
}

std::string cores(std::size_t count) {
  return fmt::format("{} physical core{}", count, count == 1 ? "" : "s");
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

LocalRank local_rank(const Environment& environment) {
  for (const Variables& names : kLaunchers) {
    const auto place = read_place(names.rank, names.count, "on this host", environment);
    if (place) return {place->first, place->second, fmt::format("{}, {}", names.rank, names.count)};
  }
  return {};
}

WorldRank world_rank(const Environment& environment) {
  for (const Variables& names : kLaunchers) {
    const auto place = read_place(names.world_rank, names.world_count, "of the job", environment);
    if (place) {
      return {place->first, place->second,
              fmt::format("{}, {}", names.world_rank, names.world_count)};
    }
  }
  return {};
}

CoreBudget core_budget(const Topology& topology, const LocalRank& rank, double quota_cpus) {
  const std::vector<int>& own = topology.physical_cores;
  CoreBudget budget;
  budget.reason = rank.count == 1 ? cores(own.size())
                                  : fmt::format("rank {} of {} on this host ({}), {}", rank.rank,
                                                rank.count, rank.source, cores(own.size()));
  std::size_t ranks = rank.count;
  std::size_t place = rank.rank;
  if (ranks > 1 && own.size() < topology.group_cores &&
      own.size() <= std::max<std::size_t>(1, topology.group_cores / ranks)) {
    budget.reason += ", bound to by the launcher";
    ranks = 1;
    place = 0;
  }
  const double allowed = quota_cpus / static_cast<double>(rank.count);
  const std::size_t begin = own.size() * place / ranks;
  const std::size_t end = own.size() * (place + 1) / ranks;
  const std::size_t share = std::max<std::size_t>(1, end - begin);
  if (allowed < static_cast<double>(share)) {
    // The quota gives time but no cores. Workers are not pinned: other processes under the same
    // quota would be pinned to the same first cores.
    budget.workers = std::max<std::size_t>(1, static_cast<std::size_t>(std::floor(allowed)));
    budget.reason += fmt::format(", a quota of {:.3g} CPUs", quota_cpus);
    return budget;
  }
  budget.workers = share;
  if (own.size() >= ranks)
    budget.cpus.assign(own.begin() + static_cast<std::ptrdiff_t>(begin),
                       own.begin() + static_cast<std::ptrdiff_t>(end));
  return budget;
}

CoreBudget core_budget(const Topology& topology) {
  return core_budget(topology, local_rank(), cgroup_cpus());
}

}  // namespace ziggurat
