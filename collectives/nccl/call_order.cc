// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/call_order.cc: sends questions to rank 0, and its answers.
#include "collectives/nccl/call_order.h"

#include <array>
#include <utility>

#include "base/check.h"

namespace ziggurat {
namespace {

constexpr std::size_t kKeyWords = 2;
constexpr std::size_t kWordBits = 64;

}  // namespace

CallOrder::CallOrder(Reactor& reactor, std::unique_ptr<ExchangeCommunicator> control,
                     std::shared_ptr<AnnouncedBytes> announced)
    : reactor_(reactor),
      control_(std::move(control)),
      announced_(std::move(announced)),
      asks_of_(static_cast<std::size_t>(control_->world_size())) {}

void CallOrder::listen() {
  if (control_->rank() != 0) return;
  control_->on_send([weak = weak_from_this()](int from) {
    const auto self = weak.lock();
    if (!self) return;
    if (self->asks_of_[static_cast<std::size_t>(from)]++ == 0) self->spawn(read_asks(self, from));
  });
}

/// Starts a task. If it fails, the transport fails too, and fail() reaches everything that waits.
void CallOrder::spawn(Task<> task) {
  reactor_.spawn(std::move(task), [](const std::exception_ptr&) {});
}

std::size_t CallOrder::words_of_ask() const {
  const auto ranks = static_cast<std::size_t>(control_->world_size());
  return kKeyWords + (ranks + kWordBits - 1) / kWordBits;
}

void CallOrder::expect(const Key& key) {
  expected_.emplace(key, Signal(reactor_));
  if (failure_) return expected_.at(key).fail(failure_);
  if (control_->rank() == 0) return;
  // There is one receive at a time, so that turns come in order, and always one, so that a missing
  // rank 0 is noticed.
  ++turns_to_come_;
  if (!std::exchange(reading_, true)) spawn(read_turns(shared_from_this()));
}

Task<> CallOrder::read_turns(std::shared_ptr<CallOrder> self) {
  while (self->turns_to_come_ > 0) {
    const auto words = std::make_shared<std::array<std::uint64_t, kKeyWords>>();
    Task<> told = self->control_->recv(std::as_writable_bytes(std::span(*words)), 0);
    co_await std::move(told);
    --self->turns_to_come_;
    self->came({(*words)[0], (*words)[1]});
  }
  self->reading_ = false;
}

void CallOrder::ask(const Key& key, std::span<const int> members) {
  const auto words = std::make_shared<std::vector<std::uint64_t>>(words_of_ask());
  (*words)[0] = key.communicator;
  (*words)[1] = key.sequence;
  for (const int member : members) {
    const auto bit = static_cast<std::size_t>(member);
    (*words)[kKeyWords + bit / kWordBits] |= std::uint64_t{1} << (bit % kWordBits);
  }
  if (control_->rank() == 0) return give(key, std::span(*words).subspan(kKeyWords));
  spawn(tell(shared_from_this(), words, 0));
}

Task<> CallOrder::read_asks(std::shared_ptr<CallOrder> self, int from) {
  std::size_t& heard = self->asks_of_[static_cast<std::size_t>(from)];
  while (heard > 0) {
    const auto words = std::make_shared<std::vector<std::uint64_t>>(self->words_of_ask());
    Task<> told = self->control_->recv(std::as_writable_bytes(std::span(*words)), from);
    co_await std::move(told);
    self->give({(*words)[0], (*words)[1]}, std::span(*words).subspan(kKeyWords));
    --heard;
  }
}

/// Gives a turn; on rank 0 only. All members hear of turns in the order of these calls.
void CallOrder::give(const Key& key, std::span<const std::uint64_t> members) {
  const auto words = std::make_shared<std::vector<std::uint64_t>>(
      std::vector<std::uint64_t>{key.communicator, key.sequence});
  for (int rank = 0; rank < control_->world_size(); ++rank) {
    const auto bit = static_cast<std::size_t>(rank);
    if ((members[bit / kWordBits] >> (bit % kWordBits) & 1) == 0) continue;
    if (rank == 0) {
      came(key);
    } else {
      spawn(tell(shared_from_this(), words, rank));
    }
  }
}

Task<> CallOrder::tell(std::shared_ptr<CallOrder> self,
                       std::shared_ptr<std::vector<std::uint64_t>> words, int to) {
  Task<> sent = self->announced_->of(
      [&] { return self->control_->send(std::as_bytes(std::span(*words)), to); });
  co_await std::move(sent);
}

void CallOrder::came(const Key& key) {
  turns_.push_back(key);
  if (turns_.size() == 1) expected_.at(key).set();
}

Task<> CallOrder::turn(const Key& key) { return expected_.at(key).wait(); }

void CallOrder::taken(const Key& key) {
  ZIGGURAT_CHECK(!turns_.empty() && turns_.front() == key, "call {} took a turn not its own",
                 key.sequence);
  turns_.pop_front();
  expected_.erase(key);
  if (!turns_.empty()) expected_.at(turns_.front()).set();
}

void CallOrder::fail(const std::exception_ptr& error) {
  failure_ = error;
  for (auto& [key, signal] : expected_) signal.fail(error);
}

}  // namespace ziggurat
