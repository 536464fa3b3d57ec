// SPDX-License-Identifier: Apache-2.0
// aio/file_lock.cc: tries again and again, and looks from time to time whom it waits for.
#include "aio/file_lock.h"

#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTryEvery{5};
/// The kernel lists the locks of the whole machine, so it is not asked at every try.
constexpr milliseconds kLookEvery{100};

enum class Kind { kOther, kEnded, kSelf };

Kind kind_of(const std::optional<LockHolder>& holder) {
  if (!holder) return Kind::kOther;
  if (holder->pid == ::getpid()) return Kind::kSelf;
  return holder->ended ? Kind::kEnded : Kind::kOther;
}

/// Returns ", PID (name)", or less if nobody knows it.
std::string told(const std::optional<LockHolder>& holder) {
  if (!holder) return "";
  if (holder->name.empty()) return fmt::format(", {}", holder->pid);
  return fmt::format(", {} ({})", holder->pid, holder->name);
}

milliseconds limit_for(Kind kind, milliseconds wait) {
  if (kind == Kind::kSelf) return std::min(wait, kOwnLockWait);
  return kind == Kind::kEnded && wait.count() > 0 ? std::max(wait, kLastWritesWait) : wait;
}

bool try_lock(const LockRequest& request) {
  if (::flock(request.fd, LOCK_EX | LOCK_NB) == 0) return true;
  const int error = errno;
  if (error != EWOULDBLOCK && error != EINTR) throw system_error(error, "lock " + request.path);
  return false;
}

void say_wait(const std::string& path, const std::optional<LockHolder>& holder, milliseconds wait) {
  switch (kind_of(holder)) {
    case Kind::kEnded:
      log().warn(
          "{} is locked by process {}, which has ended: waiting up to {} ms for its last writes",
          path, holder->pid, wait.count());
      return;
    case Kind::kSelf:
      log().warn("{} is locked by this process itself: waiting up to {} ms", path, wait.count());
      return;
    case Kind::kOther:
      log().warn(
          "{} is locked by another process{}: waiting up to {} ms, because the last writes of a "
          "killed process can hold the lock for a moment",
          path, told(holder), wait.count());
  }
}

Error in_use(const std::string& path, const std::optional<LockHolder>& holder,
             milliseconds waited) {
  std::string text;
  switch (kind_of(holder)) {
    case Kind::kEnded:
      text = fmt::format(
          "{} is in use by another process, {}, which has ended: its last writes, or a process "
          "that inherited the lock, hold it (this process waited {} ms for its lock); stop the "
          "processes that it has started, or name another file",
          path, holder->pid, waited.count());
      break;
    case Kind::kSelf:
      text = fmt::format(
          "{} is in use by this process itself (which waited {} ms for its lock): close the engine "
          "that has it open first, or name another file",
          path, waited.count());
      break;
    case Kind::kOther:
      text = fmt::format(
          "{} is in use by another process{} (this process waited {} ms for its lock); stop that "
          "process, or name another file",
          path, told(holder), waited.count());
  }
  return {ErrorCode::kUnavailable, text, EWOULDBLOCK};
}

}  // namespace

void lock_file(const LockRequest& request, const FindHolder& find) {
  std::optional<LockHolder> holder;
  std::optional<Kind> said;
  std::optional<SteadyClock::time_point> looked;
  milliseconds limit = request.wait;
  while (!try_lock(request)) {
    const SteadyClock::time_point now = SteadyClock::now();
    if (!looked || now >= *looked + kLookEvery || now >= request.begin + limit) {
      looked = now;
      // One that had ended is gone once its last writes are done: the lock is about to be free.
      if (std::optional<LockHolder> found = find(request.fd);
          found || kind_of(holder) != Kind::kEnded)
        holder = std::move(found);
      limit = limit_for(kind_of(holder), request.wait);
    }
    if (now >= request.begin + limit) {
      if (try_lock(request)) return;  // it may have come free during the look
      throw in_use(request.path, holder,
                   std::chrono::duration_cast<milliseconds>(SteadyClock::now() - request.begin));
    }
    if (said != kind_of(holder)) say_wait(request.path, holder, limit);
    said = kind_of(holder);
    std::this_thread::sleep_for(kTryEvery);
  }
}

}  // namespace ziggurat
