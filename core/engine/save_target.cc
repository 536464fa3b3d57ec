// SPDX-License-Identifier: Apache-2.0
// core/engine/save_target.cc: waits for the end of a save while its target answers.
#include "core/engine/save_target.h"

#include <fmt/format.h>

#include "base/runtime/seconds.h"

namespace ziggurat {
namespace {

/// A time that is longer than any wait.
constexpr Nanoseconds kNever = std::chrono::years(1);

/// How often a target is looked at in the time for which it may be silent.
constexpr int kLooks = 8;

}  // namespace

void SaveTarget::end() {
  ended_ = true;
  for (const std::weak_ptr<Signal>& waiting : std::exchange(waiting_, {})) {
    if (const auto its = waiting.lock()) its->set();
  }
}

Task<Nanoseconds> SaveTarget::ended_or_silent(std::function<bool()> waits_for_time) {
  const Nanoseconds of_writes =
      stall_max_s_ ? std::max(nanoseconds_of(*stall_max_s_), kSilence) : kLongSilence;
  Nanoseconds silent{0};
  for (std::uint64_t before = 0; !ended_;) {
    if (silent >= (copying_ ? of_writes : std::max(of_writes, kLongSilence))) co_return silent;
    co_await ended_or(of_writes / kLooks);
    const std::uint64_t now = answers();
    const bool waits = asked_ > 0 && !waits_for_time();
    silent = waits && now == before ? silent + of_writes / kLooks : Nanoseconds{0};
    before = now;
  }
  co_return Nanoseconds{0};
}

Task<> SaveTarget::ended_or(Nanoseconds longest) {
  const auto ended = std::make_shared<Signal>(reactor_);
  waiting_.emplace_back(ended);
  if (longest < kNever) {
    reactor_.clock().after(longest, [weak = std::weak_ptr(ended)] {
      if (const auto its = weak.lock()) its->set();
    });
  }
  co_await ended->wait();
  std::erase_if(waiting_, [](const std::weak_ptr<Signal>& its) { return its.expired(); });
}

Error SaveTarget::not_answered(Nanoseconds silent) const {
  const double seconds = std::chrono::duration<double>(silent).count();
  if (!stall_max_s_) {
    return {ErrorCode::kDeadlineExceeded,
            fmt::format("the drive of the checkpoint (or the server behind it) has not answered "
                        "for {:g} s, and seems to hang: save to another drive",
                        seconds)};
  }
  return {ErrorCode::kDeadlineExceeded,
          fmt::format("the drive of the checkpoint (or the server behind it) has not answered for "
                      "{:g} s, while `checkpoint_stall_max` is {:g}, and seems to hang. Save to "
                      "another drive, or raise `checkpoint_stall_max` if this drive is only slow",
                      seconds, *stall_max_s_)};
}

}  // namespace ziggurat
