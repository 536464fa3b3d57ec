// SPDX-License-Identifier: Apache-2.0
// aio/uring_ring.cc: submissions gather in a queue and enter the kernel once per turn of the
// reactor. Completions are fetched when the eventfd is signalled.
//
// Under DEFER_TASKRUN the kernel signals the eventfd when it has work queued for this thread.
// Completions appear only once that work has run, and fetching runs it.
#include "aio/uring_ring.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

#include "aio/fork_closed.h"
#include "aio/refusals.h"
#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/runtime/work_ended.h"

namespace ziggurat {
namespace {

constexpr unsigned kBestFlags = IORING_SETUP_CLAMP | IORING_SETUP_R_DISABLED |
                                IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                                IORING_SETUP_TASKRUN_FLAG;
constexpr unsigned kPlainFlags = IORING_SETUP_CLAMP;
constexpr std::size_t kRegisteredChunkBytes = kGiB;  // the kernel takes no larger iovec
constexpr unsigned kReapBatch = 32;

/// A counter that a ring changes when it ends and reads when it is made. A ring's memory may lie
/// where another thread's ring was. The kernel orders the old ring's end before the new one's
/// beginning, but a data race detector sees only this counter.
std::atomic<std::uint64_t> rings_ended = 0;

std::string memlock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
}

void note_unregistered(std::span<std::byte> memory, const std::string& why) {
  note_degraded(
      "io_uring buffers",
      fmt::format("cannot register {} with io_uring, so transfers cost more CPU: {} "
                  "(RLIMIT_MEMLOCK is {}, shared by all processes of the user; raise it: ulimit -l "
                  "unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1)",
                  format_bytes(memory.size()), why, memlock_limit()));
}

}  // namespace

UringEngine::Ring::Ring(Reactor& reactor, const UringEngine& engine, std::uint32_t queue_depth)
    : reactor_(reactor), engine_(engine), queue_depth_(queue_depth), event_(reactor.context()) {
  entered_.reserve(queue_depth_);
  set_up();
}

UringEngine::Ring::~Ring() {
  if (ring_made_) end_ring();
}

void UringEngine::Ring::end_ring() {
  forget_for_children(ring_.ring_fd);
  rings_ended.fetch_add(1, std::memory_order_release);  // before another ring may lie there
  io_uring_queue_exit(&ring_);
  ring_made_ = false;
}

void UringEngine::Ring::set_up() {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw system_error(errno, "eventfd");
  flags_ = kBestFlags;
  int result = io_uring_queue_init(queue_depth_, &ring_, flags_);
  if (result == -EINVAL) {
    flags_ = kPlainFlags;
    result = io_uring_queue_init(queue_depth_, &ring_, flags_);
  }
  if (result != 0) throw system_error(-result, "io_uring_setup");
  // A child that had the ring, or its mapping, would keep the registered files open.
  static_cast<void>(io_uring_ring_dontfork(&ring_));
  close_in_children(ring_.ring_fd);
  static_cast<void>(rings_ended.load(std::memory_order_acquire));
  const auto check = [this](int registered, const char* what) {
    if (registered >= 0) return;
    forget_for_children(ring_.ring_fd);
    io_uring_queue_exit(&ring_);
    throw system_error(-registered, fmt::format("io_uring_register ({})", what));
  };
  check(io_uring_register_eventfd(&ring_, event.get()), "eventfd");
  // Sparse tables need Linux 5.19. Without them the kernel looks up the file and pins the pages at
  // every transfer.
  files_registrable_ = io_uring_register_files_sparse(&ring_, kRegisteredFilesMax + 1) == 0;
  buffers_registrable_ = io_uring_register_buffers_sparse(&ring_, kRegisteredBuffersMax) == 0;
  if ((flags_ & IORING_SETUP_SINGLE_ISSUER) != 0) check(register_witness(), "files");
  event_.assign(event.release());
  ring_made_ = true;
}

int UringEngine::Ring::register_witness() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return -errno;
  witness_ = UniqueFd(ends[0]);
  const UniqueFd held_by_ring(ends[1]);
  return io_uring_register_files_update(&ring_, kRegisteredFilesMax, &ends[1], 1);
}

