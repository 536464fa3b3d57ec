// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_choice.cc: divides the room for each way, and compares how long they move.
#include "core/plan/auto_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr double kBytesPerGb = 1e9;
/// Ways whose times differ by less are equal: sums of doubles differ by that.
constexpr double kEqual = 1e-9;

double seconds(std::uint64_t drive_bytes, std::uint64_t copied_bytes, const MovingSpeeds& speeds) {
  return static_cast<double>(drive_bytes) / speeds.drive_bytes_per_s +
         static_cast<double>(copied_bytes) / speeds.copy_bytes_per_s;
}

/// Returns how many seconds of a step a byte more saves.
double worth(const AutoPart& part, const MovingSpeeds& speeds) {
  if (part.most_bytes <= part.least_bytes) return 0;
  return seconds(part.drive_saved_bytes, part.copies_saved_bytes, speeds) /
         static_cast<double>(part.most_bytes - part.least_bytes);
}

/// Returns the share of what the part can save that `size_bytes` of memory save.
double saved_share(const AutoPart& part, std::uint64_t size_bytes) {
  if (size_bytes >= part.most_bytes) return 1;
  if (size_bytes <= part.least_bytes) return 0;
  return static_cast<double>(size_bytes - part.least_bytes) /
         static_cast<double>(part.most_bytes - part.least_bytes);
}

std::uint64_t part_of(std::uint64_t size_bytes, double share) {
  return static_cast<std::uint64_t>(static_cast<double>(size_bytes) * share);
}

/// A part's memory: what was given by hand, or the least, to which may come more.
struct Given {
  const AutoPart& part;
  bool by_hand;
  std::uint64_t size_bytes;

  Given(const AutoPart& its, const AutoRoom& room, const std::optional<std::uint64_t>& hand)
      : part(its), by_hand(hand.has_value()), size_bytes(room.first_bytes(its, hand)) {}
  bool works() const { return size_bytes >= part.least_bytes; }
  /// Takes what it has use for, in whole grains. Returns what is left.
  std::uint64_t take(std::uint64_t left_bytes, std::uint64_t grain_bytes,
                     const MovingSpeeds& speeds) {
    if (by_hand || worth(part, speeds) <= 0 || part.most_bytes <= size_bytes) return left_bytes;
    const std::uint64_t useful = round_up(part.most_bytes - size_bytes, grain_bytes);
    const std::uint64_t more = std::min(left_bytes - left_bytes % grain_bytes, useful);
    size_bytes += more;
    return left_bytes - more;
  }
};

std::optional<AutoChoice> chosen_of(const AutoWay& way, const AutoRoom& room,
                                    const MovingSpeeds& speeds) {
  Given units(way.units, room, room.units_bytes);
  Given host(way.host, room, room.host_bytes);
  const std::uint64_t needed = way.fixed_bytes + units.size_bytes + host.size_bytes;
  if (!units.works() || !host.works() || needed > room.rank_bytes()) return std::nullopt;
  // A unit that is not there is waited for, a record is read beside compute: so units are first.
  const bool units_first = worth(way.units, speeds) >= worth(way.host, speeds) * (1 - kEqual);
  std::uint64_t left = room.rank_bytes() - needed;
  left = (units_first ? units : host).take(left, room.grain_bytes, speeds);
  (units_first ? host : units).take(left, room.grain_bytes, speeds);

  AutoChoice choice{.placement = way.placement,
                    .units_bytes = units.size_bytes,
                    .host_bytes = host.size_bytes,
                    .memory_bytes = way.fixed_bytes + units.size_bytes + host.size_bytes};
  const double by_units = saved_share(way.units, units.size_bytes);
  const double by_host = saved_share(way.host, host.size_bytes);
  choice.drive_bytes = way.drive_bytes - part_of(way.units.drive_saved_bytes, by_units) -
                       part_of(way.host.drive_saved_bytes, by_host);
  choice.copied_bytes = way.copied_bytes - part_of(way.units.copies_saved_bytes, by_units) -
                        part_of(way.host.copies_saved_bytes, by_host);
  choice.drive_s = seconds(choice.drive_bytes, 0, speeds);
  choice.moving_s = seconds(choice.drive_bytes, choice.copied_bytes, speeds);
  return choice;
}

