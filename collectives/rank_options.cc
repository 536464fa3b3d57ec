// SPDX-License-Identifier: Apache-2.0
// collectives/rank_options.cc: reads what launchers leave in the environment.
#include "collectives/rank_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>
#include <span>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::array<std::string_view, 4> kCollectives{"auto", "tcp", "mpi", "nccl"};
constexpr std::array<std::string_view, 2> kReduce{"ranks", "nccl"};
constexpr int kDefaultPort = 29'400;
constexpr int kFirstJobPort = 30'000;
constexpr int kJobPorts = 20'000;
constexpr std::size_t kSecretFileMax = 4096;

int number(const char* name, const std::string& text, int most) {
  int value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size() || value < 1 ||
      value > most) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} must be a whole number from 1 to {}", name, text, most));
  }
  return value;
}

/// Returns a port for this job. Jobs may share hosts, so each gets a port of its own if its
/// launcher has numbered it.
int port_of_job(const Environment& environment) {
  const auto hashed = [](const std::string& text, std::uint64_t seed) {
    return kFirstJobPort +
           static_cast<int>(hash64(std::as_bytes(std::span(text)), seed) % kJobPorts);
  };
  if (const auto id = environment("SLURM_JOB_ID")) {
    const int job = number("SLURM_JOB_ID", *id, 2'000'000'000);
    const std::string step = environment("SLURM_STEP_ID").value_or("0");
    if (step == "0") return kFirstJobPort + job % kJobPorts;
    return hashed(step, static_cast<std::uint64_t>(job));
  }
  if (const auto name = environment("PMIX_NAMESPACE")) return hashed(*name, 0);
  return kDefaultPort;
}

/// "node[07-12,15],other3": node07.
std::string first_node(const std::string& list) {
  const std::string entry = list.substr(0, list.find_first_of("[,"));
  const std::size_t open = entry.size();
  if (open >= list.size() || list[open] != '[') return entry;
  const std::size_t end = list.find_first_of(",-]", open + 1);
  return entry + list.substr(open + 1, end == std::string::npos ? end : end - open - 1);
}

void find_rendezvous(RankOptions& options, const Environment& environment) {
  if (const auto given = environment("ZIGGURAT_RENDEZVOUS")) {
    options.rendezvous = *given;
    options.rendezvous_source = "ZIGGURAT_RENDEZVOUS";
    return;
  }
  const auto master = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (master && port) {
    options.rendezvous = fmt::format("{}:{}", *master, number("MASTER_PORT", *port, 65'534) + 1);
    options.rendezvous_source = "MASTER_ADDR, MASTER_PORT + 1";
    return;
  }
  if (options.one_host) {
    options.rendezvous = fmt::format("127.0.0.1:{}", port_of_job(environment));
    options.rendezvous_source = "all ranks are on this host";
    return;
  }
  if (const auto nodes = environment("SLURM_STEP_NODELIST"); nodes && environment("SLURM_JOB_ID")) {
    options.rendezvous = fmt::format("{}:{}", first_node(*nodes), port_of_job(environment));
    options.rendezvous_source = "SLURM_STEP_NODELIST, SLURM_JOB_ID";
  }
}

std::string secret_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw system_error(errno, "ZIGGURAT_SECRET_FILE=" + path);
  std::string secret(kSecretFileMax, '\0');
  file.read(secret.data(), static_cast<std::streamsize>(secret.size()));
  secret.resize(static_cast<std::size_t>(file.gcount()));
  while (!secret.empty() && std::isspace(static_cast<unsigned char>(secret.back()))) {
    secret.pop_back();
  }
  if (secret.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the file ZIGGURAT_SECRET_FILE={} is empty; write the job's secret into it",
                    path));
  }
  return secret;
}

/// Where `name` is among `names`.
std::size_t place_of_name(std::span<const std::string_view> names, std::string_view name,
                          std::string_view source) {
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {} is not known; give one of {}",
                                                         source, name, fmt::join(names, ", ")));
  }
  return static_cast<std::size_t>(found - names.begin());
}

}  // namespace

std::string_view to_string(Collectives collectives) noexcept {
  return kCollectives[static_cast<std::size_t>(collectives)];
}

std::string_view to_string(Reduce reduce) noexcept {
  return kReduce[static_cast<std::size_t>(reduce)];
}

Collectives collectives_of(std::string_view name, std::string_view source) {
  return static_cast<Collectives>(place_of_name(kCollectives, name, source));
}

RankOptions rank_options(const Environment& environment) {
  const WorldRank world = world_rank(environment);
  RankOptions options;
  options.rank = static_cast<int>(world.rank);
  options.world_size = static_cast<int>(world.count);
  options.source = world.source;
  if (const auto seconds = environment("ZIGGURAT_RANK_TIMEOUT")) {
    options.call_timeout =
        std::chrono::seconds(number("ZIGGURAT_RANK_TIMEOUT", *seconds, 1'000'000));
  }
  options.collectives =
      collectives_of(environment("ZIGGURAT_RANKS").value_or("auto"), "ZIGGURAT_RANKS");
  options.reduce = static_cast<Reduce>(
      place_of_name(kReduce, environment("ZIGGURAT_REDUCE").value_or("ranks"), "ZIGGURAT_REDUCE"));
  if (options.world_size == 1) return options;
  options.one_host = local_rank(environment).count == static_cast<std::size_t>(options.world_size);
  find_rendezvous(options, environment);
  if (const auto secret = environment("ZIGGURAT_SECRET")) {
    options.secret = *secret;
  } else if (const auto path = environment("ZIGGURAT_SECRET_FILE")) {
    options.secret = secret_of_file(*path);
  }
  options.without_secret = environment("ZIGGURAT_WITHOUT_SECRET").value_or("") == "1";
  return options;
}

}  // namespace ziggurat
