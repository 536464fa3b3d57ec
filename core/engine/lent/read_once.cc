// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/read_once.cc: shares what was read among the ranks.
#include "core/engine/lent/read_once.h"

#include <algorithm>
#include <exception>
#include <iterator>

namespace ziggurat {

Task<ReadOnce::Part> ReadOnce::fetch(UnitId unit, Need need, IoPriority priority) {
  if (home_.in_memory(unit)) {
    const UnitParamHome::Fetched there = co_await home_.fetch(unit, need, priority);
    co_return Part{.bytes = there.bytes, .kept = {}};
  }
  const auto known =
      std::ranges::find_if(read_, [&](const auto& its) { return its->unit == unit; });
  std::shared_ptr<Read> its;
  if (known != read_.end()) {
    its = *known;
    if (++its->uses == ranks_) read_.erase(known);
    if (priority == IoPriority::kDemand) home_.hurry(unit);
    co_await its->ended.wait();
  }
  if (its == nullptr || its->failed) {
    its = std::make_shared<Read>(context_.cancel);
    its->unit = unit;
    if (ranks_ > 1) read_.push_front(its);
    co_await read(*its, need, priority);
  }
  co_return Part{.bytes = *its->bytes, .kept = its->bytes};
}

Task<> ReadOnce::read(Read& its, Need need, IoPriority priority) {
  std::exception_ptr error;
  try {
    const UnitParamHome::Fetched fetched = co_await home_.fetch(its.unit, need, priority);
    its.bytes =
        std::make_shared<std::vector<std::byte>>(fetched.bytes.begin(), fetched.bytes.end());
  } catch (...) {
    error = std::current_exception();
  }
  its.failed = error != nullptr;
  its.ended.set();
  if (!error) {
    drop_oldest();
    co_return;
  }
  read_.remove_if([&](const auto& other) { return other.get() == &its; });
  std::rethrow_exception(error);
}

void ReadOnce::drop_oldest() {
  std::uint64_t bytes = 0;
  for (auto its = read_.begin(); its != read_.end();) {
    bytes += (*its)->bytes ? (*its)->bytes->size() : 0;
    its = bytes > kept_bytes_max_ ? read_.erase(its) : std::next(its);
  }
}

}  // namespace ziggurat