std::string UringEngine::Ring::description() const {
  return fmt::format(
      "io_uring ({}{}{}queue depth {})",
      (flags_ & IORING_SETUP_DEFER_TASKRUN) != 0 ? "SINGLE_ISSUER, DEFER_TASKRUN, " : "",
      files_registrable_ ? "registered files, " : "",
      buffers_registered_ ? "registered buffers, " : "", queue_depth_);
}

bool UringEngine::Ring::on_ring_thread() const noexcept {
  return !enabled_ || (flags_ & IORING_SETUP_SINGLE_ISSUER) == 0 ||
         thread_ == std::this_thread::get_id();
}

void UringEngine::Ring::enable() {
  if (enabled_) return;
  if ((flags_ & IORING_SETUP_R_DISABLED) != 0) {
    // Makes the system call itself: liburing 2.3 declares io_uring_enable_rings() but does not
    // export it.
    const long result =
        ::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
    ZIGGURAT_CHECK(result == 0, "io_uring_register (enable rings): {}", errno_text(errno));
  }
  enabled_ = true;
  thread_ = std::this_thread::get_id();
  listen();
}

void UringEngine::Ring::listen() {
  event_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                    [ring = weak_from_this()](const boost::system::error_code& error) {
                      const auto self = ring.lock();
                      if (error || self == nullptr) return;  // the engine is gone
                      self->reap();
                      self->flush();
                      self->listen();
                    });
}

void UringEngine::Ring::submit(IoOp& op) {
  ZIGGURAT_CHECK(reactor_.on_reactor_thread() || draining_,
                 "submit() outside the reactor's thread");
  ++in_flight_;
  reactor_.external_begin();
  waiting_.push(op);
  if (!flush_posted_ && !draining_ && entered_.size() < queue_depth_) {
    flush_posted_ = true;
    boost::asio::post(reactor_.context(), [ring = weak_from_this()] {
      const auto self = ring.lock();
      if (self == nullptr) return;
      self->flush_posted_ = false;
      self->flush();
    });
  }
}

void UringEngine::Ring::flush() {
  if (waiting_.empty() && (!enabled_ || io_uring_sq_ready(&ring_) == 0)) return;
  enable();
  ZIGGURAT_CHECK(
      on_ring_thread(),
      "the ring belongs to the thread that first submitted; the reactor moved to another");
  while (!waiting_.empty() && entered_.size() < queue_depth_) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) break;  // the ring is full of entries that the kernel has not taken yet
    IoOp& op = *waiting_.pop();
    entered_.push_back(&op);
    prepare(*sqe, op);
  }
  push();
}

void UringEngine::Ring::push() {
  while (io_uring_sq_ready(&ring_) > 0) {
    const int result = io_uring_submit(&ring_);
    if (result > 0) {
      refusals_ = 0;
      continue;  // the kernel stops at an entry that fails at once; its completion has the error
    }
    // EAGAIN: there is no memory for requests. EBUSY: completions must be fetched first. Both pass.
    const bool passes = result == 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR;
    if (!passes || ++refusals_ > kRefusalsMax)
      return fail_unsubmitted(result == 0 ? -EAGAIN : result);
    if (std::exchange(retry_planned_, true)) return;
    reactor_.clock().after(kRefusalDelay, [ring = weak_from_this()] {
      const auto self = ring.lock();
      if (self == nullptr) return;
      self->retry_planned_ = false;
      self->reap();
      self->flush();
    });
    return;
  }
}

// Fails the entries that the kernel has not looked at yet. They become no-ops, so that a later
// submission cannot carry them out.
void UringEngine::Ring::fail_unsubmitted(int error) {
  refusals_ = 0;
  OpQueue failed;
  for (unsigned i = ring_.sq.sqe_tail - io_uring_sq_ready(&ring_); i != ring_.sq.sqe_tail; ++i) {
    io_uring_sqe& sqe = ring_.sq.sqes[i & *ring_.sq.kring_mask];
    auto* const op = reinterpret_cast<IoOp*>(static_cast<std::uintptr_t>(sqe.user_data));
    io_uring_prep_nop(&sqe);
    io_uring_sqe_set_data(&sqe, nullptr);
    if (op != nullptr) failed.push(*op);
  }
  while (IoOp* const op = failed.pop()) {
    leave(*op, error);
  }
}

