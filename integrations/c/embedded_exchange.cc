// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_exchange.cc: passes calls of a trainer's threads to the reactor, in
// order.
#include "integrations/c/embedded_exchange.h"

#include <fmt/format.h>

#include <numeric>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "integrations/c/wrong.h"

namespace ziggurat {
namespace {

/// Most calls that may be begun and not yet finished.
constexpr std::size_t kUnderWayMax = 4096;

/// Makes `call` and then sets `ended`, for which its caller waits on another thread.
Task<> run(Task<> call, std::shared_ptr<std::promise<void>> ended) {
  try {
    co_await std::move(call);
    ended->set_value();
  } catch (...) {
    ended->set_exception(std::current_exception());
  }
}

/// Requires that all ranks open the exchange of the same name.
Task<> require_same_name(Communicator& ranks, const std::string& name) {
  const std::uint64_t own = hash64(std::as_bytes(std::span(name)), 0);
  std::vector<std::uint64_t> all(static_cast<std::size_t>(ranks.world_size()));
  co_await ranks.all_gather(std::as_bytes(std::span(&own, 1)),
                            std::as_writable_bytes(std::span(all)));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == own) continue;
    throw wrong(
        fmt::format("exchange '{}': rank {} opened an exchange of another name in its place: open "
                    "engines and exchanges in the same order on every rank",
                    name, rank));
  }
}

}  // namespace

EmbeddedExchange::EmbeddedExchange(Runtime& runtime, std::string name)
    : runtime_(runtime), name_(std::move(name)) {
  runtime_.reactor.block_on([](EmbeddedExchange& self) -> Task<> {
    Communicator& all = *self.runtime_.ranks;
    self.world_size_ = static_cast<std::size_t>(all.world_size());
    std::vector<int> members(self.world_size_);
    std::iota(members.begin(), members.end(), 0);
    self.ranks_ = all.split(members);
    std::exception_ptr error;
    try {
      co_await require_same_name(*self.ranks_, self.name_);
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) co_return;
    self.ranks_.reset();  // this is the reactor's thread
    std::rethrow_exception(error);
  }(*this));
}

EmbeddedExchange::~EmbeddedExchange() {
  for (auto& [ticket, ended] : under_way_) ended.wait();
  runtime_.reactor.destroy(ranks_);
}

std::uint64_t EmbeddedExchange::begin_all_to_all(std::span<const std::byte> input,
                                                 std::span<std::byte> output) {
  return begin([=](Communicator& ranks) { return ranks.all_to_all(input, output); });
}

std::uint64_t EmbeddedExchange::begin_all_gather(std::span<const std::byte> input,
                                                 std::span<std::byte> output) {
  return begin([=](Communicator& ranks) { return ranks.all_gather(input, output); });
}

std::uint64_t EmbeddedExchange::begin_all_reduce(std::span<double> values) {
  return begin(
      [=](Communicator& ranks) { return ranks.all_reduce(values, Communicator::Op::kSum); });
}

std::uint64_t EmbeddedExchange::begin_barrier() {
  return begin([](Communicator& ranks) { return ranks.barrier(); });
}

/// Begins a call. Posts it under the lock, so that the reactor has calls in the order of their
/// tickets.
std::uint64_t EmbeddedExchange::begin(Make make) {
  const std::lock_guard lock(mutex_);
  if (under_way_.size() == kUnderWayMax) {
    throw wrong(fmt::format(
        "exchange '{}': {} calls are not finished, which is the limit: finish some of them first",
        name_, kUnderWayMax));
  }
  const auto ended = std::make_shared<std::promise<void>>();
  under_way_.emplace(++last_ticket_, ended->get_future());
  runtime_.reactor.post(
      [&reactor = runtime_.reactor, ranks = ranks_.get(), make = std::move(make), ended] {
        reactor.spawn(run(make(*ranks), ended), [](std::exception_ptr) {});
      });
  return last_ticket_;
}

void EmbeddedExchange::finish(std::uint64_t ticket) {
  std::future<void> ended;
  {
    const std::lock_guard lock(mutex_);
    const auto found = under_way_.find(ticket);
    if (found == under_way_.end()) {
      throw wrong(
          fmt::format("exchange '{}': call {} is not under way, because it was finished before or "
                      "never begun: finish each call once",
                      name_, ticket));
    }
    ended = std::move(found->second);
    under_way_.erase(found);
  }
  try {
    ended.get();
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("exchange '{}': {}", name_, error.what()),
                error.native());
  }
}

}  // namespace ziggurat
