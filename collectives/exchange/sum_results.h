// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/sum_results.h: the second half of an all_reduce, which is part 1 of the
// call: each rank's slice of the sum goes to all ranks while its chunks are made.
//
// A sum is final, for every rank that got it in whatever way, when the rank that made it says so.
// That rank has then heard from the lenders of all terms that they were still lent when they were
// read.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/exchange/member_sender.h"
#include "collectives/exchange/place_receiver.h"

namespace ziggurat {

class SumResults {
 public:
  /// `sum` is this rank's slice; `results` has the slices of all ranks, by place.
  SumResults(ExchangeCall& call, std::span<const std::byte> sum,
             const std::vector<std::span<std::byte>>& results);

  /// Sends a chunk of this rank's slice that is made and marked.
  void made(const wire::FrameHeader& chunk);
  /// Returns the receiver of other ranks' slices.
  PlaceReceiver& receiver() noexcept { return receiver_; }

  /// Reads the chunk that `header` names, which `place` lends. Errors: kUnavailable if it is not
  /// the next.
  void ready(std::size_t place, const wire::FrameHeader& header);
  /// Notes that `place` has read this rank's slice. Errors: kUnavailable if it was not lent.
  void was_read(std::size_t place);
  /// Notes that the slice of `place` is final.
  void was_final(std::size_t place) { members_[place].final_came = true; }
  /// Tells the members that this rank's slice is final, once all of it is made of terms that were
  /// kept.
  void send_finals();

  bool lacks(std::size_t place) const;
  bool done() const;

 private:
  struct Member {
    std::size_t sent = 0;
    bool final_sent = false, final_came = false;
  };
  bool sent_to(const Member& member) const { return member.sent == sum_.size(); }

  ExchangeCall& call_;
  std::span<const std::byte> sum_;
  PlaceReceiver receiver_;
  ChunkOrder made_;
  std::vector<Member> members_;  // by place
};

}  // namespace ziggurat
