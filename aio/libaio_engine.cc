// SPDX-License-Identifier: Apache-2.0
// aio/libaio_engine.cc: submissions gather in a queue and enter the kernel once per turn of the
// reactor. When the eventfd is signalled, all completions are fetched.
#include "aio/libaio_engine.h"

#include <fmt/format.h>
#include <libaio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

#include "aio/io_threads.h"
#include "aio/op_queue.h"
#include "aio/refusals.h"
#include "base/check.h"
#include "base/error.h"
#include "base/runtime/work_ended.h"

namespace ziggurat {
namespace {

constexpr int kBatch = 32;

}  // namespace

class LibaioEngine::Context : public std::enable_shared_from_this<LibaioEngine::Context> {
 public:
  /// Errors: Error from io_setup or the eventfd.
  Context(Reactor& reactor, const LibaioEngine& engine, std::uint32_t queue_depth);
  ~Context();
  Context(const Context&) = delete;

  void listen();
  void submit(IoOp& op);
  /// Completes everything: see ~LibaioEngine.
  void drain();
  std::uint32_t queue_depth() const noexcept { return queue_depth_; }
  std::size_t in_flight() const noexcept { return in_flight_ + threads_.in_flight(); }

 private:
  void flush();
  int prepare(std::array<iocb, kBatch>& requests) const;
  void plan_retry();
  int fetch(int least);
  void finish(IoOp& op, std::int32_t result);

  Reactor& reactor_;
  const LibaioEngine& engine_;
  std::uint32_t queue_depth_;
  io_context_t context_ = nullptr;
  boost::asio::posix::stream_descriptor event_;
  int event_fd_ = -1;  // event_'s
  IoThreads threads_;

  OpQueue waiting_;
  std::size_t entered_ = 0;    // given to the kernel and not completed yet; at most queue_depth_
  std::size_t in_flight_ = 0;  // entered_ and those in waiting_
  bool flush_posted_ = false;
  bool draining_ = false;
  int refusals_ = 0;  // refusals of io_submit in a row
  bool retry_planned_ = false;
};

LibaioEngine::Context::Context(Reactor& reactor, const LibaioEngine& engine,
                               std::uint32_t queue_depth)
    : reactor_(reactor),
      engine_(engine),
      queue_depth_(queue_depth),
      event_(reactor.context()),
      threads_(reactor, kThreads) {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw system_error(errno, "libaio: eventfd");
  const int result = ::io_setup(static_cast<int>(queue_depth_), &context_);
  if (result != 0) throw system_error(-result, "libaio: io_setup");
  event_fd_ = event.get();
  event_.assign(event.release());
}

LibaioEngine::Context::~Context() {
  static_cast<void>(::io_destroy(context_));  // has no requests any more; fails only for a wrong
                                              // argument
}

void LibaioEngine::Context::listen() {
  event_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                    [weak = weak_from_this()](const boost::system::error_code& error) {
                      const auto self = weak.lock();
                      if (error || self == nullptr) return;  // the engine is gone
                      // The eventfd is cleared before the completions are fetched, so that a
                      // completion that comes meanwhile signals it again.
                      std::uint64_t signals = 0;
                      if (::read(self->event_fd_, &signals, sizeof(signals)) < 0) {
                        ZIGGURAT_CHECK(errno == EAGAIN || errno == EINTR, "eventfd: {}",
                                       errno_text(errno));
                      }
                      while (self->fetch(0) == kBatch) {
                      }
                      self->flush();
                      self->listen();
                    });
}

void LibaioEngine::Context::submit(IoOp& op) {
  ZIGGURAT_CHECK(reactor_.on_reactor_thread() || draining_,
                 "submit() outside the reactor's thread");
  const Descriptor descriptor = engine_.descriptor(op.file);
  if ((op.kind == IoKind::kSync || !descriptor.direct) && !draining_) {
    return threads_.submit(op, descriptor.fd);
  }
  ++in_flight_;
  reactor_.external_begin();
  waiting_.push(op);
  if (flush_posted_ || draining_ || entered_ >= queue_depth_) return;
  flush_posted_ = true;
  boost::asio::post(reactor_.context(), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->flush_posted_ = false;
    self->flush();
  });
}

