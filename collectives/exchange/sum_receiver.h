// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/sum_receiver.h: receives members' terms of a sum. It keeps them until all
// terms of a chunk are there; then a worker adds them in rank order.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collectives/exchange/call_plan.h"
#include "collectives/exchange/call_receiver.h"

namespace ziggurat {

class SumReceiver final : public CallReceiver {
 public:
  /// Called for each chunk of the sum when it is made, in any order.
  using Made = std::function<void(const wire::FrameHeader& chunk)>;

  /// `term` is this rank's own. With `made`, chunks of the sum are marked for sending.
  SumReceiver(ExchangeCall& call, const SumPlan& plan, std::span<const std::byte> term, Made made);

  void begin() override { add_ready(); }
  void small_arrived(std::size_t place, const wire::FrameHeader& header,
                     std::span<const std::byte> bytes) override;
  void read(std::size_t place, std::uint64_t address) override;
  std::span<std::byte> landing(std::size_t place, const wire::FrameHeader& header) override;
  void chunk_arrived(std::size_t place, const wire::FrameHeader& header) override;
  bool done() const override { return summed_ == sum_.size() && all_kept(); }
  void end() override;

 private:
  struct Chunk {
    std::vector<std::unique_ptr<std::byte[]>> terms;  // by place
    std::vector<wire::PayloadMark> marks;
    std::size_t arrived = 0;
  };
  void term_arrived(std::size_t place, std::size_t offset, const wire::PayloadMark& mark);
  void add_ready();
  void add(std::size_t index);
  void add_on_worker(Chunk& chunk, std::size_t offset, std::size_t length);
  void added(Chunk& chunk, const wire::FrameHeader& header);
  void give_back(Chunk& chunk);

  DType dtype_;
  std::span<std::byte> sum_;
  std::span<const std::byte> own_;
  Made made_;
  std::vector<Chunk> chunks_;
  std::size_t next_ = 0, in_flight_ = 0;  // chunks
  std::size_t summed_ = 0;
};

}  // namespace ziggurat
