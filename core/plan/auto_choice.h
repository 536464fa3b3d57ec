// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_choice.h: what `auto` takes: among the ways to place a run's state the one whose
// step moves for the shortest time, and for each part of it the memory that it has use for.
//
// Both front ends ask it: `ziggurat train` through auto_run.h, and a trainer that lends its memory,
// as the Python package does, through auto_units.h. These say what each way takes; nothing but
// their numbers decides, so ranks that ask with the same numbers get the same answer. Compute takes
// as long whatever is chosen, so only what is moved counts. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/plan/machine_profile.h"
#include "core/sharding/placement.h"

namespace ziggurat {

/// One part of a run's memory: it works with the least, and more saves bytes that a step moves.
struct AutoPart {
  std::uint64_t least_bytes = 0;
  std::uint64_t most_bytes = 0;  ///< beyond which more has no use
  /// What a step moves less over the drive, and by copies in memory, with the most. Between the
  /// two it saves in proportion.
  std::uint64_t drive_saved_bytes = 0;
  std::uint64_t copies_saved_bytes = 0;
};

/// One way to place the state, and what it takes on one rank.
struct AutoWay {
  Placement placement{};
  AutoPart units{};                ///< memory where units are computed with
  AutoPart host{};                 ///< the engine's host memory
  std::uint64_t fixed_bytes = 0;   ///< memory beside both
  std::uint64_t drive_bytes = 0;   ///< a step reads and writes there with the least of both parts
  std::uint64_t copied_bytes = 0;  ///< a step brings to units from host memory, or back
};

/// The memory that a run may take.
struct AutoRoom {
  std::uint64_t free_bytes = 0;   ///< of the machine; among ranks the least that one of them found
  std::uint64_t node_ranks = 1;   ///< ranks on the machine, which each take as much
  double share = 1;               ///< of what is free
  std::uint64_t grain_bytes = 1;  ///< what is not given by hand is a multiple of it
  /// What is given by hand; the choice gives the rest.
  std::optional<std::uint64_t> units_bytes{};
  std::optional<std::uint64_t> host_bytes{};

  /// Returns what one rank may take.
  std::uint64_t rank_bytes() const noexcept;
  /// Returns what the part takes before it gets more than its least.
  std::uint64_t first_bytes(const AutoPart& part,
                            const std::optional<std::uint64_t>& by_hand) const noexcept;
};

/// How fast bytes move. The defaults are those of a usual NVMe drive and of one core's copies.
struct MovingSpeeds {
  double drive_bytes_per_s = 2e9;
  double copy_bytes_per_s = 8e9;
  bool drive_measured = false;

  /// Takes what `profile` has of copies, and the drive's speed, which is 0 if it was not measured.
  static MovingSpeeds of(const MachineProfile& profile, double drive_bytes_per_s);
};

struct AutoChoice {
  Placement placement{};
  std::uint64_t units_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t memory_bytes = 0;  ///< both, and what lies beside them
  std::uint64_t drive_bytes = 0;   ///< a step reads and writes
  std::uint64_t copied_bytes = 0;
  double drive_s = 0;   ///< how long the drive works in a step
  double moving_s = 0;  ///< the drive and the copies, by which ways are compared
};

/// Returns the choice; of equals the first of `ways`. None if no way fits into the room.
std::optional<AutoChoice> choose_auto(std::span<const AutoWay> ways, const AutoRoom& room,
                                      const MovingSpeeds& speeds);

/// Returns the least that one of `ways` takes on a rank, with what is given by hand.
std::uint64_t least_bytes(std::span<const AutoWay> ways, const AutoRoom& room);

/// Says in one line what was chosen and why: "512 MiB of the 1.50 GiB that ...".
std::string reason(const AutoChoice& choice, const AutoRoom& room, const MovingSpeeds& speeds);

/// Throws kResourceExhausted, saying the least that works and what may be taken.
[[noreturn]] void refuse_auto(std::span<const AutoWay> ways, const AutoRoom& room);

}  // namespace ziggurat