void UringEngine::Ring::prepare(io_uring_sqe& sqe, IoOp& op) {
  const Descriptor descriptor = engine_.descriptor(op.file);
  const bool registered = register_file(op.file, descriptor);
  const int fd = registered ? op.file.id : descriptor.fd;
  const int buffer = registered_buffer(op);
  switch (op.kind) {
    case IoKind::kRead:
      if (buffer >= 0) {
        io_uring_prep_read_fixed(&sqe, fd, op.data, op.size_bytes, op.offset_bytes, buffer);
      } else {
        io_uring_prep_read(&sqe, fd, op.data, op.size_bytes, op.offset_bytes);
      }
      break;
    case IoKind::kWrite:
      if (buffer >= 0) {
        io_uring_prep_write_fixed(&sqe, fd, op.data, op.size_bytes, op.offset_bytes, buffer);
      } else {
        io_uring_prep_write(&sqe, fd, op.data, op.size_bytes, op.offset_bytes);
      }
      break;
    case IoKind::kSync: io_uring_prep_fsync(&sqe, fd, IORING_FSYNC_DATASYNC); break;
  }
  if (registered) io_uring_sqe_set_flags(&sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(&sqe, &op);
}

bool UringEngine::Ring::register_file(FileHandle file, const Descriptor& descriptor) {
  const auto slot = static_cast<unsigned>(file.id);
  if (!files_registrable_ || slot >= kRegisteredFilesMax) return false;
  if (files_[slot] == descriptor.serial) return true;
  if (io_uring_register_files_update(&ring_, slot, &descriptor.fd, 1) != 1) return false;
  files_[slot] = descriptor.serial;
  return true;
}

void UringEngine::Ring::forget_file(FileHandle file) {
  const auto slot = static_cast<unsigned>(file.id);
  if (!files_registrable_ || slot >= kRegisteredFilesMax) return;
  if (!on_ring_thread()) {
    // Until the reactor's thread has done this, the closed file stays open in the kernel. Its
    // serial keeps a later file of this handle from using it.
    boost::asio::post(reactor_.context(), [ring = weak_from_this(), file] {
      const auto self = ring.lock();
      if (self != nullptr && self->on_ring_thread()) self->forget_file(file);
    });
    return;
  }
  if (files_[slot] == 0) return;
  constexpr int kNone = -1;
  const int result = io_uring_register_files_update(&ring_, slot, &kNone, 1);
  if (result != 1) log().warn("io_uring: cannot unregister a closed file: {}", errno_text(-result));
  files_[slot] = 0;
}

int UringEngine::Ring::registered_buffer(const IoOp& op) const noexcept {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    if (buffer.data != nullptr && op.data >= buffer.data &&
        op.data + op.size_bytes <= buffer.data + buffer.size_bytes) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void UringEngine::Ring::register_memory(std::span<std::byte> memory) {
  if (!buffers_registrable_) {
    note_unregistered(memory, "this kernel has no sparse buffer tables (Linux 5.19)");
    return;
  }
  while (!memory.empty()) {
    const auto chunk = memory.first(std::min(memory.size(), kRegisteredChunkBytes));
    if (!register_chunk(chunk)) return;
    memory = memory.subspan(chunk.size());
  }
}

bool UringEngine::Ring::register_chunk(std::span<std::byte> chunk) {
  // A buffer that was registered at these addresses has been unmapped since: its registration holds
  // other pages than these.
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& old = buffers_[i];
    if (old.data == nullptr || old.data >= chunk.data() + chunk.size() ||
        chunk.data() >= old.data + old.size_bytes)
      continue;
    const iovec none{};
    const __u64 no_tag = 0;
    const int result =
        io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(i), &none, &no_tag, 1);
    ZIGGURAT_CHECK(result == 1, "io_uring_register (drop buffer {}): {}", i, errno_text(-result));
    old = {};
  }
  std::size_t slot = 0;
  while (slot < buffers_.size() && buffers_[slot].data != nullptr) ++slot;
  if (slot == kRegisteredBuffersMax) {
    note_unregistered(chunk, fmt::format("all {} places for registered buffers are taken",
                                         kRegisteredBuffersMax));
    return false;
  }
  const iovec area{chunk.data(), chunk.size()};
  const __u64 tag = 0;
  const int result =
      io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(slot), &area, &tag, 1);
  if (result != 1) {
    note_unregistered(chunk, errno_text(-result));
    return false;
  }
  if (slot == buffers_.size()) buffers_.emplace_back();
  buffers_[slot] = {chunk.data(), chunk.size()};
  buffers_registered_ = true;
  return true;
}

