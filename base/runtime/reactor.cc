// SPDX-License-Identifier: Apache-2.0
// base/runtime/reactor.cc: the loop: it runs ready handlers, then due timers, then looks for a
// lock-up, then sleeps.
#include "base/runtime/reactor.h"

#include <pthread.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <condition_variable>
#include <mutex>

#include "base/check.h"
#include "base/checksum.h"
#include "base/runtime/floating_point.h"
#include "base/runtime/own_thread.h"

namespace ziggurat {

Reactor::Reactor(Clock::Kind clock_kind)
    : work_(boost::asio::make_work_guard(context_)), clock_(clock_kind) {}

Reactor::~Reactor() { stop(); }

void Reactor::start() {
  ZIGGURAT_CHECK(!thread_.joinable(), "the reactor is started once");
  stopping_ = false;
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "zig-reactor");
    internal::take_thread();
    internal::set_floating_point_environment();
    loop([this] { return stopping_; });
  });
}

void Reactor::stop() {
  if (!thread_.joinable()) return;
  ZIGGURAT_CHECK(!on_reactor_thread(), "the reactor cannot stop itself");
  boost::asio::post(context_, [this] { stopping_ = true; });
  thread_.join();
}

bool Reactor::on_reactor_thread() const noexcept {
  return loop_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

void Reactor::post(std::function<void()> action) { make_ready(std::move(action)); }

void Reactor::shuffle_ready(std::uint64_t seed) {
  ZIGGURAT_CHECK(clock_.kind() == Clock::Kind::kVirtual, "handlers are shuffled in real time");
  shuffle_seed_ = seed;
}

void Reactor::spawn(Task<> task, std::function<void(std::exception_ptr)> on_error) {
  auto begin = [this, task = std::move(task), on_error = std::move(on_error)]() mutable {
    boost::asio::co_spawn(context_, std::move(task),
                          [on_error = std::move(on_error)](std::exception_ptr error) {
                            if (error) on_error(error);
                          });
  };
  if (shuffle_seed_ == 0) {
    begin();
  } else {
    make_ready(std::move(begin));
  }
}

void Reactor::start_blocking(Task<> task, const std::function<bool()>& done) {
  ZIGGURAT_CHECK(!on_reactor_thread(), "a blocking call on the reactor's own thread");
  if (!thread_.joinable()) {
    ++blocked_;
    spawn(std::move(task), [](std::exception_ptr) {});
    loop(done);
    --blocked_;
    return;
  }
  std::mutex mutex;
  std::condition_variable finished;
  bool ended = false;
  boost::asio::post(context_, [&, task = std::make_shared<Task<>>(std::move(task))] {
    ++blocked_;
    boost::asio::co_spawn(context_, std::move(*task), [&](std::exception_ptr) {
      --blocked_;
      const std::lock_guard lock(mutex);
      ended = true;
      finished.notify_one();  // under the lock, because the waiter owns the condition variable
    });
  });
  std::unique_lock lock(mutex);
  finished.wait(lock, [&] { return ended; });
}

/// Runs one handler, if any is ready. What a shuffled one has begun comes before the next one.
bool Reactor::run_handler() {
  if (context_.poll_one() > 0) return true;
  if (shuffled_.empty()) return false;
  const std::size_t drawn = mix_seed(shuffle_seed_, shuffled_count_++) % shuffled_.size();
  std::swap(shuffled_[drawn], shuffled_.back());
  const std::unique_ptr<Ready> next = std::move(shuffled_.back());
  shuffled_.pop_back();
  next->run();
  return true;
}

bool Reactor::run_ready() {
  if (!run_handler()) {
    // Work under way elsewhere takes time that virtual time does not count. Until it has come back,
    // only timers that are due at this very instant run.
    const bool may_pass = clock_.kind() == Clock::Kind::kReal || external_ == 0;
    const auto deadline = clock_.next_deadline();
    return deadline && (may_pass || *deadline <= clock_.now()) && clock_.run_next_due();
  }
  // Handlers that keep posting each other must not delay real timers. Virtual time moves only when
  // nothing is ready.
  if (clock_.kind() == Clock::Kind::kReal) clock_.run_next_due();
  return true;
}

// Sleeps until a handler is ready or a timer is due. For real time only: virtual timers run when
// nothing else is left.
void Reactor::wait_one() {
  const auto deadline = clock_.next_deadline();
  if (!deadline) {
    context_.run_one();
  } else if (const Nanoseconds left = *deadline - clock_.now(); left > Nanoseconds(0)) {
    context_.run_one_for(left);
  } else {
    context_.poll_one();
  }
}

void Reactor::loop(const std::function<bool()>& done) {
  loop_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  while (!done()) {
    // While work is under way elsewhere there can be no lock-up. Sleep until something happens, in
    // the one call that also finds ready handlers.
    if (external_ > 0 && clock_.kind() == Clock::Kind::kReal) {
      wait_one();
      clock_.run_next_due();
      continue;
    }
    if (run_ready()) continue;
    if (clock_.kind() == Clock::Kind::kReal && clock_.next_deadline()) {
      wait_one();
      continue;
    }
    if (external_ == 0 && blocked_ > 0) {
      // By index, because a handler may register another one.
      for (std::size_t i = 0; i < stall_handlers_.size(); ++i) stall_handlers_[i]();
      if (run_handler()) continue;
      ZIGGURAT_CHECK(thread_.joinable(),
                     "a caller waits, but nothing is in flight and no thread can post");
    }
    context_.run_one();
  }
  loop_thread_.store(std::thread::id(), std::memory_order_relaxed);
}

void Reactor::run_until_idle() {
  ZIGGURAT_CHECK(!thread_.joinable(), "the engine thread already runs the loop");
  loop_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  while (run_ready()) {
  }
  loop_thread_.store(std::thread::id(), std::memory_order_relaxed);
}

}  // namespace ziggurat
