// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/steps_blob.cc: writes and reads what stands before the trainer's blob.
#include "core/checkpoint/steps_blob.h"

#include <fmt/format.h>

#include <cstring>
#include <unordered_map>

#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kStoreRanksMax = 100'000;

/// Stands before the counts of steps and the trainer's blob.
struct StepsHeader {
  static constexpr std::uint64_t kMagic = 0x3173706574535a49;
  static constexpr std::uint64_t kMagicOfRanks = 0x3273706574535a49;  ///< `of_ranks` follows
  std::uint64_t magic = kMagic;
  std::uint64_t params = 0;
};

}  // namespace

std::uint64_t StepsBlob::head_bytes(std::size_t params) {
  return sizeof(StepsHeader) + sizeof(std::uint64_t) + params * sizeof(std::uint64_t);
}

StepsBlob StepsBlob::read(std::span<const std::byte> blob, std::size_t params) {
  StepsBlob its{.steps = std::vector<std::uint64_t>(params), .of_ranks = 0, .own = {}};
  if (blob.empty()) return its;
  StepsHeader header;
  if (blob.size() >= sizeof(header)) std::memcpy(&header, blob.data(), sizeof(header));
  const bool of_ranks = header.magic == StepsHeader::kMagicOfRanks;
  const std::uint64_t counts_bytes = params * sizeof(std::uint64_t);
  const std::uint64_t counts_at = sizeof(header) + (of_ranks ? sizeof(its.of_ranks) : 0);
  if (blob.size() < counts_at + counts_bytes || header.params != params ||
      (!of_ranks && header.magic != StepsHeader::kMagic)) {
    throw Error(ErrorCode::kDataLoss,
                "the store's blob does not begin with its parameters' counts of steps");
  }
  if (of_ranks) std::memcpy(&its.of_ranks, blob.data() + sizeof(header), sizeof(its.of_ranks));
  if (its.of_ranks > kStoreRanksMax)
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("the store's blob is of {} ranks, but no store has so many", its.of_ranks));
  if (params > 0) std::memcpy(its.steps.data(), blob.data() + counts_at, counts_bytes);
  its.own = blob.subspan(counts_at + counts_bytes);
  return its;
}

std::vector<std::byte> StepsBlob::written() const {
  const StepsHeader header{.magic = of_ranks > 0 ? StepsHeader::kMagicOfRanks : StepsHeader::kMagic,
                           .params = steps.size()};
  std::vector<std::byte> all(sizeof(header) + (of_ranks > 0 ? sizeof(of_ranks) : 0) +
                             steps.size() * sizeof(std::uint64_t) + own.size());
  std::byte* at = all.data();
  const auto append = [&](const void* bytes, std::size_t size_bytes) {
    if (size_bytes > 0) std::memcpy(at, bytes, size_bytes);
    at += size_bytes;
  };
  append(&header, sizeof(header));
  if (of_ranks > 0) append(&of_ranks, sizeof(of_ranks));
  append(steps.data(), steps.size() * sizeof(std::uint64_t));
  append(own.data(), own.size());
  return all;
}

std::vector<std::byte> joined_blob(std::span<const StoredRank> ranks,
                                   const std::vector<std::string>& wholes) {
  std::unordered_map<std::string, std::uint64_t> counts;
  StepsBlob joined;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<std::string>& names = ranks[rank].wholes;
    const StepsBlob its = StepsBlob::read(ranks[rank].blob, names.size());
    for (std::size_t p = 0; p < names.size(); ++p) {
      if (names[p].empty()) continue;
      const auto [known, is_new] = counts.emplace(names[p], its.steps[p]);
      if (is_new || known->second == its.steps[p]) continue;
      throw Error(ErrorCode::kUnimplemented,
                  fmt::format("`resume=reshard`: the store's ranks have made {} and {} steps with "
                              "their parts of '{}', so they cannot be put together: open the store "
                              "with the ranks that made it",
                              known->second, its.steps[p], names[p]));
    }
    if (rank > 0) continue;
    joined.own = its.own;
    joined.of_ranks = its.of_ranks > 0 ? its.of_ranks : ranks.size();
  }
  for (const std::string& name : wholes) {
    const auto found = counts.find(name);
    joined.steps.push_back(found == counts.end() ? 0 : found->second);
  }
  return joined.written();
}

}  // namespace ziggurat
