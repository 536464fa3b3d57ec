// SPDX-License-Identifier: Apache-2.0
// aio/io_threads.cc: one queue of requests and one list of results. One post to the reactor
// delivers all the results that have gathered.
#include "aio/io_threads.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/runtime/work_ended.h"

namespace ziggurat {
namespace {

struct Request {
  IoOp* op;
  int fd;
};

struct Finished {
  IoOp* op;
  std::int32_t result;
};

constexpr std::size_t kTransferBytesMax =
    0x7ffff000;  // what Linux moves in one call; fits the result

std::int32_t perform(const Request& request) noexcept {
  const IoOp& op = *request.op;
  const std::size_t size = std::min<std::size_t>(op.size_bytes, kTransferBytesMax);
  const auto offset = static_cast<off_t>(op.offset_bytes);
  ssize_t result = 0;
  switch (op.kind) {
    case IoKind::kRead: result = ::pread(request.fd, op.data, size, offset); break;
    case IoKind::kWrite: result = ::pwrite(request.fd, op.data, size, offset); break;
    case IoKind::kSync: result = ::fdatasync(request.fd); break;
  }
  return static_cast<std::int32_t>(result < 0 ? -errno : result);
}

// Blocks all signals on this thread: the embedding program handles them on its own threads.
void block_signals() noexcept {
  sigset_t all;
  ::sigfillset(&all);
  static_cast<void>(
      ::pthread_sigmask(SIG_BLOCK, &all, nullptr));  // fails only for a wrong first argument
}

}  // namespace

struct IoThreads::State : std::enable_shared_from_this<State> {
  explicit State(Reactor& its_reactor) : reactor(its_reactor) {}

  void work();
  void deliver();

  Reactor& reactor;
  std::size_t in_flight = 0;  // reactor's thread

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Request> requests;
  std::vector<Finished> finished;
  bool stopping = false;

  std::vector<std::thread> threads;
};

void IoThreads::State::work() {
  std::unique_lock lock(mutex);
  for (;;) {
    wake.wait(lock, [this] { return stopping || !requests.empty(); });
    if (requests.empty()) return;
    const Request request = requests.front();
    requests.pop_front();
    lock.unlock();
    const std::int32_t result = perform(request);
    lock.lock();
    finished.push_back({request.op, result});
    if (finished.size() == 1) {
      reactor.post([state = weak_from_this()] {
        if (const auto self = state.lock()) self->deliver();
      });
    }
  }
}

void IoThreads::State::deliver() {
  std::vector<Finished> batch;
  {
    const std::lock_guard guard(mutex);
    batch.swap(finished);
  }
  for (const Finished& each : batch) {
    --in_flight;
    work_ended(reactor);
    each.op->complete(*each.op, each.result);
  }
}

IoThreads::IoThreads(Reactor& reactor, std::uint32_t threads)
    : state_(std::make_shared<State>(reactor)) {
  ZIGGURAT_CHECK(threads > 0, "transfers on no threads");
  for (std::uint32_t i = 0; i < threads; ++i) {
    state_->threads.emplace_back([state = state_.get()] {
      static_cast<void>(::pthread_setname_np(::pthread_self(), "zig-io"));  // the name is only for
                                                                            // people who look
      block_signals();
      state->work();
    });
  }
}

void IoThreads::drain() {
  {
    const std::lock_guard guard(state_->mutex);
    state_->stopping = true;
    for (const Request& request : state_->requests)
      state_->finished.push_back({request.op, -ECANCELED});
    state_->requests.clear();
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) {
    if (thread.joinable()) thread.join();
  }
  while (state_->in_flight > 0) state_->deliver();
}

std::uint32_t IoThreads::count() const noexcept {
  return static_cast<std::uint32_t>(state_->threads.size());
}

std::size_t IoThreads::in_flight() const noexcept { return state_->in_flight; }

void IoThreads::submit(IoOp& op, int fd) {
  ZIGGURAT_CHECK(state_->reactor.on_reactor_thread() || state_->stopping,
                 "submit() outside the reactor's thread");
  ++state_->in_flight;
  state_->reactor.external_begin();
  {
    const std::lock_guard guard(state_->mutex);
    if (state_->stopping) {
      state_->finished.push_back({&op, -ECANCELED});  // the engine is being destroyed, so the owner
                                                      // gets the operation back
      return;
    }
    state_->requests.push_back({&op, fd});
  }
  state_->wake.notify_one();
}

}  // namespace ziggurat
