// SPDX-License-Identifier: Apache-2.0
// tiers/striped_store.h: the state store of a rank over one or several drives: each record on one
// of them, all of them one store.
//
// Every stripe is a whole StateStore with superblocks of its own, and takes part in every agreement
// as if it were a rank: a generation counts if it is whole in every stripe of every rank. So the
// rules that hold between ranks (ARCHITECTURE.md) hold between drives. Reactor's thread only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tiers/meeting.h"
#include "tiers/state_store.h"
#include "tiers/striping.h"

namespace ziggurat {

class StripedStore {
 public:
  struct Environment {
    Reactor& reactor;
    Quorum& ranks;
    std::vector<StripePlace> places;
    /// As in StoreEnvironment; called once per stripe.
    std::function<std::span<std::byte>(std::uint64_t size_bytes)> staging;
    /// scratch_bytes(places.size()) of aligned memory, needed only during create() and open().
    std::span<std::byte> scratch;
  };
  static constexpr std::uint64_t scratch_bytes(std::size_t places) noexcept {
    return places * kScratchBytesPerStripe;
  }

  /// A finished stripe of this rank is in one of the places, in whatever order they are given.
  static bool exists(std::span<const StripePlace> places, int rank);
  /// `spec.record_bytes` are those of all chunks; `spec.chunks` is empty. Errors: StateStore's, and
  /// assign_stripes()'.
  static Task<std::unique_ptr<StripedStore>> create(Environment environment, StoreSpec spec);
  /// The places may come in another order than at create(), their weights are not read.
  /// Errors: StateStore's; kInvalidArgument naming a stripe that is in none of the places.
  static Task<std::unique_ptr<StripedStore>> open(Environment environment);
  /// StateStore's: one verdict over the stripes of all ranks. Chunks are those of the whole store.
  Task<bool> settle(std::vector<RecordDamage> damaged);

  /// All as in StateStore, over all stripes.
  const StoreState& state() const noexcept { return state_; }
  std::size_t chunk_count() const noexcept { return homes_.size(); }
  std::uint64_t record_bytes(ChunkId chunk) const noexcept;
  std::uint64_t blob_capacity_bytes() const noexcept { return stripes_[0]->blob_capacity_bytes(); }
  std::uint64_t durable_generation() const noexcept { return state_.generation; }
  void set_durable_everywhere(std::uint64_t generation) noexcept;
  /// StateStore's, of all stripes: what one of them lacks cannot be made up for by the others.
  void require_writable() const;
  std::uint64_t durable_everywhere() const noexcept;
  std::uint64_t write_seed(ChunkId chunk, std::uint64_t generation) const noexcept;
  StateStore::Expected expected(ChunkId chunk, std::uint64_t generation) const;
  Task<> read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
              IoPriority priority = IoPriority::kDemand, std::uint64_t skipped_bytes = 0);
  Task<> write(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record,
               std::uint64_t hash, IoPriority priority = IoPriority::kDemand);
  Task<> repair(ChunkId chunk, std::span<const std::byte> record);
  void discard(std::uint64_t generation);
  Error corrupt_record(ChunkId chunk, std::uint64_t generation) const;
  void set_copies(const std::string& elsewhere);
  std::string place_of(ChunkId chunk) const;
  /// `before_seal` runs once, before the first stripe is sealed.
  Task<> commit(std::uint64_t generation, std::span<const std::byte> blob,
                const std::function<void()>& before_seal);

  /// The files of each place were renamed into another directory, by place.
  void moved(std::span<const std::string> directories);

  std::size_t stripe_count() const noexcept { return stripes_.size(); }
  /// The stripe that a chunk's record is in.
  std::uint32_t stripe_of(ChunkId chunk) const noexcept { return homes_[chunk].stripe; }
  /// Directory and bytes of records of each stripe, for reports.
  struct Share {
    std::string directory;
    std::uint64_t record_bytes = 0;
  };
  std::vector<Share> shares() const;

 private:
  static constexpr std::uint64_t kScratchBytesPerStripe = std::uint64_t{4} << 20;
  struct Home {
    std::uint32_t stripe = 0;
    ChunkId chunk = 0;  ///< its number inside the stripe
  };

  explicit StripedStore(Environment environment);
  StoreEnvironment stripe_environment(std::uint32_t stripe);
  Task<> create_stripe(std::uint32_t stripe, StoreSpec spec);
  Task<> open_stripe(std::uint32_t stripe);
  Task<> settle_stripe(std::uint32_t stripe, std::vector<RecordDamage> damaged, bool& stands);
  Task<> find_places();
  /// Starts one task per stripe, waits for all; throws what came first from this rank, not what
  /// followed from it.
  Task<> on_all(std::vector<Task<>> tasks);
  void adopt_state();
  void part_ways(std::uint64_t generation);
  void adopt_homes();
  StateStore& at(ChunkId chunk) const noexcept { return *stripes_[homes_[chunk].stripe]; }

  Environment environment_;
  Meeting meeting_;
  std::vector<MeetingQuorum> quorums_;  ///< by stripe; not moved once the stores hold them
  std::vector<std::unique_ptr<StateStore>> stripes_;
  std::vector<Home> homes_;  ///< by chunk
  StoreState state_;
  std::optional<Error> broken_;  ///< a commit that some stripes have made, and others have not
};

}  // namespace ziggurat
