// SPDX-License-Identifier: Apache-2.0
// core/engine/stash/activation_stash.cc: copies on the caller's thread, decides on the reactor's.
#include "core/engine/stash/activation_stash.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/error.h"
#include "core/engine/state/storage.h"

namespace ziggurat {
namespace {

Task<> call(const std::function<void()>& action) {
  action();
  co_return;
}

}  // namespace

ActivationStash::ActivationStash(Runtime& runtime, const std::vector<StoreDirectory>& directories,
                                 std::uint64_t memory_bytes)
    : runtime_(runtime) {
  if (directories.empty())
    throw Error(ErrorCode::kInvalidArgument, "a stash needs a directory: give `store`");
  runtime_.reactor.block_on(call([&] {
    storage_ = Storage::open(runtime_, *runtime_.ranks, directories);
    try {
      stash_ = std::make_unique<Stash>(runtime_.reactor, runtime_.jobs(), memory_bytes,
                                       storage_->places);
    } catch (...) {
      storage_.reset();
      throw;
    }
  }));
}

ActivationStash::~ActivationStash() {
  runtime_.reactor.block_on([](ActivationStash& its) -> Task<> {
    try {
      co_await its.stash_->settle();
    } catch (const Error&) {
      // What is written goes with the stash, and so does a failed write.
    }
    its.stash_.reset();
    its.storage_.reset();
  }(*this));
}

ActivationStash::Ticket ActivationStash::put(std::span<const std::byte> bytes) {
  const Stash::Room room = take(bytes.size());
  if (room.ticket == 0) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("the stash's memory is lent, and has no room for an item of {}: give "
                            "items back, or give it more memory",
                            format_bytes(bytes.size())));
  }
  copy_bytes(bytes, room.bytes);
  filled(room.ticket);
  return room.ticket;
}

Stash::Room ActivationStash::take(std::uint64_t size_bytes) {
  return runtime_.reactor.block_on(stash_->put(size_bytes));
}

void ActivationStash::filled(Ticket ticket) {
  runtime_.reactor.post([this, ticket] { stash_->filled(ticket); });
}

void ActivationStash::read(Ticket ticket, const Part& part) {
  const std::span<const std::byte> bytes = runtime_.reactor.block_on(stash_->bring(ticket));
  const bool is_inside =
      part.offset_bytes <= bytes.size() && part.into.size() <= bytes.size() - part.offset_bytes;
  if (is_inside) copy_bytes(bytes.subspan(part.offset_bytes, part.into.size()), part.into);
  runtime_.reactor.post([this, ticket] { stash_->release(ticket); });
  if (!is_inside) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("item {} of the stash has {} bytes, not {} from byte {} on: read a part "
                    "of what was put",
                    ticket, bytes.size(), part.into.size(), part.offset_bytes));
  }
}

Stash::Loan ActivationStash::lend(Ticket ticket) {
  return runtime_.reactor.block_on(stash_->lend(ticket));
}

void ActivationStash::give_back(std::uint64_t loan) {
  runtime_.reactor.post([this, loan] { stash_->give_back(loan); });
}

void ActivationStash::drop(Ticket ticket) {
  runtime_.reactor.post([this, ticket] { stash_->drop(ticket); });
}

StashFigures ActivationStash::figures() {
  StashFigures figures;
  runtime_.reactor.block_on(call([&] { figures = stash_->figures(); }));
  return figures;
}

}  // namespace ziggurat