void UringEngine::Ring::reap() {
  std::array<io_uring_cqe*, kReapBatch> batch;
  struct Result {
    IoOp* op;
    std::int32_t result;
  };
  std::array<Result, kReapBatch> results;
  std::size_t empty_looks = 0;  // since the eventfd was cleared
  for (;;) {
    // Also runs the work that the kernel has queued for this thread.
    const unsigned count = io_uring_peek_batch_cqe(&ring_, batch.data(), kReapBatch);
    for (unsigned i = 0; i < count; ++i) {
      results[i] = {static_cast<IoOp*>(io_uring_cqe_get_data(batch[i])), batch[i]->res};
    }
    io_uring_cq_advance(&ring_, count);
    for (unsigned i = 0; i < count; ++i) {
      if (results[i].op == nullptr) continue;  // one of fail_unsubmitted()'s
      leave(*results[i].op, results[i].result);
    }
    if (count > 0) {
      empty_looks = 0;
      continue;
    }
    if (empty_looks > 0 && !may_have_work(empty_looks)) return;
    if (empty_looks++ == 0) clear_event();
  }
}

// The eventfd is cleared before the last look, so that a completion that comes meanwhile signals it
// again. Running the work has signalled it too, so without this each completion would wake the
// thread twice.
void UringEngine::Ring::clear_event() {
  std::uint64_t signals = 0;
  if (::read(event_.native_handle(), &signals, sizeof(signals)) >= 0) return;
  const int error = errno;
  ZIGGURAT_CHECK(error == EAGAIN || error == EINTR, "eventfd: {}", errno_text(error));
}

// The kernel's flag alone does not tell. It queues work, then raises the flag, and takes it back
// when it next runs work: a look between the two leaves the flag up over an empty queue, for as
// long as nothing else completes. A look runs one piece of the queue at least, and an operation has
// one at most.
bool UringEngine::Ring::may_have_work(std::size_t empty_looks) const {
  const unsigned flags = IO_URING_READ_ONCE(*ring_.sq.kflags);
  return (flags & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) != 0 &&
         empty_looks <= entered_.size() &&
         on_ring_thread();  // no other thread can run that work: see drain()
}

void UringEngine::Ring::leave(IoOp& op, std::int32_t result) {
  const auto place = std::find(entered_.begin(), entered_.end(), &op);
  ZIGGURAT_CHECK(place != entered_.end(),
                 "the kernel completed an operation that was not submitted");
  *place = entered_.back();
  entered_.pop_back();
  finish(op, result);
}

void UringEngine::Ring::finish(IoOp& op, std::int32_t result) {
  --in_flight_;
  work_ended(reactor_);
  op.complete(op, result);
}

void UringEngine::Ring::drain() {
  draining_ = true;
  boost::system::error_code ignored;  // nothing waits on the event any more
  static_cast<void>(event_.cancel(ignored));
  if (enabled_) fail_unsubmitted(-ECANCELED);
  while (in_flight_ > 0) {
    while (IoOp* const op = waiting_.pop()) finish(*op, -ECANCELED);
    if (entered_.empty()) continue;
    if (!on_ring_thread()) {
      reap();  // takes what had already completed
      abandon();
      continue;
    }
    io_uring_cqe* cqe = nullptr;
    const int result = io_uring_wait_cqe(&ring_, &cqe);
    ZIGGURAT_CHECK(result == 0 || result == -EINTR || result == -EAGAIN, "io_uring_enter: {}",
                   errno_text(-result));
    reap();
  }
}

// Ends the ring after the only thread that may fetch completions has ended. Once the ring is
// closed, the kernel finishes its requests some time later. It lets go of the registered files
// last, and the pipe's other end shows when.
void UringEngine::Ring::abandon() {
  end_ring();
  char end = 0;
  ssize_t count = 0;
  do {
    count = ::read(witness_.get(), &end, sizeof(end));
  } while (count < 0 && errno == EINTR);
  ZIGGURAT_CHECK(count == 0, "witness of the ring's end: {}", errno_text(errno));
  while (!entered_.empty()) leave(*entered_.back(), -ECANCELED);
}

}  // namespace ziggurat
