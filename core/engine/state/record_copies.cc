// SPDX-License-Identifier: Apache-2.0
// core/engine/state/record_copies.cc: finds out which ranks have which records, and which rank
// gives which record to which other.
#include "core/engine/state/record_copies.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/checksum.h"

namespace ziggurat {
namespace {

/// The number of chunks that ranks compare at a time; each takes 8 bytes from every member.
constexpr std::size_t kComparedAtOnce = 4096;

/// A member's claim about a chunk: a hash of the record that its table expects, whose lowest bit
/// says whether the member has that record undamaged.
constexpr std::uint64_t kHasIt = 1;
std::uint64_t claim(const StateStore::Expected& expected, bool whole) {
  return (mix_seed(expected.seed, expected.hash) & ~kHasIt) | (whole ? kHasIt : 0);
}

/// Returns the first member that has the record which `to` lacks. `claims` has one claim from each
/// member.
std::optional<int> giver(std::span<const std::uint64_t> claims, std::size_t to) {
  const auto found = std::ranges::find(claims, claims[to] | kHasIt);
  if (found == claims.end()) return std::nullopt;
  return static_cast<int>(found - claims.begin());
}

}  // namespace

RecordCopies::RecordCopies(Communicator& ranks, std::vector<int> members)
    : members_(std::move(members)), ranks_(ranks.split(members_)) {}

Task<std::vector<RecordCopies::Repair>> RecordCopies::plan(const StripedStore& store,
                                                           std::vector<RecordDamage>& damaged) {
  const std::size_t chunks = store.chunk_count();
  const std::size_t count = members_.size();
  const auto me = static_cast<std::size_t>(ranks_->rank());
  std::vector<RecordDamage*> damage_of(chunks);
  for (RecordDamage& damage : damaged) damage_of[damage.chunk] = &damage;
  std::vector<bool> repaired(chunks);
  std::vector<Repair> repairs;
  for (std::size_t first = 0; first < chunks; first += kComparedAtOnce) {
    const std::size_t compared = std::min(kComparedAtOnce, chunks - first);
    std::vector<std::uint64_t> mine(compared);
    for (std::size_t i = 0; i < compared; ++i) {
      const auto chunk = static_cast<ChunkId>(first + i);
      const bool whole = damage_of[chunk] == nullptr;
      mine[i] = claim(store.expected(chunk, store.durable_generation()), whole);
    }
    std::vector<std::uint64_t> all(compared * count);
    co_await ranks_->all_gather(std::as_bytes(std::span(mine)),
                                std::as_writable_bytes(std::span(all)));
    std::vector<std::uint64_t> claims(count);
    for (std::size_t i = 0; i < compared; ++i) {
      for (std::size_t member = 0; member < count; ++member)
        claims[member] = all[member * compared + i];
      for (std::size_t to = 0; to < count; ++to) {
        if ((claims[to] & kHasIt) != 0) continue;
        const auto from = giver(claims, to);
        if (!from) continue;
        Repair repair{.damage = {.chunk = static_cast<ChunkId>(first + i), .fault = {}},
                      .from = *from,
                      .to = static_cast<int>(to)};
        if (to == me) {
          repair.damage = *damage_of[repair.damage.chunk];
          repaired[repair.damage.chunk] = true;
        }
        repairs.push_back(std::move(repair));
      }
    }
  }
  std::erase_if(damaged, [&](const RecordDamage& damage) { return repaired[damage.chunk]; });
  co_return repairs;
}

}  // namespace ziggurat
