// SPDX-License-Identifier: Apache-2.0
// tiers/store/striped_store.h: the state store of a rank over one or several drives: each record
// lies on one of them, and together they are one store.
//
// Every stripe is a whole StateStore with superblocks of its own, and takes part in every agreement
// as if it were a rank: a generation is usable if it is whole in every stripe of every rank. So the
// rules between ranks (ARCHITECTURE.md) also hold between drives. Reactor's thread only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tiers/store/meeting.h"
#include "tiers/store/state_store.h"
#include "tiers/store/striping.h"

namespace ziggurat {

class StripedStore {
 public:
  struct Environment {
    Reactor& reactor;
    Quorum& ranks;
    std::vector<StripePlace> places;
    /// As in StoreEnvironment; called once per stripe.
    std::function<std::span<std::byte>(std::uint64_t size_bytes)> staging;
    /// Aligned memory of scratch_bytes(places.size()), needed only during create() and open().
    std::span<std::byte> scratch;
  };
  static constexpr std::uint64_t scratch_bytes(std::size_t places) noexcept {
    return places * kScratchBytesPerStripe;
  }

  /// Returns whether one of the places, in any order, has a finished stripe of this rank.
  static bool exists(std::span<const StripePlace> places, int rank);
  /// Makes a store. `spec.record_bytes` has all chunks; `spec.chunks` is empty. Errors:
  /// StateStore's, and assign_stripes()'.
  static Task<std::unique_ptr<StripedStore>> create(Environment environment, StoreSpec spec);
  /// Opens a store. The places may be in another order than at create(); their weights are not
  /// read. Errors: StateStore's; kInvalidArgument, naming a stripe that is in none of the places.
  static Task<std::unique_ptr<StripedStore>> open(Environment environment);
  /// Decides like StateStore::settle(), once over the stripes of all ranks. Chunks are those of the
  /// whole store.
  Task<bool> settle(std::vector<RecordDamage> damaged);

  /// The functions from here on do what StateStore's do, over all stripes.
  const StoreState& state() const noexcept { return state_; }
  std::size_t chunk_count() const noexcept { return homes_.size(); }
  std::uint64_t record_bytes(ChunkId chunk) const noexcept;
  std::uint64_t blob_capacity_bytes() const noexcept { return stripes_[0]->blob_capacity_bytes(); }
  std::uint64_t durable_generation() const noexcept { return state_.generation; }
  void set_durable_everywhere(std::uint64_t generation) noexcept;
  /// Throws if any stripe may not be written, because the other stripes cannot replace it.
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
  /// Does StateStore's commit(); `before_seal` runs once, before the first stripe is sealed.
  Task<> commit(std::uint64_t generation, std::span<const std::byte> blob,
                const std::function<void()>& before_seal);

  /// Tells the store that the files of each place were renamed into another directory, given by
  /// place.
  void moved(std::span<const std::string> directories);

  std::size_t stripe_count() const noexcept { return stripes_.size(); }
  /// Returns the stripe that has a chunk's record.
  std::uint32_t stripe_of(ChunkId chunk) const noexcept { return homes_[chunk].stripe; }
  /// The directory of a stripe and the bytes of its records, for reports.
  struct Share {
    std::string directory;
    std::uint64_t record_bytes = 0;
  };
  std::vector<Share> shares() const;

 private:
  static constexpr std::uint64_t kScratchBytesPerStripe = std::uint64_t{4} << 20;
  struct Home {
    std::uint32_t stripe = 0;
    ChunkId chunk = 0;  ///< number of the chunk inside the stripe
  };

  explicit StripedStore(Environment environment);
  StoreEnvironment stripe_environment(std::uint32_t stripe);
  Task<> create_stripe(std::uint32_t stripe, StoreSpec spec);
  Task<> open_stripe(std::uint32_t stripe);
  Task<> settle_stripe(std::uint32_t stripe, std::vector<RecordDamage> damaged, bool& stands);
  Task<> find_places();
  /// Starts one task per stripe and waits for all. Throws the first error that is this rank's own,
  /// rather than one that followed from another rank's.
  Task<> on_all(std::vector<Task<>> tasks);
  void adopt_state();
  void part_ways(std::uint64_t generation);
  void adopt_homes();
  StateStore& at(ChunkId chunk) const noexcept { return *stripes_[homes_[chunk].stripe]; }

  Environment environment_;
  Meeting meeting_;
  std::vector<MeetingQuorum> quorums_;  ///< by stripe; not moved once the stores refer to them
  std::vector<std::unique_ptr<StateStore>> stripes_;
  std::vector<Home> homes_;  ///< by chunk
  StoreState state_;
  std::optional<Error> broken_;  ///< a commit that only some stripes have made
};

}  // namespace ziggurat
