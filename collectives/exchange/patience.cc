// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/patience.cc: two clocks that run while no progress is heard of.
#include "collectives/exchange/patience.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace ziggurat {
namespace {

using std::chrono::seconds;

constexpr Nanoseconds kPeriod = seconds(1);
constexpr int kAsksPerSecond = 64;  // the most asks to one rank
constexpr int kAsksUnanswered = 4;  // the fewest unanswered asks that count as silence

double in_seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Patience::Patience(std::size_t ranks, Nanoseconds standstill)
    : standstill_(standstill),
      period_(std::max<Nanoseconds>(std::min(kPeriod, standstill / (2 * kAsksUnanswered)),
                                    seconds(ranks / kAsksPerSecond))),
      silence_(std::max(standstill / 2, kAsksUnanswered * period_)),
      peers_(ranks) {}

void Patience::begin(Nanoseconds now) {
  last_tick_ = now;
  standing_ = {};
  for (Peer& peer : peers_) peer.silent = {};
}

void Patience::tick(Nanoseconds now, std::uint64_t own_work) {
  // A late tick was delayed on this rank, so at most two periods are counted.
  const Nanoseconds passed = std::min(now - last_tick_, 2 * period_);
  last_tick_ = now;
  standing_ += passed;
  if (std::exchange(own_work_, own_work) != own_work) standing_ = {};
  for (Peer& peer : peers_) peer.silent += passed;
}

void Patience::answered(std::size_t rank, std::uint64_t work) {
  Peer& peer = peers_[rank];
  peer.silent = {};
  if (std::exchange(peer.work, work) != work) standing_ = {};
}

std::optional<std::string> Patience::verdict() const {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].left || peers_[rank].silent < silence_) continue;
    return fmt::format(
        "rank {} has not answered for {:.1f} s, half of the time that ranks may take "
        "(ZIGGURAT_RANK_TIMEOUT, or an embedder's call_timeout_s), so its process must be stopped",
        rank, in_seconds(peers_[rank].silent));
  }
  if (standing_ < standstill_) return std::nullopt;
  return fmt::format(
      "every rank that answers stands still: none has finished any work in the {:.1f} s that "
      "ranks may take (ZIGGURAT_RANK_TIMEOUT, or an embedder's call_timeout_s)",
      in_seconds(standstill_));
}

}  // namespace ziggurat