/// Fills `requests` with the first waiting operations, as many as may enter the kernel. Returns how
/// many.
int LibaioEngine::Context::prepare(std::array<iocb, kBatch>& requests) const {
  int count = 0;
  for (IoOp* op = waiting_.front();
       op != nullptr && count < kBatch && entered_ + static_cast<std::size_t>(count) < queue_depth_;
       op = op->next) {
    iocb& request = requests[static_cast<std::size_t>(count++)];
    const int fd = engine_.descriptor(op->file).fd;
    const auto fill = op->kind == IoKind::kRead ? ::io_prep_pread : ::io_prep_pwrite;
    fill(&request, fd, op->data, op->size_bytes, static_cast<long long>(op->offset_bytes));
    ::io_set_eventfd(&request, event_fd_);
    request.data = op;
  }
  return count;
}

void LibaioEngine::Context::flush() {
  while (!waiting_.empty() && entered_ < queue_depth_ && !retry_planned_) {
    std::array<iocb, kBatch> requests;
    std::array<iocb*, kBatch> list;
    const int count = prepare(requests);
    std::transform(requests.begin(), requests.end(), list.begin(),
                   [](iocb& each) { return &each; });
    const int result = ::io_submit(context_, count, list.data());
    if (result > 0) {  // the kernel took the first few; the next call says why not the rest
      refusals_ = 0;
      entered_ += static_cast<std::size_t>(result);
      for (int i = 0; i < result; ++i) waiting_.pop();
      continue;
    }
    const bool passes = result == 0 || result == -EAGAIN || result == -EINTR;
    if (passes && ++refusals_ <= kRefusalsMax) return plan_retry();
    refusals_ = 0;
    finish(*waiting_.pop(), result == 0 ? -EAGAIN : result);  // the error says nothing about the
                                                              // next operation
  }
}

void LibaioEngine::Context::plan_retry() {
  retry_planned_ = true;
  reactor_.clock().after(kRefusalDelay, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->retry_planned_ = false;
    self->flush();
  });
}

/// Waits for `least` completions and takes at most kBatch. Returns how many.
int LibaioEngine::Context::fetch(int least) {
  std::array<io_event, kBatch> events;
  timespec no_time{};
  const int count =
      ::io_getevents(context_, least, kBatch, events.data(), least == 0 ? &no_time : nullptr);
  if (count == -EINTR) return 0;
  ZIGGURAT_CHECK(count >= 0, "io_getevents: {}", errno_text(-count));
  for (int i = 0; i < count; ++i) {
    const io_event& event = events[static_cast<std::size_t>(i)];
    --entered_;
    // libaio's type is unsigned, although the kernel's result is -errno or a count.
    finish(*static_cast<IoOp*>(event.data),
           static_cast<std::int32_t>(static_cast<long>(event.res)));
  }
  return count;
}

void LibaioEngine::Context::finish(IoOp& op, std::int32_t result) {
  --in_flight_;
  work_ended(reactor_);
  op.complete(op, result);
}

void LibaioEngine::Context::drain() {
  draining_ = true;
  boost::system::error_code ignored;  // nothing waits on the event any more
  static_cast<void>(event_.cancel(ignored));
  threads_.drain();
  while (in_flight_ > 0) {
    while (IoOp* const op = waiting_.pop()) finish(*op, -ECANCELED);
    if (entered_ > 0) fetch(1);
  }
}

std::unique_ptr<LibaioEngine> LibaioEngine::create(Reactor& reactor, std::uint32_t queue_depth) {
  ZIGGURAT_CHECK(queue_depth > 0, "queue depth {}", queue_depth);
  std::unique_ptr<LibaioEngine> engine(new LibaioEngine());
  engine->context_ = std::make_shared<Context>(reactor, *engine, queue_depth);
  engine->context_->listen();
  return engine;
}

LibaioEngine::~LibaioEngine() {
  if (context_ != nullptr) context_->drain();
}

std::string LibaioEngine::description() const {
  return fmt::format("libaio (queue depth {}, fdatasync on threads)", queue_depth());
}

std::uint32_t LibaioEngine::queue_depth() const noexcept { return context_->queue_depth(); }

std::size_t LibaioEngine::in_flight() const noexcept { return context_->in_flight(); }

void LibaioEngine::submit(IoOp& op) { context_->submit(op); }

}  // namespace ziggurat
