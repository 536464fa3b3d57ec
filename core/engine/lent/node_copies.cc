// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/node_copies.cc: brings each slice once.
#include "core/engine/lent/node_copies.h"

#include <exception>

namespace ziggurat {

Task<NodeCopies::Copy> NodeCopies::get(std::size_t rank, StreamedUnit unit,
                                       std::uint64_t generation, std::uint64_t size_bytes,
                                       const Bring& bring) {
  was_asked_ = true;
  const Key key{rank, unit};
  const auto found = kept_.find(key);
  if (found != kept_.end() && found->second->generation == generation) {
    const std::shared_ptr<Entry> known = found->second;
    co_await known->ended.wait();
    if (known->is_whole) co_return Copy{.came = UnitService::Came::kWhole, .bytes = known->bytes};
  }
  const auto its = std::make_shared<Entry>(cancel_);
  its->generation = generation;
  its->bytes = std::make_shared<std::vector<std::byte>>(size_bytes);
  if (keeps_) kept_[key] = its;
  const UnitService::Came came = co_await fill(*its, bring);
  co_return Copy{.came = came, .bytes = its->bytes};
}

Task<UnitService::Came> NodeCopies::fill(Entry& its, const Bring& bring) {
  UnitService::Came came = UnitService::Came::kWhole;
  std::exception_ptr error;
  try {
    came = co_await bring(*its.bytes);
  } catch (...) {
    error = std::current_exception();
  }
  its.is_whole = !error && came == UnitService::Came::kWhole;
  its.ended.set();
  if (!its.is_whole) {
    std::erase_if(kept_, [&](const auto& one) { return one.second.get() == &its; });
  }
  if (error) std::rethrow_exception(error);
  co_return came;
}

}  // namespace ziggurat