std::string room_text(const AutoRoom& room) {
  std::string text = fmt::format("{:.0f} % of the {} that are free", 100 * room.share,
                                 format_bytes(room.free_bytes));
  if (room.node_ranks > 1) text += fmt::format(", of {} ranks together", room.node_ranks);
  return text;
}

}  // namespace

std::uint64_t AutoRoom::rank_bytes() const noexcept {
  return part_of(free_bytes, share) / node_ranks;
}

std::uint64_t AutoRoom::first_bytes(const AutoPart& part,
                                    const std::optional<std::uint64_t>& by_hand) const noexcept {
  return by_hand ? *by_hand : round_up(part.least_bytes, grain_bytes);
}

MovingSpeeds MovingSpeeds::of(const MachineProfile& profile, double drive_bytes_per_s) {
  MovingSpeeds speeds;
  if (profile.compute && profile.compute->copy_gb_per_s > 0)
    speeds.copy_bytes_per_s = profile.compute->copy_gb_per_s * kBytesPerGb;
  if (drive_bytes_per_s > 0) {
    speeds.drive_bytes_per_s = drive_bytes_per_s;
    speeds.drive_measured = true;
  }
  return speeds;
}

std::optional<AutoChoice> choose_auto(std::span<const AutoWay> ways, const AutoRoom& room,
                                      const MovingSpeeds& speeds) {
  std::optional<AutoChoice> best;
  for (const AutoWay& way : ways) {
    const std::optional<AutoChoice> choice = chosen_of(way, room, speeds);
    if (choice && (!best || choice->moving_s < best->moving_s * (1 - kEqual))) best = choice;
  }
  return best;
}

std::uint64_t least_bytes(std::span<const AutoWay> ways, const AutoRoom& room) {
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (const AutoWay& way : ways) {
    const std::uint64_t units =
        std::max(way.units.least_bytes, room.first_bytes(way.units, room.units_bytes));
    const std::uint64_t host =
        std::max(way.host.least_bytes, room.first_bytes(way.host, room.host_bytes));
    least = std::min(least, way.fixed_bytes + units + host);
  }
  return least;
}

std::string reason(const AutoChoice& choice, const AutoRoom& room, const MovingSpeeds& speeds) {
  std::string text =
      fmt::format("it takes at most {} of {} ({})", format_bytes(choice.memory_bytes),
                  format_bytes(room.rank_bytes()), room_text(room));
  if (choice.drive_bytes == 0) return text + ", and a step moves nothing over the drive";
  return text + fmt::format(", and a step moves {} over the drive, {:.2f} s at {:.1f} GB/s{}",
                            format_bytes(choice.drive_bytes), choice.drive_s,
                            speeds.drive_bytes_per_s / kBytesPerGb,
                            speeds.drive_measured ? "" : ", which was not measured");
}

void refuse_auto(std::span<const AutoWay> ways, const AutoRoom& room) {
  std::uint64_t units = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t host = units;
  for (const AutoWay& way : ways) {
    units = std::min(units, way.units.least_bytes);
    host = std::min(host, way.host.least_bytes);
  }
  std::string cause = "memory has no room for this run";
  if (room.units_bytes && *room.units_bytes < units) {
    cause = fmt::format("{} for units, as given, are too small", format_bytes(*room.units_bytes));
  } else if (room.host_bytes && *room.host_bytes < host) {
    cause =
        fmt::format("{} of host memory, as given, are too small", format_bytes(*room.host_bytes));
  }
  throw Error(
      ErrorCode::kResourceExhausted,
      fmt::format("{}: the least that works is {}, with at least {} for units and {} of host "
                  "memory, and the run may take {} ({}): free some memory, or give larger "
                  "sizes or none",
                  cause, format_bytes(least_bytes(ways, room)), format_bytes(units),
                  format_bytes(host), format_bytes(room.rank_bytes()), room_text(room)));
}

}  // namespace ziggurat
