// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/save_ranks.cc: messages from each rank to each, and texts to rank 0.
#include "core/checkpoint/save_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/runtime/async.h"
#include "tiers/store/quorum.h"

namespace ziggurat {
namespace {

/// Says whether a rank has an error.
struct Message {
  std::array<char, 512> text{};  ///< ends with a NUL; empty if nothing is wrong
  int native = 0;                ///< errno, by which all ranks decide alike what to do next
};

int native_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& its) {
    return its.native();
  } catch (...) {
    return 0;
  }
}

/// Returns the error's text, which is never empty.
std::string text_of(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    text = what.what();
  } catch (...) {
  }
  return text.empty() ? "the error has no text" : text;
}

template <std::size_t kSize>
void put(const std::string& text, std::array<char, kSize>& into) {
  std::copy_n(text.begin(), std::min(text.size(), kSize - 1), into.begin());
}

template <class T>
std::span<std::byte> bytes_in(std::vector<T>& all) {
  return std::as_writable_bytes(std::span(all));
}

}  // namespace

Task<> SaveRanks::exchange(std::span<const std::byte> own, std::span<std::byte> all) {
  std::memcpy(all.data() + static_cast<std::size_t>(rank()) * own.size(), own.data(), own.size());
  WorkGroup group(reactor_);
  for (int other = 0; other < ranks_.world_size(); ++other) {
    if (other == rank()) continue;
    group.spawn(ranks_.send(own, other));
    group.spawn(
        ranks_.recv(all.subspan(static_cast<std::size_t>(other) * own.size(), own.size()), other));
  }
  co_await group.wait_idle();
}

Task<> SaveRanks::agree(std::exception_ptr error, std::string what) {
  Message own;
  const bool follows = followed_from_another(error);
  if (error && !follows) {
    put(text_of(error), own.text);
    own.native = native_of(error);
  }
  std::vector<Message> all(static_cast<std::size_t>(ranks_.world_size()));
  co_await exchange(std::as_bytes(std::span(&own, 1)), bytes_in(all));
  if (error && !follows) std::rethrow_exception(error);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].text[0] == 0) continue;
    throw PeerFailed(
        ErrorCode::kUnavailable,
        fmt::format("{}: rank {} could not save its part: {}", what, rank, all[rank].text.data()),
        all[rank].native);
  }
  if (error) std::rethrow_exception(error);
}

Task<std::string> SaveRanks::of_first(std::string name) {
  std::array<char, 64> own{};
  put(name, own);
  std::vector<std::array<char, 64>> all(static_cast<std::size_t>(ranks_.world_size()));
  co_await exchange(std::as_bytes(std::span(own)), bytes_in(all));
  co_return std::string(all.front().data());
}

Task<std::vector<std::string>> SaveRanks::room_at_first(std::uint64_t size_bytes,
                                                        std::string what) {
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(ranks_.world_size()));
  co_await exchange(std::as_bytes(std::span(&size_bytes, 1)), bytes_in(sizes));
  std::vector<std::string> room;
  std::exception_ptr error;
  try {
    for (std::size_t its = 0; rank() == 0 && its < sizes.size(); ++its)
      room.emplace_back(sizes[its], '\0');
  } catch (...) {
    error = std::current_exception();
  }
  co_await agree(error, std::move(what));
  co_return room;
}

Task<> SaveRanks::to_first(const std::string& text, std::vector<std::string>& room) {
  if (rank() != 0) {
    co_await ranks_.send(std::as_bytes(std::span(text)), 0);
    co_return;
  }
  room.front().replace(0, text.size(), text);
  for (int its = 1; its < ranks_.world_size(); ++its)
    co_await ranks_.recv(std::as_writable_bytes(std::span(room[static_cast<std::size_t>(its)])),
                         its);
}

}  // namespace ziggurat
